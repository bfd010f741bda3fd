"""Does an object leave nothing behind, however it ends, and fail on all ranks together?"""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import moe_ep
from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpPlatformError,
    create_communication,
)
from tests.backends import Backend, every_backend, one_sided_names
from tests.conftest import RunOnRanks
from tests.gpu_cases import few_on_gpus
from tests.multirank.test_soak import open_descriptors, resident_bytes
from tests.ranks import RankContext
from tests.ranks.devices import CPU
from tests.rounds import Played, Round, check, create, play_round, random_round

pytestmark = pytest.mark.multirank
PARAMS = MoEEpCommParams(6, 2, 64, 512)
ONE = random_round(PARAMS, (5, 64), seed=1)


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)


def device_bytes(device: str) -> int:
    """Return what is in use on a GPU, by all its processes: those of the pool rest meanwhile."""
    if device == CPU:
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def live_through_cycles(
    context: RankContext, backend: str, cycles: int
) -> tuple[int, int, int, int]:
    """Body: create, play, destroy; return what grew after the first tenth."""

    def held() -> tuple[int, int, int, int]:
        context.barrier()  # all ranks have destroyed theirs
        taken = open_descriptors(), mappings(), resident_bytes(), device_bytes(context.device)
        context.barrier()  # none has created the next
        return taken

    before = (0, 0, 0, 0)
    for cycle in range(cycles):
        with create(context, PARAMS, backend) as communication:
            play_round(communication, ONE)
        del communication
        if cycle == cycles // 10:
            before = held()
    after = held()
    descriptors, maps, memory, on_device = (
        now - then for now, then in zip(after, before, strict=True)
    )
    return descriptors, maps, memory, on_device


@every_backend
def test_many_cycles_leave_descriptors_mappings_and_memory_where_they_were(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    growth = ranks(
        2,
        live_through_cycles,
        device=device,
        backend=backend.name,
        cycles=200 if device == CPU else 60,
    )
    # On a GPU the driver keeps books of its own, which grow in steps.
    maps_allowed, bytes_allowed = (4, 2 * 2**20) if device == CPU else (40, 16 * 2**20)
    for descriptors, maps, memory, on_device in growth:
        assert descriptors == 0
        assert maps <= maps_allowed  # the allocator's own
        assert memory < bytes_allowed, f"{memory} bytes more; a workspace is larger than that"
        assert on_device < 32 * 2**20, f"{on_device} bytes more in 53 cycles of at least 2 MiB"


def fail_on_one_rank(
    context: RankContext, backend: str, failing: int, one: Round
) -> tuple[str, str, int, Played]:
    """Body: the backend cannot run on one rank; then it can."""
    cls = type(create(context, PARAMS, backend))
    gc.collect()
    before = open_descriptors()
    original = cls.__dict__.get("unsupported_reason")
    if context.rank == failing:
        cls.unsupported_reason = classmethod(  # type: ignore[method-assign, assignment]
            lambda cls, device=None: "no room on this machine"
        )
    try:
        create(context, PARAMS, backend)
    except MoEEpPlatformError as raised:
        problem = (type(raised).__name__, str(raised))
    finally:
        if original is None:
            if "unsupported_reason" in cls.__dict__:
                del cls.unsupported_reason
        else:
            cls.unsupported_reason = original  # type: ignore[method-assign]
    gc.collect()
    grown = open_descriptors() - before
    with create(context, PARAMS, backend) as communication:
        return (*problem, grown, play_round(communication, one))


@every_backend
@pytest.mark.parametrize("failing", [0, 2])
@few_on_gpus(failing=[2])
def test_a_rank_that_cannot_run_the_backend_is_named_on_all_ranks(
    ranks: RunOnRanks, backend: Backend, device: str, failing: int
) -> None:
    one = random_round(PARAMS, (5, 0, 9), seed=2)
    results = ranks(
        3, fail_on_one_rank, device=device, backend=backend.name, failing=failing, one=one
    )
    for _, message, grown, _ in results:
        assert f"rank {failing}" in message
        assert "no room on this machine" in message
        assert "fine" in message
        assert grown == 0
    check(PARAMS, one, [played for *_, played in results])


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def no_more_memory() -> Iterator[None]:
    """No room in the address space for another large mapping."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def files_may_not_grow() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_out_on_one_rank(
    context: RankContext, backend: str, failing: int, shortage: Callable[[], Any], one: Round
) -> tuple[str | None, int, int, Played]:
    """Body: one rank runs out of something while it creates; then there is enough again."""
    params = MoEEpCommParams(6, 2, 1024, 2048)
    create(context, PARAMS, backend).destroy()
    gc.collect()
    before = (open_descriptors(), mappings())
    problem = None
    try:
        if context.rank == failing:
            with shortage():
                create(context, params, backend)
        else:
            create(context, params, backend)
    except moe_ep.MoEEpError as raised:
        problem = str(raised)
    gc.collect()
    after = (open_descriptors(), mappings())
    with create(context, PARAMS, backend) as communication:
        played = play_round(communication, one)
    return problem, after[0] - before[0], after[1] - before[1], played


@pytest.mark.parametrize("shortage", [no_more_descriptors, no_more_memory, files_may_not_grow])
@pytest.mark.parametrize("failing", [0, 1])
@one_sided_names
def test_a_shortage_on_one_rank_raises_on_all_and_leaves_nothing(
    ranks: RunOnRanks, backend: str, shortage: Callable[[], Any], failing: int
) -> None:
    one = random_round(PARAMS, (5, 0, 9), seed=2)
    results = ranks(
        3, run_out_on_one_rank, backend=backend, failing=failing, shortage=shortage, one=one
    )
    for problem, descriptors, maps, _ in results:
        assert problem is not None
        assert f"rank {failing}" in problem
        assert descriptors == 0
        assert maps <= 4
    check(PARAMS, one, [played for *_, played in results])


def keep_a_view(context: RankContext, backend: str, ending: str) -> bool:
    """Body: the received rows outlive their object; return whether they are as they were."""
    communication: MoEEpCommunication | None = create(context, PARAMS, backend)
    assert communication is not None
    result = communication.dispatch(
        ONE.hidden_states[context.rank].to(communication.device),
        ONE.topk_ids[context.rank].to(communication.device),
    )
    wanted = result.hidden_states.clone()
    view = result.hidden_states
    context.barrier()
    if ending == "destroyed":
        communication.destroy()
    del communication, result
    gc.collect()
    context.barrier()  # every rank has dropped its object
    # Would land in memory that was given back.
    torch.empty(2**20, device=context.device).fill_(7)
    return view.view(torch.int16).equal(wanted.view(torch.int16))


@every_backend
@pytest.mark.parametrize("ending", ["dropped", "destroyed"])
def test_a_received_view_stays_readable_after_its_object_is_gone(
    ranks: RunOnRanks, backend: Backend, device: str, ending: str
) -> None:
    results = ranks(2, keep_a_view, device=device, backend=backend.name, ending=ending)
    assert results == [True, True]


def drop_without_destroy(context: RankContext, backend: str) -> tuple[int, int]:
    """Body: objects that are only forgotten; return what they left."""
    counts = []
    for _ in range(12):
        communication = create(context, PARAMS, backend)
        play_round(communication, ONE)
        context.barrier()
        del communication
        gc.collect()
        counts.append((open_descriptors(), mappings()))
    return counts[-1][0] - counts[2][0], counts[-1][1] - counts[2][1]


@every_backend
def test_an_object_that_is_only_dropped_leaves_nothing(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    for descriptors, maps in ranks(2, drop_without_destroy, device=device, backend=backend.name):
        assert descriptors == 0
        assert maps <= 4


KEPT: list[Any] = []


def leave_without_destroy(context: RankContext, backend: str, moment: str) -> None:
    """Body: the process ends while the object, and a received view, are alive."""
    bootstrap = BootstrapConfig(context.size, context.rank, device=context.device)
    communication = create_communication(bootstrap, PARAMS, backend)
    KEPT.append(communication)
    play_round(communication, ONE)
    if moment == "in a round":
        rows = ONE.hidden_states[context.rank].to(communication.device)
        ids = ONE.topk_ids[context.rank].to(communication.device)
        KEPT.append(communication.dispatch(rows, ids))


@every_backend
@pytest.mark.parametrize("moment", ["between rounds", "in a round"])
def test_a_process_may_exit_without_destroy(
    ranks: RunOnRanks, backend: Backend, device: str, moment: str
) -> None:
    outcomes = ranks(
        2,
        leave_without_destroy,
        device=device,
        dedicated=True,
        backend=backend.name,
        moment=moment,
    )
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    assert all(outcome.seconds < 10 for outcome in outcomes), outcomes


def destroy_one_after_the_other(context: RankContext, backend: str) -> bool:
    """Body: a peer's destroy does not take the memory away that others still use."""
    communication = create(context, PARAMS, backend)
    play_round(communication, ONE)
    result = communication.dispatch(
        ONE.hidden_states[context.rank].to(communication.device),
        ONE.topk_ids[context.rank].to(communication.device),
    )
    wanted = result.hidden_states.clone()
    context.barrier()
    if context.rank == 0:
        communication.destroy()
    context.barrier()
    same = result.hidden_states.view(torch.int16).equal(wanted.view(torch.int16))
    communication.destroy()
    return same


@every_backend
def test_destroy_may_happen_at_different_times(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    assert ranks(2, destroy_one_after_the_other, device=device, backend=backend.name) == [
        True,
        True,
    ]


def references_left(context: RankContext, backend: str) -> int:
    """Body: return how many more there are to the group after destroy than before creation."""
    gc.collect()
    before = sys.getrefcount(context.group)
    communication = create(context, PARAMS, backend)
    play_round(communication, ONE)
    communication.destroy()
    return sys.getrefcount(context.group) - before


@every_backend
def test_a_destroyed_communication_does_not_hold_its_group(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    """Whose threads would outlive `destroy_process_group`."""
    assert ranks(2, references_left, device=device, backend=backend.name) == [0, 0]


def shared_files() -> dict[str, str]:
    """Return the path of each file, by its inode, that this process has mapped so that others see
    what it writes.
    """
    with open("/proc/self/maps") as file:
        entries = [line.split(maxsplit=5) for line in file]
    return {entry[4]: entry[5].strip() for entry in entries if entry[1].endswith("s")}


def files_of_a_workspace(context: RankContext, backend: str) -> list[str]:
    """Body: return the paths of what a communication had mapped, when it is destroyed."""
    before = shared_files()
    with create(context, PARAMS, backend) as communication:
        play_round(communication, ONE)
        return [path for inode, path in shared_files().items() if inode not in before]


@one_sided_names
def test_no_file_of_a_workspace_is_left_in_the_file_system(ranks: RunOnRanks, backend: str) -> None:
    for paths in ranks(2, files_of_a_workspace, backend=backend):
        assert len(paths) == 2  # a segment of each rank
        assert [path for path in paths if os.path.exists(path)] == []
