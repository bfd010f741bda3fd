"""Memory of GPUs that real processes share: what its tests have in common."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.collectives import CommBackend, SingleRankComm, TorchDistributedComm
from moe_ep.symmetric_memory import SymmetricMemory
from tests.conftest import RunOnRanks
from tests.ranks import Outcome, RankContext
from tests.ranks.devices import ONE_GPU

GPUS = torch.cuda.device_count()

one_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device, found none"),
]
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA devices, found {GPUS}")

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
