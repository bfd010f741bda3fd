"""Does the memory go and come back between rounds, at the same addresses, on all ranks or none?

MOE_EP_CHECKPOINTS sets how often it goes and comes back in a row, 50 by default; `pytest -s` prints
what is left of that. 1000 take some minutes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpConfigError,
    MoEEpPlatformError,
    MoEEpStateError,
    MoEEpTimeoutError,
    _native,
    create_communication,
    symmetric_memory,
)
from moe_ep.collectives import CommBackend, SingleRankComm, TorchDistributedComm
from moe_ep.sharing import place_of
from tests.backends import ALL, Backend, every_backend, on_each
from tests.conftest import RunOnRanks
from tests.multirank.test_lifetime import device_bytes
from tests.multirank.test_soak import open_descriptors, resident_bytes
from tests.problems import Problem, expect, problem_of
from tests.ranks import Outcome, RankContext
from tests.ranks.devices import CPU, ONE_GPU
from tests.ranks.processes import PATIENCE_SECONDS
from tests.ranks.waiting import introduce, outlive
from tests.rounds import Played, Round, check, check_all, create, play_round, random_round, rows_of

pytestmark = pytest.mark.multirank
PARAMS = MoEEpCommParams(10, 3, 8, 40)
CHECKPOINTS = int(os.environ.get("MOE_EP_CHECKPOINTS", "50"))
COUNTS = (5, 0, 8)
ROUNDS = [random_round(PARAMS, COUNTS, seed) for seed in range(3)]
with_memory = on_each(having="workspace")
# Where what a round receives lies in the memory.
in_place = on_each(having="zero_copy")


def shared_mappings() -> int:
    """Return how many mappings of shared memory of this library the process has."""
    gc.collect()
    with open("/proc/self/maps") as file:
        return file.read().count("/memfd:moe_ep")


def shared_bytes() -> int:
    """Return how much shared memory the process has in its page tables."""
    with open("/proc/self/status") as file:
        return int(file.read().split("RssShmem:")[1].split()[0]) * 1024


def with_statistics_and_mask(one: Round) -> Round:
    stats = torch.arange(4 * one.ep_size, dtype=torch.int32).view(one.ep_size, 4)
    return replace(one, eplb_local_stats=list(stats), active_ranks=list(range(one.ep_size)))


def with_wide_rows(one: Round) -> Round:
    wide = [rows_of([t + 1 for t in range(n)], 90, torch.uint8) for n in COUNTS]
    return replace(one, hidden_states=wide)


PLAIN: dict[str, Any] = {}
OPTIONS = {
    "plain": (PLAIN, lambda one: one),
    "statistics and mask": (
        {"eplb_stats_num_experts": 4, "enable_rank_mask": True},
        with_statistics_and_mask,
    ),
    "low precision": ({"use_low_precision_combine": True}, lambda one: one),
    "extra payload": ({"extra_payload_bytes_per_token": 16}, with_wide_rows),
}


def play_around_checkpoints(
    context: RankContext, backend: str, rounds: Sequence[Round], options: dict[str, Any]
) -> tuple[list[Played], bool]:
    """Body: a checkpoint after each round; return also whether what came was always in the same
    place.
    """
    played, places = [], set()
    with create(context, PARAMS, backend, **options) as communication:
        bytes_before = communication.workspace_bytes
        for one in rounds:
            played.append(play_round(communication, one))
            communication.checkpoint_prepare()
            assert communication.workspace_bytes == 0
            communication.checkpoint_restore()
            assert communication.workspace_bytes == bytes_before
            places.add(place_of_rows(communication))
    return played, len(places) == 1


def place_of_rows(communication: Any) -> tuple[int, int]:
    """Return where an empty round's rows come to lie, and where combine takes its input."""
    params, device = communication.params, communication.device
    result = communication.dispatch(
        torch.zeros(0, params.hidden_size, dtype=params.token_dtype, device=device),
        torch.zeros(0, params.top_k, dtype=torch.int32, device=device),
    )
    buffer = communication.get_combine_input_buffer()
    where = result.hidden_states.data_ptr(), 0 if buffer is None else buffer.data_ptr()
    communication.combine(torch.zeros_like(result.hidden_states))
    return where


@in_place
@pytest.mark.parametrize("option", OPTIONS)
def test_rounds_are_exact_after_a_restore_at_the_same_addresses(
    ranks: RunOnRanks, backend: Backend, device: str, option: str
) -> None:
    options, changed = OPTIONS[option]
    rounds = [changed(one) for one in ROUNDS]
    results = ranks(
        3,
        play_around_checkpoints,
        device=device,
        backend=backend.name,
        rounds=rounds,
        options=options,
    )
    assert all(same for _, same in results)
    check_all(
        PARAMS,
        rounds,
        [played for played, _ in results],
        low_precision=option == "low precision",
    )


def live_through_checkpoints(
    context: RankContext, backend: str, cycles: int, one: Round
) -> tuple[tuple[int, ...], list[Played]]:
    """Body: return what grew after the first tenth, and what the last round brought."""
    before = after = (0, 0, 0, 0)
    with create(context, PARAMS, backend) as communication:
        for cycle in range(cycles):
            communication.checkpoint_prepare()
            communication.checkpoint_restore()
            played = play_round(communication, one)
            context.barrier()
            after = (
                open_descriptors(),
                shared_mappings(),
                resident_bytes(),
                device_bytes(context.device),
            )
            context.barrier()
            if cycle == cycles // 10:
                before = after
    return tuple(now - then for now, then in zip(after, before, strict=True)), [played]


@with_memory
@pytest.mark.timeout(300 + 2 * CHECKPOINTS)
def test_many_checkpoints_leave_descriptors_mappings_and_memory_where_they_were(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    results = ranks(
        2,
        live_through_checkpoints,
        device=device,
        seconds=PATIENCE_SECONDS + 2 * CHECKPOINTS,
        backend=backend.name,
        cycles=CHECKPOINTS,
        one=random_round(PARAMS, (5, 8), seed=1),
    )
    more = max(memory for (_, _, memory, _), _ in results)
    print(f"\n{backend}: {CHECKPOINTS} checkpoints; bytes more in use: {more}")
    for (descriptors, mappings, memory, on_device), _ in results:
        assert (descriptors, mappings) == (0, 0)
        assert memory < (2 if device == CPU else 16) * 2**20
        assert on_device < 32 * 2**20
    check_all(PARAMS, [random_round(PARAMS, (5, 8), seed=1)], [played for _, played in results])


def measure(context: RankContext, backend: str) -> tuple[int, int, int, int]:
    """Body: return the bytes of all segments, and what was in use before, while released, after."""
    large = MoEEpCommParams(4, 2, 1024, 4096)
    with create(context, large, backend) as communication:
        size = communication.workspace_bytes * context.size
        used = []
        for step in (
            lambda: None,
            communication.checkpoint_prepare,
            communication.checkpoint_restore,
        ):
            step()
            context.barrier()
            used.append(shared_bytes() if context.device == CPU else device_bytes(context.device))
            if communication.workspace_bytes == 0:
                assert shared_mappings() == 0
            context.barrier()
    return size, used[0], used[1], used[2]


@in_place
def test_the_memory_is_free_while_it_is_released(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    for size, before, released, after in ranks(2, measure, device=device, backend=backend.name):
        assert size > 32 * 2**20
        assert before - released >= size - 2**20
        assert after - released >= size - 2**20


def use_while_released(
    context: RankContext, backend: str, one: Round
) -> tuple[list[Problem | None], list[Played]]:
    """Body: return what each call says meanwhile."""
    with create(context, PARAMS, backend) as communication:
        before = play_round(communication, one)
        communication.checkpoint_prepare()
        communication.checkpoint_prepare()
        assert communication.workspace_bytes == 0
        assert "released" in repr(communication)
        rows = one.hidden_states[context.rank].to(communication.device)
        ids = one.topk_ids[context.rank].to(communication.device)
        said = [
            problem_of(communication.dispatch, rows, ids),
            problem_of(communication.combine, rows),
            problem_of(communication.get_combine_input_buffer),
            problem_of(communication.check),
        ]
        communication.checkpoint_restore()
        communication.checkpoint_restore()
        return said, [before, play_round(communication, one)]


@every_backend
def test_rounds_are_refused_while_the_memory_is_released(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    one = random_round(PARAMS, (5, 8), seed=2)
    results = ranks(2, use_while_released, device=device, backend=backend.name, one=one)
    for said, _ in results:
        names = ("dispatch", "combine", "get_combine_input_buffer", "check")
        for name, problem in zip(names, said, strict=True):
            expect(problem, MoEEpStateError, [f"{name} while", "released", "checkpoint_restore"])
    check_all(PARAMS, [one, one], [played for _, played in results])


def checkpoint_in_a_round(
    context: RankContext, backend: str, one: Round
) -> tuple[list[Problem | None], Played]:
    with create(context, PARAMS, backend) as communication:
        said: list[Problem | None] = []
        real = communication.combine

        def combine(*args: Any, **kwargs: Any) -> torch.Tensor:
            said.append(problem_of(communication.checkpoint_prepare))
            said.append(problem_of(communication.checkpoint_restore))
            return real(*args, **kwargs)

        with mock.patch.object(communication, "combine", combine):
            played = play_round(communication, one)
    said += [
        problem_of(communication.checkpoint_prepare),
        problem_of(communication.checkpoint_restore),
    ]
    return said, played


@every_backend
def test_a_checkpoint_in_a_round_or_after_destroy_is_refused(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    one = random_round(PARAMS, (5, 8), seed=3)
    results = ranks(2, checkpoint_in_a_round, device=device, backend=backend.name, one=one)
    for said, _ in results:
        for problem in said[:2]:
            expect(problem, MoEEpStateError, ["ranks 0, 1: ", "round is open: call combine first"])
        for problem in said[2:]:
            expect(problem, MoEEpStateError, ["after destroy"])
    check(PARAMS, one, [played for _, played in results])


def checkpoint_with_a_broken_rank(
    context: RankContext, backend: str, one: Round
) -> tuple[Problem | None, int]:
    """Body: a call has failed on one rank alone, which the others do not know."""
    with create(context, PARAMS, backend) as communication:
        play_round(communication, one)
        context.barrier()
        if context.rank == 1:
            with mock.patch.object(communication, "_dispatch", fails):
                problem_of(
                    communication.dispatch,
                    one.hidden_states[1].to(communication.device),
                    one.topk_ids[1].to(communication.device),
                )
        bytes_before = communication.workspace_bytes
        said = problem_of(communication.checkpoint_prepare)
        return said, communication.workspace_bytes - bytes_before


@every_backend
def test_a_checkpoint_with_a_broken_rank_is_refused_on_all(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    one = ROUNDS[0]
    results = ranks(3, checkpoint_with_a_broken_rank, device=device, backend=backend.name, one=one)
    for said, change in results:
        expect(said, MoEEpStateError, ["ranks 0, 2: fine", "rank 1: ", "broken", "re-create"])
        assert change == 0


class ReversedComm:
    """The same processes in the other order."""

    def __init__(self, comm: CommBackend) -> None:
        self._comm = comm

    def get_rank(self) -> int:
        return self.get_size() - 1 - self._comm.get_rank()

    def get_size(self) -> int:
        return self._comm.get_size()

    def allgather(self, obj: Any) -> list[Any]:
        return self._comm.allgather(obj)[::-1]

    def barrier(self) -> None:
        self._comm.barrier()


def restore_over_others(
    context: RankContext, backend: str, one: Round
) -> tuple[list[Problem | None], Played]:
    """Body: groups that are not the one of before; then None, which is."""
    assert context.group is not None
    with create(context, PARAMS, backend) as communication:
        communication.checkpoint_prepare()
        said = [
            problem_of(communication.checkpoint_restore, SingleRankComm()),
            problem_of(
                communication.checkpoint_restore, ReversedComm(TorchDistributedComm(context.group))
            ),
            problem_of(communication.checkpoint_restore, "a group"),
        ]
        communication.checkpoint_restore()
        return said, play_round(communication, one)


@every_backend
def test_another_group_is_refused_with_both_places_and_can_be_replaced(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    one = random_round(PARAMS, (5, 8), seed=4)
    results = ranks(2, restore_over_others, device=device, backend=backend.name, one=one)
    for rank, (said, _) in enumerate(results):
        expect(said[0], MoEEpConfigError, [f"rank {rank} of 2", "got rank 0 of 1"])
        expect(said[1], MoEEpConfigError, ["rank 0 of 2", "got rank 1 of 2", "same order"])
        expect(said[2], TypeError, ["comm_backend must have", "got str"])
    check(PARAMS, one, [played for _, played in results])


def restore_over_a_new_group(
    context: RankContext, backend: str, wrapped: bool, rounds: Sequence[Round]
) -> list[Played]:
    """Body: the process group of before is gone when the memory comes back."""
    dist.init_process_group("gloo")
    everyone = list(range(context.size))
    old = dist.new_group(everyone)
    bootstrap = BootstrapConfig.from_process_group(old, device=context.device)
    with create_communication(bootstrap, PARAMS, backend) as communication:
        played = [play_round(communication, rounds[0])]
        communication.checkpoint_prepare()
        dist.destroy_process_group(old)
        new = dist.new_group(everyone)
        assert isinstance(new, dist.ProcessGroup)
        communication.checkpoint_restore(TorchDistributedComm(new) if wrapped else new)
        played.append(play_round(communication, rounds[1]))
        communication.checkpoint_prepare()
        communication.checkpoint_restore()
        again = BootstrapConfig.from_process_group(new, device=context.device)
        with create_communication(again, PARAMS, backend) as later:
            assert place_of_rows(later) == place_of_rows(communication)
            played.append(play_round(later, rounds[2]))
    dist.destroy_process_group(new)
    dist.barrier()
    return played


@on_each(having="zero_copy", devices=(CPU, ONE_GPU))
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_memory_comes_back_over_a_new_process_group(
    ranks: RunOnRanks, backend: Backend, device: str, wrapped: bool
) -> None:
    outcomes: list[Outcome] = ranks(
        3,
        restore_over_a_new_group,
        device=device,
        dedicated=True,
        backend=backend.name,
        wrapped=wrapped,
        rounds=ROUNDS,
    )
    assert [outcome.error for outcome in outcomes] == [None] * 3
    check_all(PARAMS, ROUNDS, [outcome.value for outcome in outcomes])


def fails(*_: object, **__: object) -> Any:
    raise RuntimeError("injected")


STAGES: dict[str, Callable[[MoEEpCommunication], tuple[object, str]]] = {
    "release": lambda _: (_native.SegmentedMemory, "release"),
    "back": lambda _: (_native.SegmentedMemory, "back_own_segment"),
    "map": lambda _: (_native.SegmentedMemory, "map_peer_segment"),
    "initialise": lambda communication: (communication._shared, "_initialize"),
}


def fail_on_one_rank(
    context: RankContext, backend: str, stage: str, failing: int, one: Round
) -> tuple[list[Problem | None], tuple[int, int], Played]:
    """Body: return what was raised then and later, what is left, and that a new one works."""
    gc.collect()
    before = open_descriptors(), shared_mappings()
    communication = create(context, PARAMS, backend)
    play_round(communication, one)
    injection: AbstractContextManager[object] = nullcontext()
    if context.rank == failing:
        injection = mock.patch.object(*STAGES[stage](communication), fails)
    if stage == "release":
        with injection:
            said = [problem_of(communication.checkpoint_prepare)]
    else:
        communication.checkpoint_prepare()
        with injection:
            said = [problem_of(communication.checkpoint_restore)]
    left = open_descriptors() - before[0], shared_mappings() - before[1]
    assert communication.workspace_bytes == 0
    said += [
        problem_of(communication.checkpoint_restore),
        problem_of(communication.checkpoint_prepare),
        problem_of(communication.combine, torch.zeros(1)),
    ]
    with create(context, PARAMS, backend) as another:
        played = play_round(another, one)
    communication.destroy()
    return said, left, played


@in_place
@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_half_way_breaks_the_workspace_on_all_ranks_and_leaves_nothing(
    ranks: RunOnRanks, backend: Backend, device: str, stage: str, failing: int
) -> None:
    one = ROUNDS[0]
    results = ranks(
        3,
        fail_on_one_rank,
        device=device,
        backend=backend.name,
        stage=stage,
        failing=failing,
        one=one,
    )
    for said, left, _ in results:
        expect(said[0], MoEEpPlatformError, [f"rank {failing}: ", "injected", "restart"])
        for problem in said[1:]:
            expect(problem, MoEEpStateError, ["broken", "restart the ranks", "injected"])
        assert left == (0, 0)
    check(PARAMS, one, [played for *_, played in results])


def restore_without_room(
    context: RankContext, backend: str, one: Round
) -> tuple[Problem | None, Played]:
    with create(context, PARAMS, backend) as communication:
        communication.checkpoint_prepare()
        place = replace(place_of(communication.device), available_bytes=4096)
        with mock.patch.object(symmetric_memory, "place_of", return_value=place):
            said = problem_of(communication.checkpoint_restore)
        communication.checkpoint_restore()
        return said, play_round(communication, one)


@with_memory
def test_a_restore_that_finds_no_room_can_be_tried_again(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    one = random_round(PARAMS, (5, 8), seed=5)
    results = ranks(2, restore_without_room, device=device, backend=backend.name, one=one)
    for said, _ in results:
        expect(said, MoEEpPlatformError, ["2 segments of", "4096 are available"])
        assert said is not None
        assert "restart" not in said[1]
    check(PARAMS, one, [played for _, played in results])


def destroy_while_released(context: RankContext, backend: str) -> tuple[int, int]:
    gc.collect()
    before = open_descriptors(), shared_mappings()
    communication = create(context, PARAMS, backend)
    play_round(communication, random_round(PARAMS, (5, 8), seed=6))
    communication.checkpoint_prepare()
    communication.destroy()
    communication.destroy()
    assert communication.workspace_bytes == 0
    return open_descriptors() - before[0], shared_mappings() - before[1]


@every_backend
def test_destroy_works_while_the_memory_is_released(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    for left in ranks(2, destroy_while_released, device=device, backend=backend.name):
        assert left == (0, 0)


def keep_a_view(context: RankContext, backend: str, one: Round) -> bool:
    """Body: return whether a view from before shows what comes to its place after a restore."""
    with create(context, PARAMS, backend) as communication:
        view = communication.dispatch(
            one.hidden_states[context.rank].to(communication.device),
            one.topk_ids[context.rank].to(communication.device),
        ).hidden_states
        wanted = view.clone()
        communication.combine(torch.zeros_like(wanted))
        communication.checkpoint_prepare()
        communication.checkpoint_restore()
        empty = not view.view(torch.int16).any()
        context.barrier()
        communication.dispatch(
            one.hidden_states[context.rank].to(communication.device),
            one.topk_ids[context.rank].to(communication.device),
        )
        return empty and view.view(torch.int16).equal(wanted.view(torch.int16))


@in_place
def test_a_view_of_before_is_one_of_the_new_memory(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    # All rows are filled: those without a token are not specified.
    g = torch.Generator().manual_seed(7)
    one = Round(
        hidden_states=[torch.randn(8, 40, generator=g).bfloat16() for _ in range(2)],
        topk_ids=[torch.tensor([[0, 5, 9]] * 8, dtype=torch.int32)] * 2,
    )
    assert ranks(2, keep_a_view, device=device, backend=backend.name, one=one) == [True, True]


def touch_while_released(context: RankContext, backend: str) -> None:
    bootstrap = BootstrapConfig(1, 0, device=context.device)
    communication = create_communication(bootstrap, PARAMS, backend)
    rows = torch.ones(8, 40, dtype=torch.bfloat16)
    view = communication.dispatch(rows, torch.zeros(8, 3, dtype=torch.int32)).hidden_states
    communication.combine(view.clone())
    communication.checkpoint_prepare()
    view.sum()


@on_each(having="zero_copy", devices=(CPU,))  # on a GPU the fault takes the context with it
def test_a_view_that_is_touched_while_released_faults(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    [outcome] = ranks(1, touch_while_released, dedicated=True, backend=backend.name)
    assert outcome.exit_code == -11


def checkpoint_alone(context: RankContext, backend: str) -> Problem | None:
    """Body: rank 1 does not come to what rank 0 calls, as long as that one is there."""
    introduce(context)
    bootstrap = BootstrapConfig(context.size, context.rank, device=context.device)
    communication = create_communication(bootstrap, PARAMS, backend, timeout_sec=4)
    if context.rank == 1:
        outlive(0)
        return None
    return problem_of(communication.checkpoint_prepare)


@every_backend
def test_a_checkpoint_that_a_rank_does_not_come_to_is_named(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    of_each = [{"backend": one.name} for one in ALL]
    outcomes = ranks.waiting(2, checkpoint_alone, of_each, device=device, backend=backend.name)
    assert [outcome.error for outcome in outcomes] == [None, None]
    words = ["checkpoint_prepare: rank 0 waited", "for rank 1 to make the same call"]
    expect(outcomes[0].value, MoEEpTimeoutError, words)
