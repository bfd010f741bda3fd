"""Are rank masks that differ between the ranks found out on GPUs, by all who could get wrong data?

On the CPU a rank looks at its peers' masks before it sends them anything. A kernel looks at what
arrives, and at a peer that it waits for long: so one that masks another off goes on undisturbed,
and the other raises.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pytest
import torch

from moe_ep import MoEEpCommParams, MoEEpMaskDisagreementError, MoEEpStateError
from moe_ep.cake.kernels import active_rank_mask
from tests.backends import SHARED_GPUS, Backend, on_each
from tests.conftest import RunOnRanks
from tests.multirank.test_reinitialize import masked_round
from tests.problems import Problem, expect, problem_of
from tests.ranks import RankContext
from tests.ranks.devices import ONE_GPU
from tests.rounds import Played, check, create, play_round

pytestmark = pytest.mark.multirank
BUDGET = 30

Masks = Mapping[int, Sequence[int]]
# Packets, rows stored directly, and rows by the copy engine or from a counter.
CAPACITIES = (7, 40, 600)


def params_of(capacity: int) -> MoEEpCommParams:
    return MoEEpCommParams(10, 4, capacity, 64)


def disagree(
    context: RankContext, backend: str, masks: Masks, late: Sequence[int], capacity: int
) -> tuple[Problem | None, float, Played | None, Played]:
    """Body: each rank plays a round with its own mask, the late ones when the others are done with
    it; then all begin anew. Returns what the round raised, after how long, or brought; and a round
    of all.
    """
    size, rank, params = context.size, context.rank, params_of(capacity)
    with create(context, params, backend, timeout_sec=BUDGET, enable_rank_mask=True) as one:
        play_round(one, masked_round(range(size), size, 0, params))
        context.barrier()
        if rank in late:
            context.barrier()
        played: list[Played] = []
        started = time.monotonic()
        mine = masked_round(masks[rank], size, 1, params)
        problem = problem_of(lambda: played.append(play_round(one, mine)))
        seconds = time.monotonic() - started
        if problem is not None:
            expect(problem_of(one.check), MoEEpStateError, ["broken"])
        if rank not in late:
            context.barrier()
        context.barrier()
        one.reinitialize()
        after = play_round(one, masked_round(range(size), size, 2, params))
    return problem, seconds, played[0] if played else None, after


STORIES: dict[str, tuple[Masks, Sequence[int], Sequence[int]]] = {
    # each rank's mask; the ranks that are late; those that are fine
    "one masks another": ({0: (0, 1, 2), 1: (0, 1), 2: (0, 1, 2)}, (), ()),
    "one masks another, which is before it": ({0: (0, 1, 2), 1: (0, 1, 2), 2: (1, 2)}, (), ()),
    "nobody answers the masked one": ({0: (0,), 1: (0, 1)}, (1,), (0,)),
    "two go on without the third": ({0: (0, 1, 2), 1: (1, 2), 2: (1, 2)}, (0,), (1, 2)),
    "each masks another": ({0: (0, 1), 1: (1, 2), 2: (0, 2)}, (), ()),
}


@on_each(having="masks", devices=SHARED_GPUS)
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("story", STORIES)
def test_masks_that_differ_are_found_out_by_all_who_wait_for_another(
    ranks: RunOnRanks, backend: Backend, device: str, story: str, capacity: int
) -> None:
    masks, late, fine = STORIES[story]
    size = len(masks)
    how = {"backend": backend.name, "masks": masks, "late": late, "capacity": capacity}
    results = ranks(size, disagree, device=device, **how)
    for rank, (problem, seconds, _, _) in enumerate(results):
        if rank in fine:
            assert problem is None, problem
            continue
        expect(problem, MoEEpMaskDisagreementError, [f"found by rank {rank}", "reinitialize"])
        assert problem is not None
        table = problem[1].split("\n")[1:-1]
        found = {int(line.split()[1].rstrip(":")): line.split(": ")[1] for line in table}
        assert rank in found
        assert len(found) > 1
        for peer, words in found.items():
            assert words == ", ".join(map(str, masks[peer]))
        assert seconds < BUDGET / 3
    params = params_of(capacity)
    if fine:
        one = masked_round(fine, size, 1, params)
        check(params, one, [played for _, _, played, _ in results])
    everyone = masked_round(range(size), size, 2, params)
    check(params, everyone, [after for *_, after in results])


WIDE = MoEEpCommParams(2, 1, 8192, 8192, dtype=torch.float32)
WIDE_IN_LOW_PRECISION = MoEEpCommParams(2, 1, 8192, 16384)


def go_on_without_a_rank_that_reads(
    context: RankContext, backend: str, params: MoEEpCommParams, attempts: int, **options: bool
) -> tuple[int, int]:
    """Body: rank 1 adds many rows of rank 0, which has queued a round without it behind this one,
    and writes others over them. Returns how often rank 1 got its sums, and how often an error.
    """
    rank, sums, errors = context.rank, 0, 0
    count = params.max_tokens_per_rank * rank
    everyone, alone = (active_rank_mask(active, 2) for active in ((0, 1), (0,)))
    with create(context, params, backend, enable_rank_mask=True, **options) as one:
        device = one.device
        ids = torch.zeros((count, 1), dtype=torch.int32, device=device)
        sent = torch.ones(count, params.hidden_size, dtype=params.token_dtype, device=device)
        for _ in range(attempts):
            one.dispatch(sent, ids, active_rank_mask=everyone)  # type: ignore[call-arg]
            rows = one.get_combine_input_buffer()
            assert rows is not None
            rows.fill_(1)
            total = one.combine(rows, active_rank_mask=everyone)  # type: ignore[call-arg]
            if rank == 0:
                one.dispatch(sent, ids, active_rank_mask=alone)  # type: ignore[call-arg]
                again = one.get_combine_input_buffer()
                assert again is not None
                one.combine(again.fill_(2), active_rank_mask=alone)  # type: ignore[call-arg]
            problem = problem_of(one.check)
            if problem is None:
                assert (total == 1).all()
                sums += 1
            else:
                assert rank == 1
                words = ["rank 0 masked rank 1 off while it was in combine"]
                expect(problem, MoEEpMaskDisagreementError, words)
                errors += 1
            one.reinitialize()
    return sums, errors


def mask_off_a_rank_that_reads(
    ranks: RunOnRanks, backend: Backend, device: str, params: MoEEpCommParams, **options: bool
) -> None:
    attempts = 20
    results = ranks(
        2,
        go_on_without_a_rank_that_reads,
        device=device,
        backend=backend.name,
        params=params,
        attempts=attempts,
        **options,
    )
    assert results[0] == (attempts, 0)
    sums, errors = results[1]
    assert sums + errors == attempts
    assert errors > 0


@on_each(having="masks", devices=SHARED_GPUS)
def test_a_rank_that_is_masked_off_while_it_reads_has_its_sums_or_an_error(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    mask_off_a_rank_that_reads(ranks, backend, device, WIDE)


@on_each(named="cake", devices=(ONE_GPU,))  # elsewhere, no rank reads such rows at another one
def test_a_rank_that_is_masked_off_while_it_quantises_what_it_reads_likewise(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    options = {"use_low_precision_combine": True}
    mask_off_a_rank_that_reads(ranks, backend, device, WIDE_IN_LOW_PRECISION, **options)


PARTED = (1, 2)  # rounds
HALVES = ((0, 1), (2, 3))


def part(context: RankContext, backend: str) -> list[Played]:
    """Body: two halves go on without each other, when all have returned."""
    params = params_of(40)
    with create(context, params, backend, enable_rank_mask=True) as one:
        play_round(one, masked_round(range(4), 4, 0, params))  # ends with a check
        context.barrier()
        half = HALVES[context.rank // 2]
        return [play_round(one, masked_round(half, 4, index, params)) for index in PARTED]


@on_each(having="masks", devices=SHARED_GPUS)
def test_halves_that_part_when_all_have_returned_disturb_nobody(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    results = ranks(4, part, device=device, backend=backend.name)
    for number, index in enumerate(PARTED):
        for half in HALVES:
            one = masked_round(half, 4, index, params_of(40))
            mine = [results[rank][number] if rank in half else None for rank in range(4)]
            check(params_of(40), one, mine)
