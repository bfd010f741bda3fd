"""What sizes the workspace of a one-sided backend, and which one does it get?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_ep import _native
from moe_ep._native import Geometry
from moe_ep.bootstrap import BootstrapConfig
from moe_ep.collectives import CommBackend
from moe_ep.config import CommunicationConfig
from moe_ep.errors import MoEEpConfigError
from moe_ep.one_sided.kernels import OneSidedKernels
from moe_ep.one_sided.settings import OneSidedSettings
from moe_ep.params import MoEEpCommParams, QuantFormat, row_format
from moe_ep.workspace_sharing import join_memory
from moe_ep.workspaces import Workspace


@dataclass(frozen=True)
class PacketSteps:
    """Which steps go as packets on CUDA: flags in the data.

    max_tokens: of each rank.
    always: whether they come back as packets, too, also where a pull was measured to be faster.
    """

    max_tokens: int
    always: bool = False

    @classmethod
    def fastest(cls, layers: Sequence[MoEEpCommParams], ep_size: int) -> PacketSteps:
        """Return those for which packets were measured to be faster, with the widest top_k."""
        sizes = (ep_size, _widest_top_k(layers), most_tokens(layers))
        return cls(_native.low_latency_tokens(*sizes))


def most_tokens(layers: Sequence[MoEEpCommParams]) -> int:
    """Return the tokens of a rank in the largest step of any of these layers."""
    return max(layer.max_tokens_per_rank for layer in layers)


def geometry_of(
    params: MoEEpCommParams,
    ep_size: int,
    settings: OneSidedSettings,
    device: torch.device,
    packets: PacketSteps,
    *,
    spans_gpus: bool,
) -> Geometry:
    """Return what sizes the workspace of a communication, with room for every layer of its arena;
    `.segment_bytes` is the size per rank.

    spans_gpus: whether its ranks may be on several GPUs. False is a promise: signals are then
        ordered within one GPU only. The size does not depend on it.

    Raises MoEEpConfigError where a size is past its limit.
    """
    on_cuda = device.type == "cuda"
    layers = settings.layers_with(params)
    try:
        return Geometry(
            ep_size=ep_size,
            num_experts=params.num_experts,
            top_k=params.top_k,
            max_tokens_per_rank=most_tokens(layers),
            dispatch_bytes_per_token=max(layer.dispatch_bytes_per_token for layer in layers)
            + settings.extra_payload_bytes_per_token,
            combine_bytes_per_token=max(_combine_bytes(layer, settings) for layer in layers),
            eplb_stats_num_experts=settings.eplb_stats_num_experts,
            low_latency_tokens=packets.max_tokens if on_cuda else 0,
            spans_gpus=int(spans_gpus),
            prefers_packets=int(packets.always and on_cuda),
            max_top_k=_widest_top_k(layers),
        )
    except ValueError as error:
        raise MoEEpConfigError(f"{error}.") from None


def join_workspace(
    kernels: OneSidedKernels,
    bootstrap: BootstrapConfig,
    comm: CommBackend,
    config: CommunicationConfig,
    layout: Geometry,
    *,
    enable_rank_mask: bool,
) -> Workspace:
    """Return the workspace of a communication, which others may have, too. Collective."""
    apart = enable_rank_mask  # a rank that is masked off once is out of step for all objects
    return join_memory(
        bootstrap,
        comm,
        config,
        layout,
        apart,
        initialize=kernels.initialize,
        forget=kernels.forget,
    )


def _widest_top_k(layers: Sequence[MoEEpCommParams]) -> int:
    return max(layer.top_k for layer in layers)


def _combine_bytes(params: MoEEpCommParams, settings: OneSidedSettings) -> int:
    """Return the bytes of an expert's row as it travels."""
    if not settings.use_low_precision_combine:
        return params.combine_bytes_per_token
    return row_format(QuantFormat.DeepSeekFp8, params.hidden_size, params.token_dtype).row_bytes
