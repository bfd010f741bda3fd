"""Where can cake run, and what sizes its workspace there?"""

from __future__ import annotations

import torch

from moe_ep import cuda_support
from moe_ep._native import Geometry
from moe_ep.cake.config import CakeAlltoAllConfig
from moe_ep.one_sided import places
from moe_ep.params import MoEEpCommParams

_MIN_CAPABILITY = (9, 0)
"""Of CUDA devices: the first with bulk copies between shared and global memory."""


def reason_against(device: torch.device | None) -> str | None:
    """Return why cake cannot run on a device of this machine, or None if it can.

    device: None asks whether any would do.
    """
    return cuda_support.reason_against("cake", _MIN_CAPABILITY, device)


def geometry_of(
    params: MoEEpCommParams,
    ep_size: int,
    config: CakeAlltoAllConfig,
    device: torch.device,
    *,
    spans_gpus: bool = True,
) -> Geometry:
    """Return what sizes the workspace of a communication, as `moe_ep.one_sided.places` does."""
    packets = places.PacketSteps.fastest(config.layers_with(params), ep_size)
    return places.geometry_of(params, ep_size, config, device, packets, spans_gpus=spans_gpus)
