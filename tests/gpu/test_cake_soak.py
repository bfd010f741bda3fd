"""Is every one of many rounds exact when the ranks' GPU work drifts apart at random places?

MOE_EP_SOAK_ROUNDS: how many rounds each test plays.
"""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

from moe_ep import MoEEpCommParams
from tests.backends import Backend, on_shared_gpus
from tests.conftest import RunOnRanks
from tests.gpu.device_rounds import Verdict, expected_sums, partial_rows, tokens_of
from tests.ranks import RankContext
from tests.rounds import create

ROUNDS = int(os.environ.get("MOE_EP_SOAK_ROUNDS", "200"))
SECONDS = 60 + ROUNDS / 5
# Steps of a few tokens and of many take different ways through the kernels.
TOKENS = (1, 2, 4, 8, 8, 16, 64, 160, 512)
CHECK_EVERY = 100

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.slow,
    pytest.mark.timeout(60 + SECONDS),
]


class Delays:
    """Holds up one rank's GPU, more rarely its host, for a random time at random places."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def maybe(self) -> None:
        kind = self._random.random()
        if kind < 0.5:
            return
        if kind < 0.97:
            most = 200_000 if kind < 0.85 else 2_000_000  # clock cycles: 0.1 ms, 1 ms
            torch.cuda._sleep(self._random.randrange(1, most))  # type: ignore[no-untyped-call]
        else:
            time.sleep(self._random.uniform(0, 0.003))


def soak(context: RankContext, backend: str, params: MoEEpCommParams, rounds: int) -> None:
    """Body: no two rounds are alike, and the host waits for the device only now and then."""
    rank, size = context.rank, context.size
    plan = random.Random(size)  # the same on every rank
    delays = Delays(100 * size + rank)
    with create(context, params, backend) as communication:
        device = communication.device
        verdict = Verdict(params, size, rank, rounds, device)
        for index in range(rounds):
            most = plan.choice(TOKENS)
            counts = [plan.randint(0, most) for _ in range(size)]
            with_weights = plan.random() < 0.8
            zero_copy = plan.random() < 0.5
            sent = [tokens_of(params, index, r, n, device) for r, n in enumerate(counts)]
            mine = sent[rank]
            delays.maybe()
            result = communication.dispatch(
                mine.hidden_states,
                mine.topk_ids,
                mine.topk_weights if with_weights else None,
                runtime_max_tokens_per_rank=most,
            )
            delays.maybe()
            verdict.judge_dispatch(index, result, sent)
            partial = partial_rows(params, size, rank, result)
            buffer = communication.get_combine_input_buffer() if zero_copy else None
            if buffer is not None:
                partial = buffer.copy_(partial)
            delays.maybe()
            combined = communication.combine(partial)
            delays.maybe()
            wanted = expected_sums(params, size, mine, with_weights=with_weights)
            verdict.judge_sums(index, combined, wanted)
            if index % CHECK_EVERY == CHECK_EVERY - 1:
                communication.check()
                verdict.require()
        communication.check()
        verdict.require()


@on_shared_gpus
@pytest.mark.parametrize(
    ("size", "params"),
    [
        (2, MoEEpCommParams(64, 8, 512, 2048)),
        (4, MoEEpCommParams(30, 6, 512, 1001, torch.float16)),
        (8, MoEEpCommParams(256, 8, 512, 1024)),
    ],
    ids=["2 ranks", "4 ranks, odd rows", "8 ranks"],
)
def test_no_round_is_wrong_however_the_ranks_drift(
    ranks: RunOnRanks, backend: Backend, device: str, size: int, params: MoEEpCommParams
) -> None:
    ranks(
        size,
        soak,
        device=device,
        seconds=SECONDS,
        backend=backend.name,
        params=params,
        rounds=ROUNDS,
    )
