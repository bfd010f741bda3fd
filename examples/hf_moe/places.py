"""Where does each rank run: on the CPU, on a GPU of its own, or on one that it shares?

Ranks that share a GPU need an MPS daemon and each its part of the multiprocessors, both before CUDA
starts in them; and they cannot use NCCL, which refuses two ranks on one GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from moe_ep import CakeAlltoAll

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
import mps


def reason_against_gpus(ranks: int, backend: str) -> str | None:
    """Return why `ranks` ranks cannot run on the GPUs of this machine, or None if they can.

    backend: what is to move the tokens, or "auto".
    """
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return "torch finds no CUDA device here"
    if not _share_gpus(ranks):
        return None
    if backend == "torch_dist":
        return f"torch_dist needs NCCL, and NCCL a GPU for each of {ranks} ranks, found {gpus}"
    if dist.is_torchelastic_launched():
        # CUDA must not start here, so that nothing more can be asked: creating the backend tells.
        if mps.daemon_is_running(os.environ):
            return None
        return "ranks that share a GPU need an MPS daemon: python tools/mps.py torchrun ..."
    if not mps.daemon_is_running(os.environ) and mps.unavailable_reason() is not None:
        return f"{ranks} ranks on {gpus} GPU(s) need an MPS daemon: {mps.unavailable_reason()}"
    reasons = [CakeAlltoAll.unsupported_reason(torch.device("cuda", gpu)) for gpu in range(gpus)]
    return next((reason for reason in reasons if reason is not None), None)


@contextlib.contextmanager
def daemon_for(options: argparse.Namespace) -> Iterator[None]:
    """Let the processes that the block starts find an MPS daemon, if they will share GPUs.

    It ends with the block. Raises RuntimeError if it does not start.
    """
    shared = options.device == "cuda" and _share_gpus(options.ranks)
    if not shared or mps.daemon_is_running(os.environ):
        yield
        return
    for number in (signal.SIGTERM, signal.SIGHUP):  # until torchrun has its own handlers
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    with mps.mps_daemon() as daemon:
        if daemon is None:
            raise RuntimeError(f"no MPS daemon: {mps.unavailable_reason()}")
        os.environ.update(daemon.environment)
        yield


def enter(device_type: str) -> torch.device:
    """Return this rank's device, made current. In a rank, before anything starts CUDA.

    Neighbours share a GPU where there are more ranks than GPUs.
    """
    if device_type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers takes a GPU where it sees one
        return torch.device("cpu")
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = min(ranks, torch.cuda.device_count())  # asks NVML and starts nothing
    if ranks > gpus:
        os.environ.update(mps.share_of_gpu(mps.ranks_on_gpu_of(rank, ranks, gpus)))
    device = torch.device("cuda", mps.gpu_of_rank(rank, ranks, gpus))
    os.environ["LOCAL_RANK"] = str(device.index)  # transformers takes the GPU of this number
    torch.cuda.set_device(device)
    return device


def group_backends(device_type: str) -> str:
    """Return the torch.distributed backends of the ranks' group. In a rank."""
    if device_type == "cpu" or _share_gpus(int(os.environ["LOCAL_WORLD_SIZE"])):
        return "gloo"
    return "cpu:gloo,cuda:nccl"


def describe(device: torch.device) -> str:
    """Return in words where the ranks of this machine run. In a rank."""
    if device.type == "cpu":
        return "cpu"
    gpus = min(int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count())
    return f"{gpus} GPU{'s' if gpus > 1 else ''} ({torch.cuda.get_device_name(device)})"


def _share_gpus(ranks: int) -> bool:
    """Whether so many ranks, or as many of them as run on this machine, outnumber its GPUs."""
    local_ranks = ranks
    if dist.is_torchelastic_launched():
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return local_ranks > torch.cuda.device_count()
