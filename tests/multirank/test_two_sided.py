"""Do the FIFOs of nvlink_two_sided hold where the contract's tests do not look?"""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
import torch

from moe_ep import MoEEpCommParams, MoEEpTimeoutError, NVLinkTwoSidedConfig
from moe_ep.nvlink_two_sided.workspace import geometry_of
from tests.conftest import RunOnRanks
from tests.ranks import RankContext
from tests.rounds import Played, Round, check_all, create, play, play_round, random_round

pytestmark = pytest.mark.multirank
BACKEND = NVLinkTwoSidedConfig.backend_name


def test_steps_much_larger_than_a_fifo_are_exact(ranks: RunOnRanks) -> None:
    params = MoEEpCommParams(8, 4, 600, 2048)
    geometry = geometry_of(params, 4, torch.device("cpu"))
    assert 300 * params.dispatch_bytes_per_token > geometry.num_slots * geometry.slot_bytes
    rounds = [
        random_round(params, n, seed, padding=0)
        for seed, n in enumerate([(600, 599, 0, 600), (600, 600, 600, 600)])
    ]
    played = ranks(4, play, backend=BACKEND, params=params, rounds=rounds)
    check_all(params, rounds, played)


def test_fifos_of_a_rank_have_a_limit_together() -> None:
    params = MoEEpCommParams(256, 8, 8192, 7168)
    for device in map(torch.device, ("cpu", "cuda")):
        sizes = [
            geometry_of(params, ep_size, device).segment_bytes for ep_size in (1, 2, 8, 9, 64, 256)
        ]
        assert all(size < 9 * 2**20 for size in sizes), sizes


def take_turns(context: RankContext, params: MoEEpCommParams, rounds: list[Round]) -> list[Played]:
    """Body: two objects take turns in one workspace, which is released and restored between."""
    with create(context, params, BACKEND) as one, create(context, params, BACKEND) as other:
        assert one._workspace.data_ptr() == other._workspace.data_ptr()
        played = [play_round(one, rounds[0]), play_round(other, rounds[1])]
        size = one.workspace_bytes
        one.checkpoint_prepare()
        assert (one.workspace_bytes, other.workspace_bytes) == (0, 0)
        other.checkpoint_restore()
        assert (one.workspace_bytes, other.workspace_bytes) == (size, size)
        return [*played, play_round(other, rounds[2]), play_round(one, rounds[3])]


def test_objects_share_the_fifos_and_give_them_back(ranks: RunOnRanks) -> None:
    params = MoEEpCommParams(7, 3, 40, 300)
    counts = [(40, 3, 0), (1, 1, 1), (0, 40, 7), (40, 40, 40)]
    rounds = [random_round(params, n, seed) for seed, n in enumerate(counts)]
    check_all(params, rounds, ranks(3, take_turns, params=params, rounds=rounds))


def lose_a_peer(context: RankContext, budget: int, victim: int, after: float) -> object:
    """Body: play large rounds until a peer has died, at whatever place that is."""
    params = MoEEpCommParams(8, 4, 700, 4096)
    one = random_round(params, [700] * context.size, seed=1, padding=0)
    rows, ids = one.hidden_states[context.rank], one.topk_ids[context.rank]
    communication = create(context, params, BACKEND, timeout_sec=budget)
    partial = torch.zeros(context.size * 700, 4096, dtype=torch.bfloat16)
    if context.rank == victim:
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    last_return = time.monotonic()
    try:
        while True:
            communication.dispatch(rows, ids)
            last_return = time.monotonic()
            communication.combine(partial)
            last_return = time.monotonic()
    except MoEEpTimeoutError as raised:
        return str(raised), time.monotonic() - last_return


@pytest.mark.parametrize("seconds", [0.31, 0.402, 0.525])
def test_a_peer_that_dies_at_any_place_is_named_in_time(ranks: RunOnRanks, seconds: float) -> None:
    budget = 60  # it is not the deadline that tells
    outcomes = ranks(3, lose_a_peer, dedicated=True, budget=budget, victim=1, after=seconds)
    survivors = [outcomes[rank] for rank in (0, 2)]
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in survivors:
        assert outcome.error is None, outcome.error
        assert outcome.exit_code == 0
        # Also one who was told that the round goes on, and then waits for the other one.
        error = outcome.value[0]
        assert re.search(r"rank 1\b.*, whose process has ended\.", error), error
        assert outcome.value[1] < 20  # soon, on a machine with other work
