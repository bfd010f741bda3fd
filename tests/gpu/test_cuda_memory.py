"""Memory of GPUs shared by real processes: seen by all ranks, or by none and nothing left."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import _native
from moe_ep.collectives import CommBackend, SingleRankComm, TorchDistributedComm
from moe_ep.errors import MoEEpConfigError, MoEEpPlatformError, MoEEpStateError
from moe_ep.symmetric_memory import SymmetricMemory
from tests.conftest import RunOnRanks
from tests.gpu.device_rounds import capturing
from tests.ranks import Outcome, RankContext
from tests.ranks.devices import ONE_GPU

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device, found none"),
]

two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA devices, found {GPUS}")

FD = _native.HandleForm.FILE_DESCRIPTOR
FABRIC = _native.HandleForm.FABRIC

MIB = 1 << 20


def on_gpus(
    ranks: RunOnRanks,
    size: int,
    body: Callable[..., Any],
    *,
    dedicated: bool = False,
    seconds: float = 90,
    **kwargs: Any,
) -> list[Any]:
    """What the body returned on each rank.

    dedicated: in new processes without MPS, which must end well: for bodies about devices that they
        choose themselves, about threads, forks, faults and exits. The start of CUDA costs seconds.
    """
    if not dedicated:
        returned: list[Any] = ranks(size, body, device=ONE_GPU, seconds=seconds, **kwargs)
        return returned
    outcomes: list[Outcome] = ranks(size, body, dedicated=True, seconds=seconds, **kwargs)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.error}"
    assert [outcome.exit_code for outcome in outcomes] == [0] * size
    return [outcome.value for outcome in outcomes]


@contextmanager
def group_of(context: RankContext) -> Iterator[CommBackend]:
    """The group of all processes of a test. Collective."""
    if context.size == 1:
        yield SingleRankComm()
        return
    if context.group is not None:
        yield TorchDistributedComm(context.group)
        return
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    try:
        yield TorchDistributedComm(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def settle(comm: CommBackend, device: torch.device) -> None:
    """Return when all that any rank has launched is done."""
    torch.cuda.synchronize(device)
    comm.barrier()


def warm_up(comm: CommBackend, device: torch.device, segment_bytes: int) -> None:
    """Do once what a body does between two measurements: CUDA loads kernels, and makes room for
    what they spill, when they first run, which takes more memory than many a segment. Collective.
    """
    memory = SymmetricMemory.allocate(comm, segment_bytes, device)
    check_that_all_write_everywhere(comm, memory)
    memory.release()
    memory.restore(comm)
    memory.workspace[comm.get_rank()].fill_(1)
    memory.workspace[comm.get_rank()] = 2
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
    assert memory.workspace[comm.get_rank(), 10:20].tolist() == [2] * 10
    memory.close()
    free_bytes(comm, device)


def free_bytes(comm: CommBackend, device: torch.device) -> int:
    """Return what the GPU has left while no rank allocates."""
    gc.collect()
    torch.cuda.empty_cache()
    settle(comm, device)
    free, _ = torch.cuda.mem_get_info(device)
    comm.barrier()
    return free


def pattern(row: int, writer: int, count: int) -> Tensor:
    """Bytes that no other pair of row and writer has."""
    generator = torch.Generator().manual_seed(1000 * row + writer)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def check_that_all_write_everywhere(comm: CommBackend, memory: SymmetricMemory) -> None:
    """Each rank writes its part of every segment, and reads all parts of all of them."""
    rank, size, workspace = comm.get_rank(), comm.get_size(), memory.workspace
    device = workspace.device
    assert workspace.dtype == torch.uint8
    assert workspace.shape == (size, memory.bytes_per_rank)
    assert workspace.stride(0) >= memory.mapped_bytes + 2 * MIB
    assert workspace.stride(1) == 1
    assert not workspace.any()
    settle(comm, device)
    part = memory.bytes_per_rank // size
    for row in range(size):
        workspace[row, rank * part : (rank + 1) * part] = pattern(row, rank, part).to(device)
    settle(comm, device)
    workspace[rank, -1] = 200 + rank
    settle(comm, device)
    for row in range(size):
        wanted = torch.cat([pattern(row, writer, part) for writer in range(size)])
        wanted[memory.bytes_per_rank - 1 :] = 200 + row
        got = workspace[row, : size * part].cpu()
        wrong = (got != wanted).nonzero()
        assert not len(wrong), f"row {row}: {len(wrong)} bytes differ, the first at {wrong[0]}"
        assert int(workspace[row, -1]) == 200 + row
    settle(comm, device)


def write_everywhere(
    context: RankContext,
    gpus: list[int],
    segment_bytes: int,
    only: _native.HandleForm | None = None,
) -> str:
    device = torch.device("cuda", gpus[context.rank])
    reason_against = _native.reason_against

    def reason(ordinal: int, form: _native.HandleForm) -> str:
        return reason_against(ordinal, form) if only in (None, form) else "not in this test"

    with group_of(context) as comm, mock.patch.object(_native, "reason_against", reason):
        memory = SymmetricMemory.allocate(comm, segment_bytes, device)
        assert memory.workspace.device == device
        check_that_all_write_everywhere(comm, memory)
    return str(memory.workspace.device)


@pytest.mark.parametrize(
    ("size", "segment_bytes"), [(1, 1), (1, 5 * MIB + 3), (2, 2 * MIB), (4, 5 * MIB + 4)]
)
def test_every_rank_on_one_gpu_sees_what_any_rank_writes(
    ranks: RunOnRanks, size: int, segment_bytes: int
) -> None:
    on_gpus(ranks, size, write_everywhere, gpus=[0] * size, segment_bytes=segment_bytes)


@two_gpus
@pytest.mark.parametrize("gpus", [[1, 0], [0, 0, 1, 1]])
def test_every_rank_on_two_gpus_sees_what_any_rank_writes(
    ranks: RunOnRanks, gpus: list[int]
) -> None:
    devices = on_gpus(
        ranks, len(gpus), write_everywhere, gpus=gpus, segment_bytes=33 * MIB, dedicated=True
    )
    assert devices == [f"cuda:{gpu}" for gpu in gpus]


def see_only_the_own_gpu(context: RankContext) -> str:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(context.rank)
    return write_everywhere(context, gpus=[0] * context.size, segment_bytes=5 * MIB)


@two_gpus
def test_ranks_that_see_only_their_own_gpu_share_memory(ranks: RunOnRanks) -> None:
    assert on_gpus(ranks, 2, see_only_the_own_gpu, dedicated=True) == ["cuda:0", "cuda:0"]


def fabric_works(context: RankContext) -> tuple[str, str]:
    """What the probe says, and what comes of the real thing."""
    said = _native.reason_against(0, FABRIC)
    memory = _native.SegmentedMemory(_native.cuda_memory(0), 0, 2, MIB)
    try:
        memory.back_own_segment(FABRIC)
        handle = memory.share_own_segment()
    except RuntimeError as error:
        assert memory.state == "released"
        return said, str(error)
    assert handle.fabric is not None
    assert any(handle.fabric)
    return said, ""


def test_probe_says_what_the_allocation_will(ranks: RunOnRanks) -> None:
    [(said, came)] = on_gpus(ranks, 1, fabric_works)
    assert (said == "") == (came == ""), (said, came)
    if came:
        assert "CUDA_ERROR" in came


@pytest.mark.parametrize("gpus", [[0, 0], pytest.param([0, 1], marks=two_gpus)])
def test_fabric_handles_share_memory(ranks: RunOnRanks, gpus: list[int]) -> None:
    [(said, _)] = on_gpus(ranks, 1, fabric_works)
    if said:
        pytest.skip(f"no FABRIC handles here: {said}")
    on_gpus(
        ranks,
        2,
        write_everywhere,
        gpus=gpus,
        segment_bytes=5 * MIB,
        only=FABRIC,
        dedicated=gpus != [0, 0],
    )


def promise_fabric(context: RankContext) -> tuple[list[str], int]:
    device = torch.device("cuda", 0)
    back_own_segment = _native.SegmentedMemory.back_own_segment

    def back(memory: _native.SegmentedMemory, form: _native.HandleForm) -> None:
        if form == FABRIC and context.rank == 1:
            raise RuntimeError("injected")
        back_own_segment(memory, form)

    with (
        group_of(context) as comm,
        mock.patch.object(_native, "reason_against", return_value=""),
        mock.patch.object(_native.SegmentedMemory, "back_own_segment", back),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("default")
        warm_up(comm, device, 64 * MIB)
        before = free_bytes(comm, device)
        memory = SymmetricMemory.allocate(comm, 64 * MIB, device)
        check_that_all_write_everywhere(comm, memory)
        memory.close()
        leaked = before - free_bytes(comm, device)
    return [str(warning.message) for warning in caught], leaked


def test_fabric_handles_that_were_promised_and_fail_are_replaced(ranks: RunOnRanks) -> None:
    for messages, leaked in on_gpus(ranks, 2, promise_fabric):
        assert len(messages) == 1, messages
        assert "file descriptors are used instead" in messages[0]
        assert leaked < 64 * MIB


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
            torch.cuda._sleep(50_000_000)  # release must wait for what is still to run
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
    torch.cuda._sleep(200_000_000)
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


def fails(*arguments: object) -> None:
    raise RuntimeError("injected")


def fail_on_one_rank(context: RankContext, stage: str) -> str:
    device = torch.device("cuda", 0)
    with group_of(context) as comm:
        warm_up(comm, device, 256 * MIB)
        descriptors, free = len(os.listdir("/proc/self/fd")), free_bytes(comm, device)
        injection: AbstractContextManager[object] = nullcontext()
        if context.rank == 1:
            # A mock would remember the handle that it was called with.
            injection = mock.patch.object(_native.SegmentedMemory, stage, fails)
        with injection, pytest.raises(MoEEpPlatformError, match=r"rank 1: .*injected") as caught:
            SymmetricMemory.allocate(comm, 256 * MIB, device)
        message = str(caught.value)
        del caught  # its traceback holds the frames, and these the handle that was at hand
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert free - free_bytes(comm, device) < 64 * MIB
        check_that_all_write_everywhere(comm, SymmetricMemory.allocate(comm, 5 * MIB, device))
    return message


@pytest.mark.parametrize("stage", ["back_own_segment", "share_own_segment", "map_peer_segment"])
def test_failure_on_one_rank_raises_on_all_and_leaves_nothing(
    ranks: RunOnRanks, stage: str
) -> None:
    messages = on_gpus(ranks, 2, fail_on_one_rank, stage=stage)
    assert len(set(messages)) == 1
    if stage == "map_peer_segment":
        assert messages[0].count("GPU-") == 2  # who could not map whose


def ask_for_too_much(context: RankContext) -> str:
    device = torch.device("cuda", 0)
    with group_of(context) as comm:
        too_much = comm.allgather(free_bytes(comm, device) * 6 // 10)[0]
        with pytest.raises(MoEEpPlatformError) as caught:
            SymmetricMemory.allocate(comm, too_much, device)
        return str(caught.value)


def test_segments_that_do_not_fit_together_are_refused(ranks: RunOnRanks) -> None:
    messages = on_gpus(ranks, 2, ask_for_too_much)
    assert len(set(messages)) == 1
    assert "2 segments of" in messages[0]
    assert "on cuda:0 (" in messages[0]


def ask_for_too_much_alone(context: RankContext) -> str:
    _, total = torch.cuda.mem_get_info(0)
    memory = _native.SegmentedMemory(_native.cuda_memory(0), 0, 1, 2 * total)
    with pytest.raises(RuntimeError) as caught:
        memory.back_own_segment()
    assert memory.state == "released"
    return str(caught.value)


def test_memory_that_the_gpu_does_not_have_names_call_reason_and_advice(ranks: RunOnRanks) -> None:
    [message] = on_gpus(ranks, 1, ask_for_too_much_alone)
    for part in ("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", "cuda:0", "max_tokens_per_rank"):
        assert part in message


def mix_devices(context: RankContext) -> str:
    device = torch.device("cuda", 0) if context.rank else torch.device("cpu")
    with group_of(context) as comm, pytest.raises(MoEEpConfigError) as caught:
        SymmetricMemory.allocate(comm, MIB, device)
    return str(caught.value)


def test_cpu_and_gpu_in_one_group_are_refused(ranks: RunOnRanks) -> None:
    messages = on_gpus(ranks, 2, mix_devices)
    assert len(set(messages)) == 1
    assert "device must be the same on all ranks, got rank 0: cpu; rank 1: cuda" in messages[0]


def device_that_is_not_there(context: RankContext) -> str:
    with pytest.raises(MoEEpPlatformError) as caught:
        SymmetricMemory.allocate(SingleRankComm(), MIB, torch.device("cuda", 63))
    return str(caught.value)


def test_gpu_that_is_not_there_is_named(ranks: RunOnRanks) -> None:
    [message] = on_gpus(ranks, 1, device_that_is_not_there)
    for part in ("cuDeviceGet of cuda:63", "CUDA_ERROR_INVALID_DEVICE", "CUDA_VISIBLE_DEVICES"):
        assert part in message


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


def overrun(context: RankContext) -> list[int]:
    """Rank 0 writes behind its segment; nothing of it reaches rank 1's."""
    device = torch.device("cuda", 0)
    with group_of(context) as comm:
        memory = SymmetricMemory.allocate(comm, 2 * MIB, device)
        workspace = memory.workspace
        settle(comm, device)
        if context.rank == 0:
            behind = workspace.as_strided((16,), (1,), memory.mapped_bytes)
            behind.fill_(1)
            with pytest.raises(RuntimeError, match="illegal memory access"):
                torch.cuda.synchronize()
            comm.barrier()
            memory.close()
            return []
        comm.barrier()
        return workspace.amax(dim=1).tolist()


def test_overrun_faults_instead_of_reaching_a_peer(ranks: RunOnRanks) -> None:
    outcomes: list[Outcome] = ranks(2, overrun, dedicated=True, seconds=90)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert [outcome.value for outcome in outcomes] == [[], [0, 0]]
