"""Does GPU memory that ranks share live as long as it is used, and no longer, whoever ends it?"""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
import torch.distributed as dist

from moe_ep.collectives import SingleRankComm, TorchDistributedComm
from moe_ep.errors import MoEEpStateError
from moe_ep.symmetric_memory import SymmetricMemory
from tests.conftest import RunOnRanks
from tests.gpu.device_rounds import capturing
from tests.gpu.shared_memory import (
    GPUS,
    MIB,
    check_that_all_write_everywhere,
    free_bytes,
    group_of,
    on_gpus,
    one_gpu,
    settle,
    two_gpus,
    warm_up,
)
from tests.ranks import RankContext

pytestmark = one_gpu


def new_memory_is_zero(context: RankContext) -> None:
    device = torch.device("cuda", 0)
    for _ in range(3):  # the driver may hand out what was written just before
        memory = SymmetricMemory.allocate(SingleRankComm(), 256 * MIB, device)
        assert not memory.workspace.any()
        memory.workspace.fill_(0xAB)
        torch.cuda.synchronize()
        memory.close()


def test_new_memory_is_zero(ranks: RunOnRanks) -> None:
    on_gpus(ranks, 1, new_memory_is_zero)


def release_and_restore(context: RankContext, gpus: list[int]) -> None:
    device = torch.device("cuda", gpus[context.rank])
    size = 256 * MIB
    with group_of(context) as comm:
        warm_up(comm, device, size)
        memory = SymmetricMemory.allocate(comm, size, device)
        workspace = memory.workspace
        with_memory = free_bytes(comm, device)
        for _ in range(3):
            # Release must wait for what is still to run.
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
            workspace[context.rank].fill_(context.rank + 1)
            memory.release()
            memory.release()
            assert memory.state == "released"
            assert free_bytes(comm, device) - with_memory >= size * gpus.count(device.index)
            with pytest.raises(MoEEpStateError, match="needs memory that is mapped, got released"):
                _ = memory.workspace
            memory.restore(comm)
            memory.restore(comm)
            assert memory.workspace is workspace
            check_that_all_write_everywhere(comm, memory)
        assert free_bytes(comm, device) - with_memory > -size // 4


@pytest.mark.parametrize("gpus", [[0], [0, 0], pytest.param([0, 1], marks=two_gpus)])
def test_release_gives_the_memory_back_and_restore_finds_the_same_addresses(
    ranks: RunOnRanks, gpus: list[int]
) -> None:
    on_gpus(ranks, len(gpus), release_and_restore, gpus=gpus, dedicated=gpus == [0, 1])


def replay_after_restore(context: RankContext) -> None:
    device = torch.device("cuda", 0)
    with group_of(context) as comm:
        memory = SymmetricMemory.allocate(comm, MIB, device)
        peer = (context.rank + 1) % context.size
        target = memory.workspace[peer]
        target.fill_(0)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with capturing(graph, device):
            target.fill_(context.rank + 1)
        memory.release()
        memory.restore(comm)
        assert not memory.workspace.any()
        settle(comm, device)
        graph.replay()
        settle(comm, device)
        writers = [(row - 1) % context.size + 1 for row in range(context.size)]
        assert memory.workspace[:, 0].tolist() == memory.workspace[:, -1].tolist() == writers
        settle(comm, device)


def test_graph_captured_before_a_release_replays_after_the_restore(ranks: RunOnRanks) -> None:
    on_gpus(ranks, 2, replay_after_restore)


def view_outlives_its_owner(context: RankContext) -> None:
    device = torch.device("cuda", 0)
    with group_of(context) as comm:
        warm_up(comm, device, 256 * MIB)
        before = free_bytes(comm, device)
        memory = SymmetricMemory.allocate(comm, 256 * MIB, device)
        peer = (context.rank + 1) % context.size
        view = memory.workspace[peer, 10:20]
        memory.workspace[context.rank] = context.rank + 1
        settle(comm, device)
        memory.close()
        memory.close()
        del memory
        settle(comm, device)
        assert view.tolist() == [peer + 1] * 10
        assert before - free_bytes(comm, device) >= 256 * MIB
        del view
        assert before - free_bytes(comm, device) < 64 * MIB


def test_view_keeps_the_memory_until_it_goes(ranks: RunOnRanks) -> None:
    on_gpus(ranks, 2, view_outlives_its_owner)


def dropped_while_in_use(context: RankContext) -> None:
    memory = SymmetricMemory.allocate(SingleRankComm(), MIB, torch.device("cuda", 0))
    view = memory.workspace[0]
    memory.close()
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    view.fill_(1)
    del view, memory
    torch.cuda.synchronize()  # no fault: the memory has waited for the kernel


def test_memory_that_is_dropped_waits_for_the_device(ranks: RunOnRanks) -> None:
    on_gpus(ranks, 1, dropped_while_in_use)


def many_cycles(context: RankContext, cycles: int) -> tuple[int, int]:
    """How many descriptors and bytes are gone after them."""
    device = torch.device("cuda", 0)
    with group_of(context) as comm:
        warm_up(comm, device, 64 * MIB)
        descriptors, free = len(os.listdir("/proc/self/fd")), free_bytes(comm, device)
        for _ in range(cycles):
            memory = SymmetricMemory.allocate(comm, 64 * MIB, device)
            memory.workspace[context.rank] = 1
            memory.close()
        return (
            len(os.listdir("/proc/self/fd")) - descriptors,
            free - free_bytes(comm, device),
        )


def test_50_cycles_leave_nothing(ranks: RunOnRanks) -> None:
    for descriptors, gone in on_gpus(ranks, 2, many_cycles, cycles=50):
        assert descriptors == 0
        assert gone < 64 * MIB


def allocate_in_a_thread(context: RankContext) -> None:
    made: list[SymmetricMemory] = []
    ordinal = GPUS - 1

    def body() -> None:
        made.append(SymmetricMemory.allocate(SingleRankComm(), MIB, torch.device("cuda", ordinal)))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    [memory] = made
    assert torch.cuda.current_device() == 0
    memory.workspace.fill_(3)
    assert memory.workspace.cpu().eq(3).all()
    thread = threading.Thread(target=memory.release)
    thread.start()
    thread.join()
    assert memory.state == "released"
    assert torch.cuda.current_device() == 0


def test_any_thread_may_allocate_and_none_loses_its_device(ranks: RunOnRanks) -> None:
    on_gpus(ranks, 1, allocate_in_a_thread, dedicated=True)


def leave_without_close(context: RankContext) -> None:
    device = torch.device("cuda", 0)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    comm = TorchDistributedComm(dist.group.WORLD)
    memory = SymmetricMemory.allocate(comm, MIB, device)
    memory.workspace[context.rank] = 1
    settle(comm, device)
    leave_without_close.memory = memory  # type: ignore[attr-defined]  # still there at exit
    leave_without_close.view = memory.workspace[0]  # type: ignore[attr-defined]


def test_ranks_may_exit_without_close(ranks: RunOnRanks) -> None:
    on_gpus(ranks, 2, leave_without_close, dedicated=True)


def drop_in_a_forked_child(context: RankContext) -> None:
    memory = SymmetricMemory.allocate(SingleRankComm(), MIB, torch.device("cuda", 0))
    memory.workspace.fill_(5)
    torch.cuda.synchronize()
    child = os.fork()
    if child == 0:
        memory.close()
        gc.collect()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert memory.workspace.cpu().eq(5).all()


def test_forked_child_may_drop_the_memory_and_takes_nothing_away(ranks: RunOnRanks) -> None:
    on_gpus(ranks, 1, drop_in_a_forked_child, dedicated=True)
