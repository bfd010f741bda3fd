"""How do the ranks start? As processes of this machine, in a Gloo group over loopback."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Result = TypeVar("Result")


def run_ranks(ranks: int, threads: int, body: Callable[[int], Result]) -> Result:
    """Run `body(rank)` in `ranks` new processes and return what rank 0 returned.

    body: picklable; inside it the default process group is ready.
    threads: of torch, in each process.
    When a rank fails, the others are ended and its exception is raised here, with its traceback.
    """
    with tempfile.TemporaryDirectory(prefix="moe_ep_bench_") as folder:
        mp.spawn(_rank_main, (ranks, threads, Path(folder), body), nprocs=ranks, daemon=True)
        result: Result = pickle.loads((Path(folder) / "result").read_bytes())
        return result


def _rank_main(
    rank: int, ranks: int, threads: int, folder: Path, body: Callable[[int], Result]
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    result = body(rank)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))
