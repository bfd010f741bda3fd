"""How do the ranks start? As processes of this machine, in a Gloo group over loopback."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_sharing import sharing
from places import Place, SpinBarrier

Result = TypeVar("Result")


@dataclass(frozen=True)
class Launch:
    """How many processes, and what they share.

    threads: of torch, in each process.
    gpus: each shared by equally many neighbours, under MPS with equal shares of its
        multiprocessors; 0: the CPU.
    nccl: whether the group needs NCCL beside Gloo; for one rank a GPU.
    """

    ranks: int
    threads: int
    gpus: int = 0
    nccl: bool = False


def run_ranks(launch: Launch, body: Callable[[Place], Result]) -> Result:
    """Run `body(place)` in new processes and return what rank 0 returned.

    body: picklable; inside it the default process group is ready, and on GPUs a stream of the
    rank's own is current.
    When a rank fails, the others are ended and its exception is raised here, with its traceback.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moe_ep_bench_")))
        (folder / "barrier").write_bytes(bytes(SpinBarrier.file_bytes(launch.ranks)))
        ranks_per_gpu = launch.ranks // launch.gpus if launch.gpus else 1
        environment = stack.enter_context(sharing(ranks_per_gpu))
        arguments = (launch, folder, environment, body)
        mp.spawn(_rank_main, arguments, nprocs=launch.ranks, daemon=True)
        result: Result = pickle.loads((folder / "result").read_bytes())
        return result


def _rank_main(
    rank: int,
    launch: Launch,
    folder: Path,
    environment: dict[str, str],
    body: Callable[[Place], Result],
) -> None:
    os.environ.update(environment)  # before anything starts CUDA, which reads it once
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(launch.threads)
    device = torch.device("cpu")
    if launch.gpus:
        device = torch.device("cuda", rank * launch.gpus // launch.ranks)
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))  # the default one cannot be captured
    store = dist.FileStore(str(folder / "store"), launch.ranks)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if launch.nccl else "gloo",
        store=store,
        rank=rank,
        world_size=launch.ranks,
    )
    with SpinBarrier(folder / "barrier", rank, launch.ranks) as spin, torch.no_grad():
        place = Place(rank, launch.ranks, device, launch.gpus, spin)
        result = body(place)
        place.barrier()
    dist.destroy_process_group()
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))
