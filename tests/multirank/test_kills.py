"""A rank is killed anywhere in its rounds: do all others raise soon, name it, and leave?

MOE_EP_KILLS sets how many are killed for each backend, 3 by default. With 67, and `pytest -s`, it
kills 200 in a quarter of an hour, and prints how long the errors took.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from moe_ep import BootstrapConfig, MoEEpCommParams, MoEEpTimeoutError, create_communication
from tests.backends import Backend, on_the_cpu
from tests.conftest import RunOnRanks
from tests.ranks import RankContext
from tests.rounds import random_round

pytestmark = [pytest.mark.multirank, pytest.mark.slow]
KILLS = int(os.environ.get("MOE_EP_KILLS", "3"))
SIZE = 4
BUDGET = 60
SOON = 20  # on a machine with other work; without, a few tenths of a second
# What a round moves: from nearly nothing, so that the kill falls between rounds or in a wait, to
# many MiB, so that it falls among rows.
SIZES = [
    MoEEpCommParams(8, 4, 3, 16),
    MoEEpCommParams(8, 4, 60, 512),
    MoEEpCommParams(8, 4, 300, 4096),
]


def play_until_a_rank_is_killed(
    context: RankContext, backend: str, seed: int, killed_at: str
) -> tuple[str, float]:
    """Body: return the error and when it was raised."""
    chance = random.Random(seed)
    params, victim = SIZES[seed % len(SIZES)], chance.randrange(context.size)
    after = chance.uniform(0, 0.25)
    bootstrap = BootstrapConfig(context.size, context.rank, device=context.device)
    communication = create_communication(bootstrap, params, backend, timeout_sec=BUDGET)
    one = random_round(params, [params.max_tokens_per_rank] * context.size, seed, padding=0)
    rows, ids = one.hidden_states[context.rank], one.topk_ids[context.rank]

    def die() -> None:
        Path(killed_at).write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    if context.rank == victim:
        threading.Timer(after, die).start()
    jitter = random.Random(seed + context.rank)
    try:
        while True:
            received = communication.dispatch(rows, ids)
            if jitter.random() < 0.3:
                time.sleep(jitter.uniform(0, 0.003))
            communication.combine(torch.zeros_like(received.hidden_states))
    except MoEEpTimeoutError as missed:
        return str(missed), time.monotonic()


@on_the_cpu
@pytest.mark.timeout(300 + 15 * KILLS)
def test_every_survivor_of_a_kill_raises_soon_names_a_rank_and_leaves(
    ranks: RunOnRanks, backend: Backend, device: str, tmp_path: Path
) -> None:
    first_errors, last_errors = [], []
    for seed in range(KILLS):
        killed_at = tmp_path / f"{seed}.txt"
        victim = random.Random(seed).randrange(SIZE)
        outcomes = ranks(
            SIZE,
            play_until_a_rank_is_killed,
            device=device,
            dedicated=True,
            backend=backend.name,
            seed=seed,
            killed_at=str(killed_at),
        )
        where = f"kill {seed} of {backend}: {outcomes}"
        assert outcomes[victim].exit_code == -signal.SIGKILL, where
        survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
        assert all(outcome.error is None and outcome.exit_code == 0 for outcome in survivors), where
        # Over Gloo a survivor may see first that another one has let go.
        named = r"for rank \d"
        if backend.workspace:
            named = rf"rank {victim}\b.*, whose process has ended"
        for outcome in survivors:
            assert re.search(named, outcome.value[0]), where
        then = float(killed_at.read_text())
        times = [outcome.value[1] - then for outcome in survivors]
        assert max(times) < (SOON if backend.workspace else BUDGET + 5), where
        first_errors.append(min(times))
        last_errors.append(max(times))
    first, last = (sorted(errors) for errors in (first_errors, last_errors))
    print(f"\n{backend}: {KILLS} kills; seconds from the kill")
    for which, seconds in (("first", first), ("last", last)):
        middle, most = seconds[KILLS // 2], seconds[-1]
        print(f"  to the {which} error: median {middle:.3f}, at most {most:.3f}")
