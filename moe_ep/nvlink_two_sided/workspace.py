"""What sizes the workspace of nvlink_two_sided, and which one does it get?"""

from __future__ import annotations

import torch

from moe_ep._native import FifoGeometry
from moe_ep.bootstrap import BootstrapConfig
from moe_ep.collectives import CommBackend
from moe_ep.config import require_int_in_range
from moe_ep.errors import MoEEpConfigError
from moe_ep.limits import MAX_EP_SIZE
from moe_ep.nvlink_two_sided import kernels
from moe_ep.nvlink_two_sided.config import NVLinkTwoSidedConfig
from moe_ep.params import MoEEpCommParams
from moe_ep.workspace_sharing import join_memory
from moe_ep.workspaces import Workspace

# On the CPU. Deep enough that a small step fits, and few turns are taken between ranks that share
# cores; small enough to stay in a cache. On 4 ranks and 2 cores, with 32 to 1024 tokens of 2048 and
# 7168 elements, slots of 16 to 128 KiB and FIFOs of 0.25 to 2 MiB differed by less than the noise.
_SLOT_BYTES = 1 << 16
_NUM_SLOTS = 16
_MAX_FIFO_BYTES = 8 << 20
"""Of one rank, for all its peers together: groups of more than 8 ranks get smaller FIFOs."""
_MIN_SLOTS = 4

# On CUDA. What is in use of the FIFOs of all ranks of a GPU should stay in its L2 cache, and all
# channels should be worked on at once: those of combine, four to a CTA and three CTAs to a
# multiprocessor, fill seven eighths of a share of an H200. See docs/two_sided.md.
_CUDA_NUM_SLOTS = 2
_CUDA_FIFOS = 1344
"""Of one rank, for all its peers together."""
_CUDA_MAX_CHANNELS = 512
_CUDA_FIFO_BYTES = 8 << 20
"""The most, of one rank, for all its peers together."""
_CUDA_MAX_SLOT_BYTES = 1 << 12
"""What the loads of a warp bring at once."""


def geometry_of(
    params: MoEEpCommParams, ep_size: int, device: torch.device, *, spans_gpus: bool = True
) -> FifoGeometry:
    """Return what sizes the workspace of a communication; `.segment_bytes` is the size per rank.

    spans_gpus: whether its ranks may be on several GPUs. False is a promise: signals are then
        ordered within one GPU only. The size does not depend on it.

    Raises MoEEpConfigError where a size is past its limit.
    """
    require_int_in_range("ep_size", ep_size, 1, MAX_EP_SIZE)
    fifos = _cuda_fifos(ep_size) if device.type == "cuda" else _cpu_fifos(ep_size)
    try:
        return FifoGeometry(
            ep_size=ep_size,
            num_experts=params.num_experts,
            top_k=params.top_k,
            max_tokens_per_rank=params.max_tokens_per_rank,
            spans_gpus=int(spans_gpus),
            **fifos,
        )
    except ValueError as error:
        raise MoEEpConfigError(f"{error}.") from None


def _cuda_fifos(ep_size: int) -> dict[str, int]:
    num_channels = min(_CUDA_FIFOS // ep_size, _CUDA_MAX_CHANNELS)
    slot_bytes = _CUDA_MAX_SLOT_BYTES
    while ep_size * num_channels * _CUDA_NUM_SLOTS * slot_bytes > _CUDA_FIFO_BYTES:
        slot_bytes //= 2
    return {
        "num_channels": num_channels,
        "num_slots": _CUDA_NUM_SLOTS,
        "slot_bytes": slot_bytes,
    }


def _cpu_fifos(ep_size: int) -> dict[str, int]:
    num_slots, slot_bytes = _NUM_SLOTS, _SLOT_BYTES
    while ep_size * num_slots * slot_bytes > _MAX_FIFO_BYTES:
        if num_slots > _MIN_SLOTS:
            num_slots //= 2
        else:
            slot_bytes //= 2
    return {"num_slots": num_slots, "slot_bytes": slot_bytes}


def join_workspace(
    bootstrap: BootstrapConfig,
    comm: CommBackend,
    config: NVLinkTwoSidedConfig,
    layout: FifoGeometry,
) -> Workspace:
    """Return the workspace of a communication, which others may have, too. Collective."""
    return join_memory(
        bootstrap,
        comm,
        config,
        layout,
        initialize=kernels.initialize,
        forget=kernels.forget,
    )
