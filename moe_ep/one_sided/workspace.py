"""What sizes the workspace of a one-sided backend, and which one does it get?"""

from __future__ import annotations

import torch

from moe_ep._native import QUANTIZED_BY_READER, Geometry, RowType
from moe_ep.bootstrap import BootstrapConfig
from moe_ep.collectives import CommBackend
from moe_ep.errors import MoEEpConfigError
from moe_ep.one_sided.config import OneSidedConfig
from moe_ep.one_sided.kernels import OneSidedKernels
from moe_ep.params import MoEEpCommParams, QuantFormat, row_format
from moe_ep.workspace_sharing import join_memory
from moe_ep.workspaces import Workspace

_ROW_TYPES = {
    torch.float32: RowType.FLOAT32,
    torch.float16: RowType.FLOAT16,
    torch.bfloat16: RowType.BFLOAT16,
}


def geometry_of(
    params: MoEEpCommParams,
    ep_size: int,
    config: OneSidedConfig,
    device: torch.device,
    *,
    spans_gpus: bool = True,
) -> Geometry:
    """Return what sizes the workspace of a communication, with room for every layer of its arena;
    `.segment_bytes` is the size per rank.

    spans_gpus: whether its ranks may be on several GPUs. False is a promise: signals are then
        ordered within one GPU only, and cake leaves rows in low precision as they are. The size
        does not depend on it.

    Raises MoEEpConfigError where a size is past its limit.
    """
    on_cuda = device.type == "cuda"
    layers = config.layers_with(params)
    top_k = max(layer.top_k for layer in layers)
    max_tokens_per_rank = max(layer.max_tokens_per_rank for layer in layers)
    packets = config._packet_steps(ep_size, top_k, max_tokens_per_rank)
    try:
        return Geometry(
            ep_size=ep_size,
            num_experts=params.num_experts,
            top_k=params.top_k,
            max_tokens_per_rank=max_tokens_per_rank,
            dispatch_bytes_per_token=max(layer.dispatch_bytes_per_token for layer in layers)
            + config.extra_payload_bytes_per_token,
            combine_bytes_per_token=max(_combine_bytes(layer, config, on_cuda) for layer in layers),
            eplb_stats_num_experts=config.eplb_stats_num_experts,
            low_latency_tokens=packets.max_tokens if on_cuda else 0,
            spans_gpus=int(spans_gpus),
            prefers_packets=int(packets.always and on_cuda),
            max_top_k=top_k,
            has_rank_masks=int(config.enable_rank_mask),
        )
    except ValueError as error:
        raise MoEEpConfigError(f"{error}.") from None


def join_workspace(
    kernels: OneSidedKernels,
    bootstrap: BootstrapConfig,
    comm: CommBackend,
    config: OneSidedConfig,
    layout: Geometry,
) -> Workspace:
    """Return the workspace of a communication, which others may have, too. Collective."""
    apart = config.enable_rank_mask  # a rank that is masked off once is out of step for all objects
    return join_memory(
        bootstrap,
        comm,
        config,
        layout,
        apart,
        initialize=kernels.initialize,
        forget=kernels.forget,
    )


def rows_are_whole(params: MoEEpCommParams, config: OneSidedConfig, layout: Geometry) -> bool:
    """Return whether the expert rows of a layer lie in the workspace as the experts give them. For
    CUDA; on the CPU, rows in low precision never do.
    """
    if not config.use_low_precision_combine:
        return True
    row_type = _ROW_TYPES[params.token_dtype]
    return config._reader_can_quantize and layout.reader_quantizes(params.hidden_size, row_type)


def _combine_bytes(params: MoEEpCommParams, config: OneSidedConfig, on_cuda: bool) -> int:
    """Return the bytes of an expert's row as it travels: of the larger one where it depends on the
    GPUs of the ranks, which an estimate does not know.
    """
    whole = params.combine_bytes_per_token
    if not config.use_low_precision_combine:
        return whole
    fp8 = row_format(QuantFormat.DeepSeekFp8, params.hidden_size, params.token_dtype).row_bytes
    may_be_whole = (
        on_cuda
        and config._reader_can_quantize
        and _ROW_TYPES[params.token_dtype] == QUANTIZED_BY_READER
    )
    return max(whole, fp8) if may_be_whole else fp8
