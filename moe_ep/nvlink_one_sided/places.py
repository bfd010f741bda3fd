"""Where can nvlink_one_sided run, and what sizes its workspace there?"""

from __future__ import annotations

import torch

from moe_ep import cuda_support
from moe_ep._native import MAX_PACKET_TOKENS, Geometry
from moe_ep.nvlink_one_sided.config import NVLinkOneSidedConfig
from moe_ep.one_sided import places
from moe_ep.params import MoEEpCommParams

_MIN_CAPABILITY = (8, 0)
"""Of CUDA devices: the oldest that the kernels are compiled for."""


def reason_against(device: torch.device | None) -> str | None:
    """Return why it cannot run on a device of this machine, or None if it can.

    device: None asks whether any would do.
    """
    return cuda_support.reason_against("nvlink_one_sided", _MIN_CAPABILITY, device)


def geometry_of(
    params: MoEEpCommParams,
    ep_size: int,
    config: NVLinkOneSidedConfig,
    device: torch.device,
    *,
    spans_gpus: bool = True,
) -> Geometry:
    """Return what sizes the workspace of a communication, as `moe_ep.one_sided.places` does."""
    packets = packet_steps(params, ep_size, config)
    return places.geometry_of(params, ep_size, config, device, packets, spans_gpus=spans_gpus)


def packet_steps(
    params: MoEEpCommParams, ep_size: int, config: NVLinkOneSidedConfig
) -> places.PacketSteps:
    """Return which steps go over the Lamport transport on CUDA."""
    if config.lamport is False:
        return places.PacketSteps(0)
    limit, layers = config.lamport_max_tokens, config.layers_with(params)
    if config.lamport is None and limit is None:
        return places.PacketSteps.fastest(layers, ep_size)
    most = places.most_tokens(layers)
    max_tokens = min(MAX_PACKET_TOKENS if limit is None else limit, most)
    return places.PacketSteps(max_tokens, always=config.lamport is True)
