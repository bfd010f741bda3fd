"""Are the arguments of a call right? The host-side checks that every backend shares.

They come before any side effect. Wrong types and dtypes raise TypeError, everything else
MoEEpConfigError. All of it traces under torch.compile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep.bootstrap import BootstrapConfig
from moe_ep.config import CommunicationConfig, require_int_in_range
from moe_ep.errors import MoEEpConfigError
from moe_ep.limits import MAX_EP_SIZE
from moe_ep.params import MoEEpCommParams, RowFormat
from moe_ep.plain_tensors import check_plain

ID_DTYPES = (torch.int32, torch.int64)


def check_type(name: str, value: object, wanted: type) -> None:
    """Raise TypeError unless `value` is a `wanted`."""
    if not isinstance(value, wanted):
        package = "torch." if wanted.__module__ == "torch" else ""
        raise TypeError(f"{name} must be a {package}{wanted.__name__}, got {type(value).__name__}.")


def check_dtype(name: str, value: Tensor, allowed: tuple[torch.dtype, ...], hint: str = "") -> None:
    """Raise TypeError unless a tensor's dtype is one of those allowed."""
    if value.dtype not in allowed:
        wanted = " or ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"{name} must be {wanted}, got {value.dtype}. {hint}".rstrip())


def check_group(
    config_type: type[CommunicationConfig], bootstrap: BootstrapConfig, config: CommunicationConfig
) -> None:
    """Check what a rank must have right before it can tell the others anything."""
    check_type("bootstrap", bootstrap, BootstrapConfig)
    check_type("config", config, config_type)
    if bootstrap.world_size > MAX_EP_SIZE:
        raise MoEEpConfigError(f"world_size must be 1..{MAX_EP_SIZE}, got {bootstrap.world_size}.")


def check_construction(
    params: MoEEpCommParams, config: CommunicationConfig, eplb_stats_num_experts: int
) -> None:
    """Check what one rank can see of the constructor's other arguments."""
    check_type("params", params, MoEEpCommParams)
    require_int_in_range("eplb_stats_num_experts", eplb_stats_num_experts, 0, params.num_experts)
    config.layers_with(params)


def check_dispatch(
    params: MoEEpCommParams,
    row: RowFormat,
    *,
    device: torch.device,
    ep_rank: int,
    extra_payload_bytes_per_token: int,
    eplb_stats_num_experts: int,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    hidden_states_scale: Tensor | None,
    runtime_max_tokens_per_rank: int | None,
    eplb_local_stats: Tensor | None,
) -> int:
    """Check the arguments of dispatch and return this round's tokens_per_rank.

    row: `params.row_format`.
    """
    _check_tensor("hidden_states", hidden_states, 2, device)
    num_tokens = hidden_states.shape[0]
    tokens_per_rank = _tokens_per_rank(params, ep_rank, num_tokens, runtime_max_tokens_per_rank)
    _check_row(params, row, extra_payload_bytes_per_token, hidden_states)

    _check_tensor("topk_ids", topk_ids, 2, device)
    check_dtype("topk_ids", topk_ids, ID_DTYPES)
    _check_shape("topk_ids", topk_ids, (num_tokens, params.top_k), "[n, top_k]")

    if topk_weights is not None:
        _check_tensor("topk_weights", topk_weights, 2, device)
        check_dtype("topk_weights", topk_weights, (torch.float32,), "Convert with .float().")
        _check_shape("topk_weights", topk_weights, (num_tokens, params.top_k), "[n, top_k]")

    _check_scale(params, row, device, num_tokens, hidden_states_scale)
    _check_eplb_stats(eplb_stats_num_experts, device, eplb_local_stats)
    return tokens_per_rank


def check_combine(
    params: MoEEpCommParams,
    *,
    device: torch.device,
    ep_size: int,
    num_tokens: int,
    tokens_per_rank: int,
    expert_output: Tensor,
    output: Tensor | None,
) -> None:
    """Check the arguments of combine."""
    hidden_size = params.hidden_size
    _check_tensor("expert_output", expert_output, None, device)
    check_combine_input_dtype("expert_output", params, expert_output.dtype)
    flat = (ep_size * tokens_per_rank, hidden_size)
    by_source = (ep_size, tokens_per_rank, hidden_size)
    if tuple(expert_output.shape) not in (flat, by_source):
        raise MoEEpConfigError(
            f"expert_output must be {list(flat)} or {list(by_source)} (one row per received row), "
            f"got {list(expert_output.shape)}."
        )
    if output is not None:
        _check_tensor("output", output, 2, device)
        check_dtype("output", output, (params.token_dtype,))
        _check_shape("output", output, (num_tokens, hidden_size), "[n, hidden_size]")
        _check_no_overlap("output", output)
        _check_writable("output", output)


def check_combine_input_dtype(name: str, params: MoEEpCommParams, dtype: torch.dtype) -> None:
    """Check the dtype of expert_output."""
    if dtype != params.token_dtype:
        raise TypeError(
            f"{name} must be {params.token_dtype}, the dtype that the communication was created "
            f"with, got {dtype}."
        )


def _tokens_per_rank(
    params: MoEEpCommParams, ep_rank: int, num_tokens: int, runtime_max: int | None
) -> int:
    limit = params.max_tokens_per_rank
    if num_tokens > limit:
        raise MoEEpConfigError(
            f"hidden_states has {num_tokens} rows, more than max_tokens_per_rank={limit} (rank "
            f"{ep_rank}). Split the step, or create the communication with a larger "
            "max_tokens_per_rank."
        )
    if runtime_max is None:
        return limit
    require_int_in_range("runtime_max_tokens_per_rank", runtime_max, 0, limit)
    if num_tokens > runtime_max:
        raise MoEEpConfigError(
            f"hidden_states has {num_tokens} rows, more than "
            f"runtime_max_tokens_per_rank={runtime_max} (rank {ep_rank}). Pass the largest number "
            "of tokens over all ranks."
        )
    return runtime_max


def _check_row(
    params: MoEEpCommParams, row: RowFormat, extra_bytes: int, hidden_states: Tensor
) -> None:
    width = hidden_states.shape[1]
    if extra_bytes > 0 and hidden_states.dtype == torch.uint8:
        low, high = row.value_bytes, row.value_bytes + extra_bytes
        if not low <= width <= high:
            raise MoEEpConfigError(
                f"hidden_states as torch.uint8 must have {low}..{high} columns (the row of "
                f"dispatch_format={params.dispatch_format} and up to {extra_bytes} extra bytes), "
                f"got {width}."
            )
        return
    check_dtype(
        "hidden_states",
        hidden_states,
        row.value_dtypes,
        f"dispatch_format is {params.dispatch_format}.",
    )
    if width != row.value_columns:
        raise MoEEpConfigError(
            f"hidden_states must have {row.value_columns} columns (hidden_size="
            f"{params.hidden_size}, dispatch_format={params.dispatch_format}), got {width}."
        )


def _check_scale(
    params: MoEEpCommParams,
    row: RowFormat,
    device: torch.device,
    num_tokens: int,
    scale: Tensor | None,
) -> None:
    if row.scale_columns == 0:
        if scale is not None:
            raise MoEEpConfigError(
                f"hidden_states_scale must be None: dispatch_format={params.dispatch_format} sends "
                "no scale rows."
            )
        return
    wanted = (num_tokens, row.scale_columns)
    if scale is None:
        raise MoEEpConfigError(
            f"hidden_states_scale must be given, {list(wanted)} {row.scale_dtypes[0]}: "
            f"dispatch_format={params.dispatch_format} sends scale rows."
        )
    _check_tensor("hidden_states_scale", scale, 2, device)
    check_dtype("hidden_states_scale", scale, row.scale_dtypes)
    _check_shape("hidden_states_scale", scale, wanted, "[n, scale_row]")


def _check_eplb_stats(num_stats: int, device: torch.device, stats: Tensor | None) -> None:
    if stats is None:
        return
    if num_stats == 0:
        raise MoEEpConfigError(
            "eplb_local_stats must be None: the communication was created with "
            "eplb_stats_num_experts=0."
        )
    _check_tensor("eplb_local_stats", stats, 1, device)
    check_dtype("eplb_local_stats", stats, (torch.int32,))
    _check_shape("eplb_local_stats", stats, (num_stats,), "[eplb_stats_num_experts]")


def _check_tensor(name: str, value: Tensor, dim: int | None, device: torch.device) -> None:
    check_type(name, value, Tensor)
    check_plain(name, value)
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be dense (torch.strided), got {value.layout}.")
    if dim is not None and value.dim() != dim:
        raise MoEEpConfigError(f"{name} must have {dim} dimensions, got shape {list(value.shape)}.")
    if value.device != device:
        raise MoEEpConfigError(
            f"{name} must be on {device}, the communication's device, got {value.device}."
        )
    if value.requires_grad and torch.is_grad_enabled():
        raise MoEEpConfigError(
            f"{name} requires grad, but there are no gradients with quantised rows or a "
            "low-precision combine, and none for `output`: call it under torch.no_grad(), or pass "
            f"{name}.detach()."
        )


def _check_shape(name: str, value: Tensor, wanted: tuple[int, ...], meaning: str) -> None:
    if tuple(value.shape) != wanted:
        raise MoEEpConfigError(
            f"{name} must be {meaning} = {list(wanted)}, got {list(value.shape)}."
        )


def _check_writable(name: str, value: Tensor) -> None:
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return
    if value.is_inference():
        raise MoEEpConfigError(
            f"{name} must not be an inference tensor outside torch.inference_mode(), which alone "
            "may write to it."
        )


def _check_no_overlap(name: str, value: Tensor) -> None:
    """Refuse a matrix of which two elements share memory, or may: one dimension must step over all
    of the other. Slices, transposes and selections of a matrix do."""
    (rows, columns), (row_stride, column_stride) = value.shape, value.stride()
    if rows == 0 or columns == 0:
        return
    row_span, column_span = (rows - 1) * row_stride, (columns - 1) * column_stride
    repeats = (rows > 1 and row_stride == 0) or (columns > 1 and column_stride == 0)
    interleaves = (
        rows > 1 and columns > 1 and row_stride <= column_span and column_stride <= row_span
    )
    if repeats or interleaves:
        raise MoEEpConfigError(
            f"{name} must not overlap itself, got strides {list(value.stride())} for shape "
            f"{list(value.shape)}. Pass a tensor with memory of its own for each element."
        )
