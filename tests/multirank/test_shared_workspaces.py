"""Do communications of one group and layout share a workspace, in turns, until the last is gone?"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpStateError,
    create_communication,
)
from moe_ep.collectives import TorchDistributedComm
from tests.backends import Backend, on_each
from tests.conftest import RunOnRanks
from tests.multirank.test_checkpoint import place_of_rows, shared_bytes, shared_mappings
from tests.multirank.test_lifetime import device_bytes
from tests.multirank.test_soak import open_descriptors
from tests.problems import Problem, expect, problem_of
from tests.ranks import Outcome, RankContext
from tests.ranks.devices import CPU, ONE_GPU
from tests.rounds import Played, Round, check, check_all, create, play_round, random_round

pytestmark = pytest.mark.multirank
PARAMS = MoEEpCommParams(10, 3, 8, 40)
SLACK = 8 * 2**20  # bytes that a process takes besides; five more segments are 80 MiB and more
ROUNDS = [random_round(PARAMS, (5, 0, 8), seed) for seed in range(6)]
with_memory = on_each(having="workspace")
# Where what a round receives lies in the memory.
in_place = on_each(having="zero_copy")


def dispatch(communication: MoEEpCommunication, one: Round) -> torch.Tensor:
    """Return the received rows."""
    rank, device = communication.ep_rank, communication.device
    rows, ids = one.hidden_states[rank].to(device), one.topk_ids[rank].to(device)
    return communication.dispatch(rows, ids).hidden_states


def take_turns(
    context: RankContext, backend: str, rounds: Sequence[Round], first_to_go: int
) -> tuple[list[Played], tuple[int, int]]:
    """Body: two objects in turns, then the one that is left; return what remains after both."""
    gc.collect()
    before = open_descriptors(), shared_mappings()
    pair = [create(context, PARAMS, backend) for _ in range(2)]
    assert place_of_rows(pair[0]) == place_of_rows(pair[1])
    if context.device == CPU:
        assert shared_mappings() - before[1] == context.size
    bytes_of_one = pair[0].workspace_bytes
    assert pair[1].workspace_bytes == bytes_of_one
    played = [play_round(pair[index % 2], one) for index, one in enumerate(rounds[:4])]
    pair[first_to_go].destroy()
    assert pair[first_to_go].workspace_bytes == 0
    left = pair[1 - first_to_go]
    assert left.workspace_bytes == bytes_of_one
    played += [play_round(left, one) for one in rounds[4:]]
    left.destroy()
    return played, (open_descriptors() - before[0], shared_mappings() - before[1])


@in_place
@pytest.mark.parametrize("first_to_go", [0, 1])
def test_two_objects_take_turns_and_the_last_destroy_frees_the_memory(
    ranks: RunOnRanks, backend: Backend, device: str, first_to_go: int
) -> None:
    results = ranks(
        3,
        take_turns,
        device=device,
        backend=backend.name,
        rounds=ROUNDS,
        first_to_go=first_to_go,
    )
    assert [left for _, left in results] == [(0, 0)] * 3
    check_all(PARAMS, ROUNDS, [played for played, _ in results])


def make_many(context: RankContext, backend: str, count: int) -> tuple[int, int, int]:
    """Body: return the bytes of the segments, and what is in use with one object and with all."""

    def used() -> int:
        context.barrier()
        now = shared_bytes() if context.device == CPU else device_bytes(context.device)
        context.barrier()
        return now

    large = MoEEpCommParams(4, 2, 1024, 4096)
    create(context, large, backend).destroy()
    before = used()
    layers = [create(context, large, backend)]
    with_one = used() - before
    layers += [create(context, large, backend) for _ in range(count - 1)]
    with_all = used() - before
    size = layers[0].workspace_bytes * context.size
    for layer in layers:
        layer.destroy()
    return size, with_one, with_all


@with_memory
def test_many_objects_take_the_memory_of_one(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    for size, with_one, with_all in ranks(
        2, make_many, device=device, backend=backend.name, count=6
    ):
        # What is in use tells of a segment at all, though a driver may have kept a page of an
        # earlier one, which this one then takes.
        assert size // 2 <= with_one <= size + SLACK
        assert with_all - with_one <= SLACK


def call_out_of_turn(
    context: RankContext, backend: str, rounds: Sequence[Round]
) -> tuple[list[Problem | None], list[Played]]:
    """Body: what the other object says while one has a round open, which then goes on."""
    said: list[Problem | None] = []
    with create(context, PARAMS, backend) as one, create(context, PARAMS, backend) as other:
        real = one.combine

        def combine(*args: Any, **kwargs: Any) -> torch.Tensor:
            said.append(problem_of(dispatch, other, rounds[1]))
            said.append(problem_of(other.combine, args[0]))
            said.append(problem_of(other.get_combine_input_buffer))
            said.append(problem_of(other.checkpoint_prepare))
            return real(*args, **kwargs)

        one.combine = combine  # type: ignore[method-assign]
        played = [play_round(one, rounds[0])]
        del one.combine
        played.append(play_round(other, rounds[1]))
    return said, played


@with_memory
def test_an_object_waits_for_the_round_of_another_to_end(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    results = ranks(3, call_out_of_turn, device=device, backend=backend.name, rounds=ROUNDS[:2])
    for said, _ in results:
        expect(
            said[0],
            MoEEpStateError,
            ["dispatch while a round is open on another communication", "process group"],
        )
        expect(said[1], MoEEpStateError, ["combine without an open round"])
        expect(said[2], MoEEpStateError, ["get_combine_input_buffer without an open round"])
        expect(said[3], MoEEpStateError, ["round is open: call combine first"])
    check_all(PARAMS, ROUNDS[:2], [played for _, played in results])


def checkpoint_through_both(
    context: RankContext, backend: str, rounds: Sequence[Round]
) -> tuple[list[Problem | None], list[Played]]:
    """Body: one object releases, the other has the memory back; return what calls say between."""
    with create(context, PARAMS, backend) as one, create(context, PARAMS, backend) as other:
        played = [play_round(one, rounds[0]), play_round(other, rounds[1])]
        place = place_of_rows(one)
        one.checkpoint_prepare()
        other.checkpoint_prepare()
        assert one.workspace_bytes == other.workspace_bytes == 0
        said = [
            problem_of(dispatch, other, rounds[2]),
            problem_of(create, context, PARAMS, backend),
        ]
        other.checkpoint_restore()
        one.checkpoint_restore()
        assert place_of_rows(one) == place_of_rows(other) == place
        played += [play_round(one, rounds[2]), play_round(other, rounds[3])]
        one.checkpoint_prepare()
        one.destroy()
        other.checkpoint_restore()
        played.append(play_round(other, rounds[4]))
    return said, played


@in_place
def test_a_checkpoint_through_one_object_is_one_for_all(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    results = ranks(
        3, checkpoint_through_both, device=device, backend=backend.name, rounds=ROUNDS[:5]
    )
    for said, _ in results:
        expect(said[0], MoEEpStateError, ["dispatch while", "released", "checkpoint_restore"])
        expect(said[1], MoEEpStateError, ["share is released", "checkpoint_restore"])
    check_all(PARAMS, ROUNDS[:5], [played for _, played in results])


def destroy_in_a_round(
    context: RankContext, backend: str, rounds: Sequence[Round]
) -> tuple[list[Problem | None], Played]:
    """Body: one object goes in the middle of its round; a new one plays beside the broken one."""
    one, other = (create(context, PARAMS, backend) for _ in range(2))
    dispatch(one, rounds[0])
    one.destroy()
    said = [problem_of(dispatch, other, rounds[0]), problem_of(other.checkpoint_prepare)]
    with create(context, PARAMS, backend) as fresh:
        played = play_round(fresh, rounds[0])
        other.destroy()
        played = play_round(fresh, rounds[1])
    return said, played


@with_memory
def test_an_object_that_goes_in_its_round_breaks_the_others(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    results = ranks(3, destroy_in_a_round, device=device, backend=backend.name, rounds=ROUNDS[:2])
    for said, _ in results:
        for problem in said:
            expect(problem, MoEEpStateError, ["broken", "between dispatch and combine"])
    check(PARAMS, ROUNDS[1], [played for _, played in results])


def lose_it_on_one_rank(
    context: RankContext, backend: str, one: Round
) -> tuple[Problem | None, Played]:
    """Body: one rank alone has let its object go when the next is created."""
    first: MoEEpCommunication | None = create(context, PARAMS, backend)
    assert first is not None
    play_round(first, one)
    if context.rank == 1:
        first = None
    said = problem_of(create, context, PARAMS, backend)
    if first is not None:
        first.destroy()
    with create(context, PARAMS, backend) as second:
        return said, play_round(second, one)


@with_memory
def test_a_rank_that_has_not_what_others_have_is_an_error_on_all(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    one = ROUNDS[0]
    results = ranks(3, lose_it_on_one_rank, device=device, backend=backend.name, one=one)
    for said, _ in results:
        expect(said, MoEEpStateError, ["ranks 0, 2: ", "rank 1: none", "destroy"])
    assert len({said for said, _ in results}) == 1
    check(PARAMS, one, [played for _, played in results])


def drop_in_a_cycle(
    context: RankContext, backend: str, cyclic: Sequence[int], in_round: bool, one: Round
) -> Played:
    """Body: an object is dropped, on some ranks in a cycle, which only the collector finds."""
    gc.disable()
    try:
        holder: list[Any] = [create(context, PARAMS, backend)]
        if in_round:
            dispatch(holder[0], one)
            context.barrier()
        if context.rank in cyclic:
            holder.append(holder)
        del holder
        with create(context, PARAMS, backend) as another:
            return play_round(another, one)
    finally:
        gc.enable()


@with_memory
@pytest.mark.parametrize(
    ("cyclic", "in_round"), [([1], False), ([1], True), ([0, 1, 2], False), ([0, 1, 2], True)]
)
def test_it_does_not_matter_when_a_dropped_object_is_collected(
    ranks: RunOnRanks, backend: Backend, device: str, cyclic: Sequence[int], in_round: bool
) -> None:
    one = ROUNDS[0]
    played = ranks(
        3,
        drop_in_a_cycle,
        device=device,
        backend=backend.name,
        cyclic=cyclic,
        in_round=in_round,
        one=one,
    )
    check(PARAMS, one, played)


def drop_and_destroy(context: RankContext, backend: str, dropped: int) -> tuple[int, int]:
    """Body: of two objects one is only dropped, and the other's remains are kept."""
    gc.collect()
    before = open_descriptors(), shared_mappings()
    pair: list[MoEEpCommunication] = [create(context, PARAMS, backend) for _ in range(2)]
    play_round(pair[dropped], ROUNDS[0])
    context.barrier()
    del pair[dropped]
    play_round(pair[0], ROUNDS[1])
    pair[0].destroy()
    return open_descriptors() - before[0], shared_mappings() - before[1]


@with_memory
@pytest.mark.parametrize("dropped", [0, 1])
def test_an_object_that_is_dropped_does_not_count(
    ranks: RunOnRanks, backend: Backend, device: str, dropped: int
) -> None:
    results = ranks(3, drop_and_destroy, device=device, backend=backend.name, dropped=dropped)
    assert results == [(0, 0)] * 3


def destroy_then_drop(context: RankContext, backend: str) -> tuple[int, int]:
    """Body: the destroyed object is kept, the other is only dropped; a view outlives both."""
    gc.collect()
    before = open_descriptors(), shared_mappings()
    one, other = (create(context, PARAMS, backend) for _ in range(2))
    view = dispatch(one, ROUNDS[0])
    wanted = view.clone()
    one.combine(torch.zeros_like(wanted))
    context.barrier()
    one.destroy()
    del other
    gc.collect()
    context.barrier()
    assert view.view(torch.int16).equal(wanted.view(torch.int16))
    del view
    return open_descriptors() - before[0], shared_mappings() - before[1]


@with_memory
def test_a_destroyed_object_holds_nothing_and_a_view_its_memory(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    assert ranks(3, destroy_then_drop, device=device, backend=backend.name) == [(0, 0)] * 3


def make_unlike_ones(context: RankContext, backend: str, rounds: Sequence[Round]) -> list[Played]:
    """Body: objects of other layouts, settings and groups, with a round open on all at once."""
    assert context.group is not None
    other_sizes = MoEEpCommParams(10, 3, 9, 40)
    over_the_group = TorchDistributedComm(context.group)
    communications = [
        create(context, PARAMS, backend),
        create(context, other_sizes, backend),
        create(context, PARAMS, backend, enable_rank_mask=True),
        create(context, PARAMS, backend, comm_backend=OwnComm(over_the_group)),
    ]
    for one in communications:
        dispatch(one, rounds[0])
    for one in communications:
        one.combine(
            torch.zeros(
                3 * one.params.max_tokens_per_rank, 40, dtype=torch.bfloat16, device=one.device
            )
        )
    for named in (over_the_group, context.group):
        same = create(context, PARAMS, backend, comm_backend=named)
        assert place_of_rows(same) == place_of_rows(communications[0])
    played = [play_round(same, rounds[1])]
    for one in [same, *communications]:
        one.destroy()
    return played


class OwnComm:
    """A comm_backend of the user's, and so a group of its own over the same processes."""

    def __init__(self, comm: TorchDistributedComm) -> None:
        self.get_rank, self.get_size = comm.get_rank, comm.get_size
        self.allgather, self.barrier = comm.allgather, comm.barrier


@in_place
def test_other_layouts_settings_and_groups_have_workspaces_of_their_own(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    results = ranks(3, make_unlike_ones, device=device, backend=backend.name, rounds=ROUNDS[:2])
    check_all(PARAMS, ROUNDS[1:2], results)


def play_in_two_groups(context: RankContext, backend: str, rounds: Sequence[Round]) -> list[Played]:
    """Body: two process groups of the same ranks, whose rounds overlap."""
    dist.init_process_group("gloo")
    groups = [dist.new_group(list(range(context.size))) for _ in range(2)]
    one, other = (
        create_communication(
            BootstrapConfig.from_process_group(group, device=context.device), PARAMS, backend
        )
        for group in groups
    )
    dispatch(one, rounds[0])
    played = play_round(other, rounds[1])
    one.combine(torch.zeros(24, 40, dtype=torch.bfloat16, device=one.device))
    played_again = play_round(one, rounds[0])
    one.destroy()
    dist.destroy_process_group(groups[0])
    other.destroy()
    dist.barrier()
    return [played_again, played]


@on_each(having="workspace", devices=(CPU, ONE_GPU))
def test_process_groups_of_their_own_make_two_rounds_at_once(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    outcomes: list[Outcome] = ranks(
        3,
        play_in_two_groups,
        device=device,
        dedicated=True,
        backend=backend.name,
        rounds=ROUNDS[:2],
    )
    assert [outcome.error for outcome in outcomes] == [None] * 3
    check_all(PARAMS, ROUNDS[:2], [outcome.value for outcome in outcomes])


def fork_and_create(context: RankContext, backend: str) -> tuple[int, int]:
    """Body: a child makes the same communication as its parent; return how it ended, and what the
    parent's memory then holds."""
    bootstrap = BootstrapConfig(1, 0, device=context.device)
    communication = create_communication(bootstrap, PARAMS, backend)
    ones = torch.ones(8, 40, dtype=torch.bfloat16)
    ids = torch.zeros(8, 3, dtype=torch.int32)
    view = communication.dispatch(ones, ids).hidden_states
    child = os.fork()
    if child == 0:
        status = 1
        try:
            own = create_communication(bootstrap, PARAMS, backend)
            own.combine(own.dispatch(2 * ones, ids).hidden_states)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return status, int(view.sum())


@on_each(having="workspace", devices=(CPU,))  # CUDA does not work in a forked child
def test_a_forked_child_does_not_share(ranks: RunOnRanks, backend: Backend, device: str) -> None:
    [outcome] = ranks(1, fork_and_create, dedicated=True, backend=backend.name)
    assert outcome.error is None, outcome.error
    assert outcome.value == (0, 320)
