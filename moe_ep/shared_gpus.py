"""Which ranks share a GPU, and do they get to run at the same time? Their kernels wait for each
other.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_ep.collectives import by_rank

# Of every GPU from compute capability 8.6 on.
_CORES_PER_MULTIPROCESSOR = 128

# A share is rounded up to what the hardware can divide: eight of 12.5 % are 8 * 18 of 132.
_ROUNDING_PER_RANK = 4


@dataclass(frozen=True)
class GpuShare:
    """What a rank may use of its GPU.

    uuid: the same in all processes, with the prefix "GPU-".
    multiprocessors: those that its kernels can run on; fewer than the GPU has where MPS limits it.
    """

    uuid: str
    multiprocessors: int

    @classmethod
    def of(cls, device: torch.device) -> GpuShare | None:
        """Return this process's share of a CUDA device, None for other devices."""
        if device.type != "cuda":
            return None
        properties = torch.cuda.get_device_properties(device)
        return cls(f"GPU-{properties.uuid}", properties.multi_processor_count)


def are_several(shares: Sequence[GpuShare | None]) -> bool:
    """Return whether ranks with these shares are on more than one GPU."""
    return len({share.uuid for share in shares if share is not None}) > 1


def warn_of_overlapping_shares(shares: Sequence[GpuShare | None], ep_rank: int) -> None:
    """Warn if this rank and those on its GPU have more of it together than there is.

    shares: each rank's. Says nothing where the size of the whole GPU is unknown.
    """
    own = shares[ep_rank]
    if own is None:
        return
    seen = {
        rank: share.multiprocessors
        for rank, share in enumerate(shares)
        if share is not None and share.uuid == own.uuid
    }
    if len(seen) == 1:
        return
    whole = multiprocessors_of(own.uuid)
    # Fewer than a rank sees: this GPU's multiprocessors have other numbers of cores.
    if whole is None or whole < max(seen.values()):
        return
    if sum(seen.values()) <= whole + _ROUNDING_PER_RANK * len(seen):
        return
    # The same text for each communication: Python shows it once in a process.
    warnings.warn(
        f"{len(seen)} ranks share a GPU with {whole} multiprocessors ({own.uuid}) and see together "
        f"more than these: {by_rank(seen)}. Their kernels wait for each other and may not get to "
        "run at the same time: rounds are slow, or wait until timeout_sec. Start the ranks beside "
        f"an MPS daemon, each with CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={100 / len(seen):g} in its "
        "environment before CUDA starts in it; tools/mps.py of the sources runs a command so.",
        RuntimeWarning,
        stacklevel=1,
    )


def multiprocessors_of(gpu_uuid: str) -> int | None:
    """Return how many multiprocessors a GPU has, whatever this process's share; None if unknown.

    CUDA tells a client of MPS its share alone. NVML tells the cores of the whole GPU, but not those
    of a part by MIG, which then is unknown.
    """
    device, cores = ctypes.c_void_p(), ctypes.c_uint(0)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        try:
            found = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid.encode(), ctypes.byref(device)) == 0
            if not found or nvml.nvmlDeviceGetNumGpuCores(device, ctypes.byref(cores)) != 0:
                return None
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no NVML, or one without this function
        return None
    return cores.value // _CORES_PER_MULTIPROCESSOR
