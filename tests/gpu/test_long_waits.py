"""Does a kernel that waits for several ranks find out the one that will not come?"""

from __future__ import annotations

import time

import pytest

from moe_ep import MoEEpCommParams, MoEEpTimeoutError
from tests.backends import SHARED_GPUS, Backend, on_each
from tests.conftest import RunOnRanks
from tests.problems import Problem, expect, problem_of
from tests.ranks import RankContext
from tests.rounds import create, play_round, random_round

pytestmark = pytest.mark.multirank
BUDGET = 30
SLOW, WAITING, GONE = range(3)


def wait_for_a_slow_rank_and_one_that_left(
    context: RankContext, backend: str, params: MoEEpCommParams
) -> tuple[Problem | None, float]:
    """Body: what the waiting rank gets, and after how long; the slow one comes after that."""
    size = context.size
    counts = [params.max_tokens_per_rank] * size
    one = create(context, params, backend, timeout_sec=BUDGET)
    play_round(one, random_round(params, counts, 0))
    context.barrier()
    if context.rank == GONE:
        one.destroy()
    context.barrier()
    problem, started = None, time.monotonic()
    if context.rank == WAITING:
        problem = problem_of(lambda: play_round(one, random_round(params, counts, 1)))
    seconds = time.monotonic() - started
    context.barrier()
    one.destroy()
    return problem, seconds


@on_each(having="one_sided", devices=SHARED_GPUS)
@pytest.mark.parametrize("capacity", [7, 40, 600])  # packets, direct, many
def test_one_that_left_is_not_hidden_behind_one_that_is_slow(
    ranks: RunOnRanks, backend: Backend, device: str, capacity: int
) -> None:
    params = MoEEpCommParams(9, 4, capacity, 64)
    results = ranks(
        3,
        wait_for_a_slow_rank_and_one_that_left,
        device=device,
        backend=backend.name,
        params=params,
    )
    problem, seconds = results[WAITING]
    assert problem is not None
    expect(problem, MoEEpTimeoutError, [f"rank {GONE}", "destroyed"])
    assert seconds < BUDGET / 3
