"""Where does each rank run? On the CPU, together on one GPU, spread over the GPUs, or one on each.

Ranks that share a GPU need an MPS daemon, and each its share of the GPU, before CUDA is initialised
in them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from tools import mps

CPU = "cpu"
ONE_GPU = "cuda"
"""All ranks on GPU 0."""
SPREAD = "cuda:spread"
"""Rank r of R on GPU r * G // R of G: two ranks on two GPUs, or four as two and two."""
NCCL = "cuda:nccl"
"""Rank r on GPU r, in a group that has NCCL beside Gloo: NCCL refuses two ranks on one GPU."""

TIMEOUT_SECONDS = 10
"""The communications' own on GPUs: so long a rank waits there for a peer that has failed."""

_SHARED = (ONE_GPU, SPREAD)


def gpu_of(device: str, rank: int, size: int, gpus: int) -> int | None:
    """Return the GPU of a rank, None for none.

    device: what a test asked for: CPU, ONE_GPU, SPREAD or NCCL.
    gpus: how many there are.
    """
    if device == SPREAD:
        return mps.gpu_of_rank(rank, size, gpus)
    return {CPU: None, ONE_GPU: 0, NCCL: rank}[device]


def share_of(device: str, rank: int, size: int, gpus: int) -> dict[str, str]:
    """Return the environment of a rank that is alone with the others of its group."""
    if device == CPU:
        return {}
    own = gpu_of(device, rank, size, gpus)
    return mps.share_of_gpu(sum(gpu_of(device, other, size, gpus) == own for other in range(size)))


def unavailable_reason(device: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return why no rank can run there, or None."""
    if device == CPU:
        return None
    wanted = 1 if device == ONE_GPU else 2
    gpus = torch.cuda.device_count()
    if gpus < wanted:
        devices = "a CUDA device" if wanted == 1 else f"{wanted} CUDA devices"
        return f"needs {devices}, found {gpus or 'none'}"
    if device not in _SHARED or mps.daemon_is_running(environment):
        return None
    if int(environment.get("WORLD_SIZE") or 1) > 1:
        return "ranks of a launcher need its MPS daemon: python tools/mps.py torchrun ..."
    reason = mps.unavailable_reason()
    return None if reason is None else f"needs an MPS daemon: {reason}"


class Mps:
    """The daemon of the ranks on GPUs: the environment's, or one of our own.

    Nothing is started before the first rank needs it.
    """

    def __init__(self) -> None:
        self._own: mps.MpsDaemon | None = None
        self._trust_environment = True

    def environment(self) -> dict[str, str]:
        """Return the variables by which a rank finds the daemon."""
        if self._own is not None:
            return self._own.environment
        if self._trust_environment and mps.daemon_is_running(os.environ):
            return mps.daemon_of(os.environ)
        if mps.unavailable_reason() is not None:
            return {}  # one rank a GPU needs none
        self._own = mps.start_daemon()
        return self._own.environment

    def distrust(self) -> None:
        """Give the daemon up: ranks that were killed while a kernel waited may have broken it."""
        self._trust_environment = False
        self.close()

    def close(self) -> None:
        """End our own daemon, after its ranks."""
        if self._own is not None:
            self._own.stop()
            self._own = None


def enter(device: str, rank: int, size: int) -> str:
    """Make this process's rank ready to run on the device; return the device's name for torch."""
    gpu = gpu_of(device, rank, size, torch.cuda.device_count()) if device != CPU else None
    if gpu is None:
        return CPU
    torch.cuda.set_device(gpu)
    return f"cuda:{gpu}"
