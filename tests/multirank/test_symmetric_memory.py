"""Memory shared by real processes: seen by all ranks, or by none and nothing left."""

import gc
import os
import re
import resource
import signal
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep import _native, construction, symmetric_memory
from moe_ep.collectives import SingleRankComm, TorchDistributedComm
from moe_ep.construction import HostIdentity
from moe_ep.errors import MoEEpConfigError, MoEEpError, MoEEpPlatformError, MoEEpStateError
from moe_ep.sharing import place_of
from moe_ep.symmetric_memory import SymmetricMemory
from tests.ranks import RankContext
from tests.ranks.members import MembersComm

pytestmark = pytest.mark.multirank

CPU = torch.device("cpu")


def allocate(context: RankContext, segment_bytes: int = 5000) -> SymmetricMemory:
    assert context.group is not None
    return SymmetricMemory.allocate(TorchDistributedComm(context.group), segment_bytes, CPU)


def resources() -> tuple[int, int]:
    """Descriptors and mappings of shared memory that this process has."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("/memfd:moe_ep")


def fails(*_: object, **__: object) -> Any:
    raise RuntimeError("injected")


def visible_everywhere(context: RankContext) -> None:
    memory = allocate(context, 5000)
    workspace = memory.workspace
    assert (memory.ep_rank, memory.ep_size) == (context.rank, context.size)
    assert workspace.shape == (context.size, memory.bytes_per_rank) == (context.size, 5000)
    assert not workspace.any()
    context.barrier()
    # Into a column of every rank's row that only this rank writes.
    for row in range(context.size):
        workspace[row, context.rank] = 1 + 10 * row + context.rank
    workspace[context.rank, 4999] = 200 + context.rank
    context.barrier()
    wanted = torch.zeros(context.size, 5000, dtype=torch.uint8)
    for row in range(context.size):
        wanted[row, : context.size] = 1 + 10 * row + torch.arange(context.size)
        wanted[row, 4999] = 200 + row
    assert torch.equal(workspace, wanted)
    context.barrier()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_sees_what_any_rank_writes(ranks: Any, size: int) -> None:
    ranks(size, visible_everywhere)


def groups_at_once(context: RankContext, groups: list[tuple[int, list[int]]]) -> None:
    assert context.group is not None
    held = []
    for number, members in groups:
        if context.rank not in members:
            continue
        comm = MembersComm(context.group, members, 100 + number)
        memory = SymmetricMemory.allocate(comm, 100, CPU)
        assert (memory.ep_rank, memory.ep_size) == (members.index(context.rank), len(members))
        memory.workspace[memory.ep_rank] = 16 * number + context.rank
        held.append((number, members, memory))
    context.barrier()
    for number, members, memory in held:
        wanted = [16 * number + rank for rank in members]
        assert memory.workspace[:, 0].tolist() == memory.workspace[:, 99].tolist() == wanted
    context.barrier()


@pytest.mark.parametrize("order", [1, -1])
def test_groups_at_once_do_not_meet(ranks: Any, order: int) -> None:
    members = [[0, 1], [2, 3], [0, 2], [1, 3], [1, 2, 3], [0, 1, 2, 3], [3, 2, 1, 0], [0, 1], [2]]
    ranks(4, groups_at_once, groups=list(enumerate(members))[::order])


exchange = _native.FdChannel.exchange


def exchange_without_descriptors(*arguments: Any) -> Any:
    """Fails half-way: no descriptor is left to receive one, or to open a connection."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, limits[1]))
    try:
        return exchange(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


STAGES = {
    "reserve": (_native, "host_memory", fails),
    "back": (_native.SegmentedMemory, "back_own_segment", fails),
    "open the channel": (_native, "FdChannel", fails),
    "share": (_native.SegmentedMemory, "share_own_segment", fails),
    "exchange": (_native.FdChannel, "exchange", exchange_without_descriptors),
    "map": (_native.SegmentedMemory, "map_peer_segment", fails),
}


def failure_on_one_rank(context: RankContext, stage: str, failing_rank: int) -> str:
    allocate(context).close()  # whatever is made once in a process
    context.barrier()
    before = resources()
    injection = mock.patch.object(*STAGES[stage])
    with injection if context.rank == failing_rank else nullcontext():
        try:
            allocate(context)
        except MoEEpPlatformError as error:
            held = error  # even an error that is kept holds no memory
    assert resources() == before
    if context.rank == failing_rank:
        assert isinstance(held.__cause__, RuntimeError | OSError)
    visible_everywhere(context)
    return str(held)


@pytest.mark.parametrize("failing_rank", [0, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_failure_on_one_rank_raises_on_all_and_leaves_nothing(
    ranks: Any, stage: str, failing_rank: int
) -> None:
    messages = ranks(3, failure_on_one_rank, stage=stage, failing_rank=failing_rank)
    assert len(set(messages)) == 1
    reason = (
        "OSError: .*without its descriptor" if stage == "exchange" else "RuntimeError: injected"
    )
    assert re.search(f"rank {failing_rank}: {reason}", messages[0]), messages[0]


def promised_form_fails(context: RankContext) -> list[str]:
    allocate(context).close()
    context.barrier()
    before = resources()
    # Memory of CPUs refuses FABRIC handles, as a GPU may that has promised them.
    promise = replace(place_of(CPU), no_fabric="")
    with (
        mock.patch.object(symmetric_memory, "place_of", return_value=promise),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("default")
        for _ in range(2):
            visible_everywhere(context)
    assert resources() == before
    return [str(warning.message) for warning in caught]


def test_handles_that_were_promised_and_fail_are_replaced_with_one_warning(ranks: Any) -> None:
    for messages in ranks(3, promised_form_fails):
        assert len(messages) == 1, messages
        assert "file descriptors are used instead" in messages[0]


STRANGERS = {
    "host": (HostIdentity, "of_this_process", HostIdentity("b", "another-boot")),
    "network": (construction, "network_namespace", "net:[7]"),
}


def refused(
    context: RankContext, stranger: str | None, segment_bytes: list[int]
) -> tuple[str, str]:
    before = resources()
    disguise: AbstractContextManager[object] = nullcontext()
    if stranger is not None and context.rank == 1:
        target, name, value = STRANGERS[stranger]
        disguise = mock.patch.object(target, name, return_value=value)
    with disguise:
        try:
            allocate(context, segment_bytes[context.rank])
        except MoEEpError as error:
            held = error
    assert resources() == before
    return type(held).__name__, str(held)


def check_refused(ranks: Any, stranger: str | None, segment_bytes: list[int], *wanted: str) -> None:
    answers = ranks(len(segment_bytes), refused, stranger=stranger, segment_bytes=segment_bytes)
    assert len(set(answers)) == 1, answers
    kind, message = answers[0]
    for part in wanted:
        assert part in f"{kind}: {message}"


def test_two_hosts_are_refused(ranks: Any) -> None:
    check_refused(
        ranks,
        "host",
        [100] * 3,
        "PlatformError",
        "ranks 0, 2: ",
        "rank 1: b (boot id another-boot)",
    )


def test_two_network_namespaces_are_refused(ranks: Any) -> None:
    check_refused(ranks, "network", [100] * 3, "PlatformError", "rank 1: net:[7]")


def test_ranks_with_different_sizes_are_refused(ranks: Any) -> None:
    check_refused(
        ranks,
        None,
        [100, 100, 200],
        "ConfigError",
        "segment_bytes",
        "ranks 0, 1: 100",
        "rank 2: 200",
    )


def test_segments_that_do_not_fit_together_are_refused(ranks: Any) -> None:
    machine = os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES")
    check_refused(ranks, None, [machine * 2 // 3] * 2, "PlatformError", "2 segments of")


def restored(context: RankContext) -> None:
    assert context.group is not None
    comm = TorchDistributedComm(context.group)
    memory = allocate(context, 5000)
    workspace = memory.workspace
    before = resources()
    for _ in range(3):
        workspace[context.rank] = 9
        context.barrier()
        memory.release()
        memory.release()
        with pytest.raises(MoEEpStateError, match="needs memory that is mapped, got released"):
            _ = memory.workspace
        memory.restore(comm)
        memory.restore(comm)
        assert memory.workspace is workspace
        assert not workspace.any()
        context.barrier()
        workspace[context.rank] = context.rank + 1
        context.barrier()
        assert workspace[:, 4999].tolist() == [rank + 1 for rank in range(context.size)]
        context.barrier()
    assert resources() == before


def test_restore_finds_the_same_addresses(ranks: Any) -> None:
    ranks(3, restored)


def restore_with_one_rank_not_released(context: RankContext) -> None:
    assert context.group is not None
    comm = TorchDistributedComm(context.group)
    memory = allocate(context)
    if context.rank != 1:
        memory.release()
    with pytest.raises(MoEEpStateError, match="rank 1: mapped"):
        memory.restore(comm)
    memory.release()
    memory.restore(comm)  # no harm done
    assert memory.state == "mapped"
    with pytest.raises(MoEEpConfigError, match=r"as in allocate, got rank 0 of 1"):
        memory.restore(SingleRankComm())


def test_restore_needs_all_ranks_released(ranks: Any) -> None:
    ranks(3, restore_with_one_rank_not_released)


def restore_fails_on_one_rank(context: RankContext) -> None:
    assert context.group is not None
    comm = TorchDistributedComm(context.group)
    memory = allocate(context)
    memory.release()
    injection = mock.patch.object(_native.SegmentedMemory, "map_peer_segment", fails)
    with (
        injection if context.rank == 1 else nullcontext(),
        pytest.raises(MoEEpPlatformError, match="rank 1: RuntimeError: injected"),
    ):
        memory.restore(comm)
    assert memory.state == "broken"
    with pytest.raises(MoEEpStateError, match="broken"):
        memory.restore(comm)
    memory.close()
    with pytest.raises(MoEEpStateError, match="after close"):
        memory.release()


def test_restore_that_fails_breaks_the_memory_on_all_ranks(ranks: Any) -> None:
    ranks(3, restore_fails_on_one_rank)


def view_outlives_its_owner(context: RankContext) -> None:
    before = resources()
    memory = allocate(context)
    peer = (context.rank + 1) % context.size
    view = memory.workspace[peer, 10:20]
    memory.workspace[context.rank] = context.rank + 1
    context.barrier()
    memory.close()
    memory.close()
    del memory
    context.barrier()
    assert view.tolist() == [peer + 1] * 10
    del view
    assert resources() == before


def test_view_stays_readable_after_all_ranks_closed(ranks: Any) -> None:
    ranks(3, view_outlives_its_owner)


def many_cycles(context: RankContext, cycles: int) -> None:
    allocate(context).close()
    before = resources()
    for _ in range(cycles):
        memory = allocate(context)
        memory.workspace[context.rank] = 1
        memory.close()
    assert resources() == before


def test_cycles_leave_nothing(ranks: Any) -> None:
    ranks(4, many_cycles, cycles=50)


def leave_without_close(context: RankContext, how: str) -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    memory = allocate(replace(context, group=group))
    memory.workspace[context.rank] = context.rank + 1
    context.barrier()
    if how == "die" and context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    # A peer's memory outlives the peer.
    assert memory.workspace[:, 0].tolist() == [1, 2, 3]
    leave_without_close.memory = memory  # type: ignore[attr-defined]  # still there at exit


@pytest.mark.parametrize("how", ["exit", "die"])
def test_ranks_leave_without_close(ranks: Any, how: str) -> None:
    outcomes = ranks(3, leave_without_close, dedicated=True, how=how)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert [outcome.exit_code for outcome in outcomes] == [0, -9 if how == "die" else 0, 0]


def lose_a_rank(context: RankContext, victim: int) -> tuple[str, float]:
    """Body: one rank dies when the others wait for its handle already."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None

    def die(*_: object) -> None:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    injection = mock.patch.object(_native.FdChannel, "exchange", die)
    started = time.monotonic()
    with (
        injection if context.rank == victim else nullcontext(),
        pytest.raises(MoEEpError) as raised,
    ):
        allocate(replace(context, group=group))
    return str(raised.value), time.monotonic() - started


@pytest.mark.parametrize(("size", "victim"), [(2, 1), (4, 0)])
def test_rank_that_dies_in_the_exchange_is_missed_and_named(
    ranks: Any, size: int, victim: int
) -> None:
    outcomes = ranks(size, lose_a_rank, dedicated=True, victim=victim)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.exit_code == -signal.SIGKILL
            continue
        assert outcome.error is None, outcome.error
        message, seconds = outcome.value
        assert f"rank {victim}" in message
        # A second, or more on a machine with other work, but not the minute of the exchange.
        assert seconds < 20, message


def test_group_of_one_needs_no_handles() -> None:
    with (
        mock.patch.object(_native, "FdChannel", fails),
        mock.patch.object(_native.SegmentedMemory, "share_own_segment", fails),
    ):
        memory = SymmetricMemory.allocate(SingleRankComm(), 10, CPU)
    memory.workspace[0] = 5
    assert memory.workspace.tolist() == [[5] * 10]


def test_device_without_shared_memory_is_refused() -> None:
    with pytest.raises(
        MoEEpPlatformError, match="device must be a CPU or a CUDA device to share memory, got meta"
    ):
        SymmetricMemory.allocate(SingleRankComm(), 10, torch.device("meta"))


def test_nothing_appears_in_dev_shm(ranks: Any) -> None:
    def listing() -> set[str]:
        return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()

    before = listing()
    ranks(2, visible_everywhere)
    assert not {name for name in listing() - before if "moe_ep" in name}
