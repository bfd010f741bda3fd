"""Are rank masks that differ between the ranks found out, soon and by all whom it concerns?"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist

from moe_ep import MoEEpCommParams, MoEEpMaskDisagreementError, MoEEpStateError
from moe_ep.cake.kernels import active_rank_mask
from tests.backends import Backend, on_each
from tests.conftest import RunOnRanks
from tests.multirank.test_reinitialize import masked_round
from tests.problems import Problem, expect, problem_of
from tests.ranks import RankContext
from tests.ranks.devices import CPU
from tests.rounds import Played, check, create, play_round

pytestmark = pytest.mark.multirank
PARAMS = MoEEpCommParams(10, 4, 7, 24)
BUDGET = 60

Masks = Mapping[int, Sequence[int]]


def disagree(
    context: RankContext, backend: str, masks: Masks, late: Sequence[int], in_time_return: bool
) -> tuple[Problem | None, float, Played | None, Played]:
    """Body: each rank plays a round with its own mask, those without one do not, and the late ones
    when the others have returned, or, where these wait for them, have sent them something; then all
    begin anew. Returns what the round raised, after how long, or brought; and a round of all.
    """
    size, rank = context.size, context.rank
    with create(
        context, PARAMS, backend, timeout_sec=BUDGET, enable_rank_mask=True
    ) as communication:
        play_round(communication, masked_round(range(size), size, 0))
        memory = communication._shared.tensor[rank]
        as_it_was = memory.clone()
        context.barrier()
        problem, played = None, []
        if rank in late and in_time_return:
            context.barrier()
        while rank in late and not in_time_return and memory.equal(as_it_was):
            time.sleep(0.01)
        started = time.monotonic()
        if rank in masks:
            one = masked_round(masks[rank], size, 1)
            problem = problem_of(lambda: played.append(play_round(communication, one)))
            if problem is not None:
                expect(problem_of(communication.check), MoEEpStateError, ["broken"])
        seconds = time.monotonic() - started
        if rank not in late and in_time_return:
            context.barrier()
        context.barrier()
        communication.reinitialize()
        after = play_round(communication, masked_round(range(size), size, 2))
    return problem, seconds, played[0] if played else None, after


def words_of(masks: Masks, rank: int) -> list[str]:
    def words(peer: int) -> str:
        given = ", ".join(map(str, masks[peer])) if peer in masks else "none yet"
        return f"rank {peer}: {given}"

    return [words(peer) for peer in masks[rank]]


STORIES: dict[str, tuple[Masks, Sequence[int], Sequence[int]]] = {
    # each rank's mask; the ranks that are late; those that are fine
    "one masks another": ({0: (0, 1, 2), 1: (0, 1), 2: (0, 1, 2)}, (), ()),
    "one masks another, which is before it": ({0: (0, 1, 2), 1: (0, 1, 2), 2: (1, 2)}, (), ()),
    "nobody answers the masked one": ({0: (0,), 1: (0, 1)}, (1,), (0,)),
    "the masked one has sent already": ({0: (0,), 1: (0, 1)}, (0,), ()),
    "two go on without the third": ({0: (0, 1, 2), 1: (1, 2), 2: (1, 2)}, (0,), (1, 2)),
    "the third has sent to two already": ({0: (0, 1, 2), 1: (1, 2), 2: (1, 2)}, (1, 2), ()),
    "each masks another": ({0: (0, 1), 1: (1, 2), 2: (0, 2)}, (), ()),
    "one has not heard who is away": ({0: (0, 1, 2), 1: (0, 1, 2, 3), 2: (0, 1, 2)}, (), ()),
}


@on_each(having="masks", devices=(CPU,))
@pytest.mark.parametrize("story", STORIES)
def test_masks_that_differ_are_found_out_by_all_whom_it_concerns(
    ranks: RunOnRanks, backend: Backend, device: str, story: str
) -> None:
    masks, late, fine = STORIES[story]
    size = 1 + max(rank for mask in masks.values() for rank in mask)
    how = {"backend": backend.name, "masks": masks, "late": late, "in_time_return": bool(fine)}
    results = ranks(size, disagree, device=device, **how)
    for rank, (problem, seconds, _, _) in enumerate(results):
        if rank not in masks or rank in fine:
            assert problem is None, problem
            continue
        expect(problem, MoEEpMaskDisagreementError, words_of(masks, rank))
        assert seconds < BUDGET / 3
    if fine:
        one = masked_round(fine, size, 1)
        check(PARAMS, one, [played for _, _, played, _ in results])
    everyone = masked_round(range(size), size, 2)
    check(PARAMS, everyone, [after for *_, after in results])


def race(context: RankContext, backend: str, races: int) -> list[Played | None]:
    """Body: rank 0 masks rank 1, which counts on it, at about the same time. Returns what rank 0
    got where it raised nothing; rank 1 always raises.
    """
    size, rank, jitter = context.size, context.rank, random.Random(context.rank)
    got: list[Played | None] = []
    with create(
        context, PARAMS, backend, timeout_sec=BUDGET, enable_rank_mask=True
    ) as communication:
        for seed in range(races):
            one = masked_round(range(rank + 1), size, seed)
            context.barrier()
            time.sleep(jitter.uniform(0, 0.0002))
            played: list[Played] = []
            problem = problem_of(lambda: played.append(play_round(communication, one)))  # noqa: B023
            if rank == 1 or problem is not None:
                expect(problem, MoEEpMaskDisagreementError, ["rank 0: 0", "rank 1: 0, 1"])
            got.append(played[0] if played else None)
            communication.reinitialize()
    return got


@on_each(having="masks", devices=(CPU,))
def test_a_rank_that_is_written_to_by_one_that_it_masks_has_right_data_or_an_error(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    races = 60
    results = ranks(2, race, device=device, backend=backend.name, races=races)
    for seed, played in enumerate(results[0]):
        check(PARAMS, masked_round([0], 2, seed), [played, None])
    assert results[1] == [None] * races


WIDE = MoEEpCommParams(2, 1, 256, 8192, dtype=torch.float32)


def go_on_without_a_rank_that_reads(
    context: RankContext, backend: str, attempts: int
) -> tuple[int, int]:
    """Body: rank 1 adds many rows of rank 0, which holds it there, goes on without it, and writes
    others over them. Returns how often rank 1 got its sums, and how often an error.
    """
    rank, sums, errors = context.rank, 0, 0
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid(), group=context.group)
    ids = torch.zeros((256 * rank, 1), dtype=torch.int32)
    everyone, alone = (active_rank_mask(active, 2) for active in ((0, 1), (0,)))
    with create(context, WIDE, backend, timeout_sec=BUDGET, enable_rank_mask=True) as communication:
        for _ in range(attempts):
            communication.dispatch(torch.ones(len(ids), 8192), ids, active_rank_mask=everyone)
            rows = communication.get_combine_input_buffer()
            assert rows is not None
            rows.fill_(1)
            context.barrier()
            total: list[torch.Tensor] = []
            combine = partial(communication.combine, rows, active_rank_mask=everyone)
            problem = problem_of(lambda: total.append(combine()))  # noqa: B023
            if rank == 0:
                os.kill(pids[1], signal.SIGSTOP)  # among its rows, or when it has read them all
            if problem is None:
                assert (total[0] == 1).all()
                sums += 1
            else:
                assert rank == 1
                words = ["rank 0 masked rank 1 off while it was in combine"]
                expect(problem, MoEEpMaskDisagreementError, words)
                errors += 1
            if rank == 0:
                communication.dispatch(torch.ones(0, 8192), ids, active_rank_mask=alone)
                again = communication.get_combine_input_buffer()
                assert again is not None
                communication.combine(again.fill_(2), active_rank_mask=alone)
                os.kill(pids[1], signal.SIGCONT)
            communication.reinitialize()
    return sums, errors


@on_each(having="masks", devices=(CPU,))
def test_a_rank_that_is_masked_off_while_it_reads_has_its_sums_or_an_error(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    attempts = 20
    results = ranks(
        2, go_on_without_a_rank_that_reads, device=device, backend=backend.name, attempts=attempts
    )
    assert results[0] == (attempts, 0)
    sums, errors = results[1]
    assert sums + errors == attempts
    assert errors > 0
