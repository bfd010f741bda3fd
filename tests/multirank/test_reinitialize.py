"""Do the ranks begin anew in place after a rank was masked off, has failed, or has come back?"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ep import MoEEpCommParams, MoEEpConfigError, MoEEpStateError, MoEEpTimeoutError
from moe_ep.collectives import SingleRankComm
from tests.backends import Backend, on_each
from tests.conftest import RunOnRanks
from tests.problems import Problem, expect, problem_of
from tests.ranks import RankContext
from tests.ranks.devices import CPU, ONE_GPU
from tests.ranks.members import MembersComm
from tests.rounds import Played, Round, check, create, play_round, random_round, settled

pytestmark = pytest.mark.multirank
PARAMS = MoEEpCommParams(10, 4, 7, 24)
BUDGET = 4
with_masks = on_each(having="masks")
with_memory = on_each(having="workspace")


def masked_round(
    active: Sequence[int], size: int, seed: int, params: MoEEpCommParams = PARAMS
) -> Round:
    counts = [(3 * rank + seed) % 8 for rank in range(size)]
    runtime_max = max(counts) if seed % 2 == 0 else None  # rows lie elsewhere in every other round
    one = random_round(params, counts, seed, tokens_per_rank=runtime_max)
    return replace(one, active_ranks=list(active), mask_on_device=seed % 3 == 0)


Step = tuple[str, Sequence[int]]  # ("rounds", those that are active) or ("anew", those that are in)


def follow(
    context: RankContext, backend: str, steps: Sequence[Step], rounds_a_step: int
) -> list[Played | None]:
    """Body: take the steps; None for a round of others."""
    played: list[Played | None] = []
    with create(context, PARAMS, backend, enable_rank_mask=True) as communication:
        for index, (kind, ranks) in enumerate(steps):
            if kind == "anew" and context.rank in ranks:
                assert context.group is not None
                whole = len(ranks) == context.size
                some = MembersComm(context.group, ranks, tag=1)
                communication.reinitialize(None if whole else some)
            for number in range(rounds_a_step if kind == "rounds" else 0):
                one = masked_round(ranks, context.size, index * rounds_a_step + number)
                is_in = context.rank in ranks
                played.append(play_round(communication, one) if is_in else None)
            communication.check()
            # Nobody may be masked off who has still to read what it got.
            context.barrier()
    return played


def check_steps(results: list[list[Played | None]], steps: Sequence[Step], a_step: int) -> None:
    size, place = len(results), 0
    for index, (kind, active) in enumerate(steps):
        for number in range(a_step if kind == "rounds" else 0):
            one = masked_round(active, size, index * a_step + number)
            check(PARAMS, one, [played[place] for played in results])
            assert [rank for rank in range(size) if results[rank][place] is not None] == [*active]
            place += 1


STEPS: dict[str, list[Step]] = {
    "one of 3": [
        ("rounds", (0, 1, 2)),
        ("rounds", (0, 2)),
        ("anew", (0, 1, 2)),
        ("rounds", (0, 1, 2)),
    ],
    "each of 3 in turn": [
        ("rounds", (0, 2)),
        ("anew", (0, 1, 2)),
        ("rounds", (0, 1)),
        ("anew", (0, 1, 2)),
        ("rounds", (1, 2)),
        ("anew", (0, 1, 2)),
        ("rounds", (0, 1, 2)),
    ],
    "the same of 4 twice": [
        ("rounds", (0, 1, 2)),
        ("anew", (0, 1, 2, 3)),
        ("rounds", (0, 1, 2, 3)),
        ("rounds", (0, 1, 2)),
        ("anew", (0, 1, 2, 3)),
        ("rounds", (0, 1, 2, 3)),
    ],
    "one of two that are away of 4": [
        ("rounds", (0, 1, 2, 3)),
        ("rounds", (0, 1)),
        ("anew", (0, 1, 2)),
        ("rounds", (0, 1, 2)),
        ("rounds", (1, 2)),
        ("anew", (1, 3, 0, 2)),
        ("rounds", (0, 1, 2, 3)),
    ],
    "two halves of 4": [
        ("rounds", (0, 1)),
        ("rounds", (2, 3)),
        ("anew", (0, 1, 2, 3)),
        ("rounds", (0, 1, 2, 3)),
    ],
}


@with_masks
@pytest.mark.parametrize("story", STEPS)
def test_a_rank_that_was_masked_off_takes_part_again(
    ranks: RunOnRanks, backend: Backend, device: str, story: str
) -> None:
    steps, a_step = STEPS[story], 3
    results = ranks(
        1 + max(rank for _, members in steps for rank in members),
        follow,
        device=device,
        backend=backend.name,
        steps=steps,
        rounds_a_step=a_step,
    )
    check_steps(results, steps, a_step)


def lose_a_rank(
    context: RankContext, backend: str, victim: int, place: str, after: Sequence[Round]
) -> tuple[list[Played], bool, str]:
    """Body: one rank is killed in a round; the others go on without it, in the same memory."""
    communication = create(context, PARAMS, backend, enable_rank_mask=True)
    one = masked_round(range(context.size), context.size, 1)
    play_round(communication, one)

    def dispatch() -> Any:
        rows = one.hidden_states[context.rank].to(communication.device)
        ids = one.topk_ids[context.rank].to(communication.device)
        return settled(communication, communication.dispatch, rows, ids)

    if context.rank == victim:
        if place == "combine":
            dispatch()
        if context.device != CPU:
            torch.cuda.synchronize()  # killed in a kernel, it would take the MPS daemon along
        os.kill(os.getpid(), signal.SIGKILL)
    said = ""
    try:
        rows = dispatch().hidden_states
        settled(communication, communication.combine, torch.zeros_like(rows))
    except MoEEpTimeoutError as missed:
        said = str(missed)
    left = [rank for rank in range(context.size) if rank != victim]
    group = dist.new_group(left, use_local_synchronization=True)
    place_before = communication._shared.tensor.data_ptr()
    communication.reinitialize(group)
    played = [play_round(communication, each) for each in after]
    same_place = communication._shared.tensor.data_ptr() == place_before
    communication.destroy()
    return played, same_place, said


@on_each(having="masks", devices=(CPU, ONE_GPU))
@pytest.mark.parametrize("place", ["dispatch", "combine"])
def test_the_others_go_on_in_place_when_a_rank_was_killed(
    ranks: RunOnRanks, backend: Backend, device: str, place: str
) -> None:
    victim, size = 2, 4
    after = [masked_round((0, 1, 3), size, seed) for seed in range(3)]
    outcomes = ranks(
        size,
        lose_a_rank,
        device=device,
        dedicated=True,
        backend=backend.name,
        victim=victim,
        place=place,
        after=after,
    )
    left = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert [outcome.error for outcome in left] == [None] * 3
    assert [outcome.exit_code for outcome in left] == [0] * 3
    for outcome in left:
        assert outcome.value[1]
        assert "rank 2" in outcome.value[2]
        assert "reinitialize" in outcome.value[2]
        assert "mask" in outcome.value[2]
    for index, one in enumerate(after):
        check(PARAMS, one, [o.value[0][index] if o.value else None for o in outcomes])


def miss_a_round(context: RankContext, backend: str, rounds: Sequence[Round]) -> list[Played]:
    """Body: the last rank leaves a round out; then all begin anew, some in an open round."""
    communication = create(context, PARAMS, backend, timeout_sec=BUDGET)
    played = [play_round(communication, rounds[0])]
    if context.rank != context.size - 1:
        rank, device = context.rank, communication.device
        given = rounds[0].hidden_states[rank].to(device), rounds[0].topk_ids[rank].to(device)
        missed = problem_of(settled, communication, communication.dispatch, *given)
        expect(missed, MoEEpTimeoutError, ["reinitialize"])
        expect(problem_of(communication.check), MoEEpStateError, ["broken", "reinitialize"])
    context.barrier()  # the last rank stays away until the others have missed it
    communication.reinitialize()
    played += [play_round(communication, one) for one in rounds[1:]]
    communication.destroy()
    return played


@on_each(having="workspace", devices=(CPU, ONE_GPU))
def test_all_go_on_in_place_after_a_time_out(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    rounds = [random_round(PARAMS, (5, 0, 7), seed) for seed in range(3)]
    results = ranks(3, miss_a_round, device=device, backend=backend.name, rounds=rounds)
    for index, one in enumerate(rounds):
        check(PARAMS, one, [played[index] for played in results])


def drop_an_open_round(
    context: RankContext, backend: str, one: Round
) -> tuple[list[Problem | None], list[Played]]:
    """Body: of two objects that share the workspace, one begins anew in the other's round."""
    with (
        create(context, PARAMS, backend) as first,
        create(context, PARAMS, backend) as second,
    ):
        rows = one.hidden_states[context.rank].to(first.device)
        ids = one.topk_ids[context.rank].to(first.device)
        received = first.dispatch(rows, ids)
        second.reinitialize()
        said = [problem_of(first.combine, torch.zeros_like(received.hidden_states))]
        second.dispatch(rows, ids)
        said.append(problem_of(first.combine, torch.zeros_like(received.hidden_states)))
        first.reinitialize()
        return said, [play_round(second, one), play_round(first, one)]


@with_memory
def test_a_round_that_is_open_is_dropped(ranks: RunOnRanks, backend: Backend, device: str) -> None:
    one = random_round(PARAMS, (5, 3), seed=1)
    results = ranks(2, drop_an_open_round, device=device, backend=backend.name, one=one)
    for said, _ in results:
        for problem in said:
            expect(problem, MoEEpStateError, ["combine without an open round"])
    for index in range(2):
        check(PARAMS, one, [played[index] for _, played in results])


def misuse(context: RankContext, backend: str, one: Round) -> tuple[list[Problem | None], Played]:
    """Body: what is refused, and a round after it."""
    with create(context, PARAMS, backend) as communication:
        said = [problem_of(communication.reinitialize, SingleRankComm())]
        communication.checkpoint_prepare()
        said.append(problem_of(communication.reinitialize))
        communication.checkpoint_restore()
        played = play_round(communication, one)
    said.append(problem_of(communication.reinitialize))
    return said, played


@with_memory
def test_what_cannot_begin_anew_says_why(ranks: RunOnRanks, backend: Backend, device: str) -> None:
    one = random_round(PARAMS, (5, 3), seed=1)
    results = ranks(2, misuse, device=device, backend=backend.name, one=one)
    for (in_part, released, destroyed), _ in results:
        expect(in_part, MoEEpConfigError, ["all 2 ranks", "mask", "got 1"])
        expect(released, MoEEpStateError, ["released", "checkpoint_restore"])
        expect(destroyed, MoEEpStateError, ["after destroy"])
    check(PARAMS, one, [played for _, played in results])


def ask_without_memory(context: RankContext, backend: str, one: Round) -> Played:
    with create(context, PARAMS, backend) as communication:
        expect(
            problem_of(communication.reinitialize), MoEEpStateError, ["no memory", "process group"]
        )
        return play_round(communication, one)


def test_a_backend_without_memory_says_what_to_do_instead(ranks: RunOnRanks) -> None:
    one = random_round(PARAMS, (5, 3), seed=1)
    check(PARAMS, one, ranks(2, ask_without_memory, backend="torch_dist", one=one))
