"""What do cake's ops do on a bare workspace? For callers that bring their own memory and their own
state machine.

The order of calls, on every rank: `initialize`, a barrier of the caller's, then rounds of
`dispatch` and `combine`. The ranks may be processes over shared memory, or threads of one process
over a plain tensor (ops release the GIL).

A workspace is a torch.uint8 tensor [ep_size, >= workspace_size_per_rank(geometry)] whose row r is
the memory of rank r, each row starting on a 64-byte boundary. Every function checks what it can
before it writes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import moe_ep.ops  # noqa: F401  (loads the ops)
from moe_ep import _native
from moe_ep._native import Geometry
from moe_ep.errors import MoEEpConfigError, MoEEpStateError, raise_typed_errors
from moe_ep.limits import DEFAULT_TIMEOUT_SEC
from moe_ep.params import QuantFormat
from moe_ep.quantization import ScaleLayout, check_quantization, scale_shape

__all__ = [
    "Geometry",
    "ReceivedTokens",
    "active_rank_mask",
    "check",
    "combine",
    "combine_input_buffer",
    "dispatch",
    "initialize",
    "received_rows",
    "sanitize_expert_ids",
    "workspace_size_per_rank",
    "wrap_workspace",
]


class ReceivedTokens(NamedTuple):
    """What one dispatch brought, with R = ep_size and tpr = tokens_per_rank.

    payloads: for each payload given, [R * tpr, columns] of its dtype: a view of the workspace,
        valid until combine.
    topk_ids: [R * tpr, top_k] int32; rows without a token hold invalid_expert_id.
    topk_weights: [R * tpr, top_k] float32, or None where none were given.
    recv_token_counts: [R] int32, rows from each source.
    eplb_gathered_stats: [R, eplb_stats_num_experts] int32, or None where none were given.
    """

    payloads: list[Tensor]
    topk_ids: Tensor
    topk_weights: Tensor | None
    recv_token_counts: Tensor
    eplb_gathered_stats: Tensor | None


def workspace_size_per_rank(geometry: Geometry) -> int:
    """Return the bytes of one rank's row of the workspace."""
    return geometry.segment_bytes


def initialize(workspace: Tensor, geometry: Geometry, ep_rank: int) -> None:
    """Prepare this rank's own row: epoch 0, nothing signalled. A barrier must follow before the
    first dispatch."""
    with raise_typed_errors():
        torch.ops.moe_ep.cake_initialize(workspace, geometry.fields(), ep_rank)


def dispatch(
    workspace: Tensor,
    geometry: Geometry,
    ep_rank: int,
    topk_ids: Tensor,
    payloads: Sequence[Tensor],
    topk_weights: Tensor | None = None,
    *,
    tokens_per_rank: int | None = None,
    invalid_expert_id: int = -1,
    eplb_local_stats: Tensor | None = None,
    active_rank_mask: Tensor | None = None,
    timeout_sec: int = DEFAULT_TIMEOUT_SEC,
) -> ReceivedTokens:
    """Send every token's payload rows once to each rank that owns one of its experts. Collective.

    topk_ids: [n, top_k] int32 or int64, contiguous.
    payloads: 1 to MAX_PAYLOADS tensors [n, columns] of any dtype with dense rows, together at most
        `geometry.dispatch_bytes_per_token` bytes a token.
    topk_weights: [n, top_k] float32, contiguous, or None (on all ranks).
    tokens_per_rank: the largest n over the ranks, equal on all; None:
        `geometry.max_tokens_per_rank`.

    Raises MoEEpConfigError, MoEEpStateError, MoEEpTimeoutError as `MoEEpCommunication.dispatch`
    does.
    """
    tpr = geometry.max_tokens_per_rank if tokens_per_rank is None else tokens_per_rank
    with raise_typed_errors():
        ids, weights, counts, stats = torch.ops.moe_ep.cake_dispatch(
            workspace,
            topk_ids,
            topk_weights,
            list(payloads),
            eplb_local_stats,
            active_rank_mask,
            geometry.fields(),
            ep_rank,
            invalid_expert_id,
            tpr,
            timeout_sec,
        )
    return ReceivedTokens(
        received_rows(workspace, geometry, ep_rank, tpr, payloads),
        ids,
        weights if topk_weights is not None else None,
        counts,
        stats if eplb_local_stats is not None else None,
    )


def received_rows(
    workspace: Tensor,
    geometry: Geometry,
    ep_rank: int,
    tokens_per_rank: int,
    payloads: Sequence[Tensor],
) -> list[Tensor]:
    """Return for each payload given to dispatch its received rows [ep_size * tokens_per_rank,
    columns], as views.

    Not in compiled graphs: there a view that outlives its round cannot be told from one that does
    not, and a late read was seen to be silently wrong. `torch.ops.moe_ep.cake_received_rows` gives
    them as fresh tensors.
    """
    row_bytes = [payload.shape[1] * payload.element_size() for payload in payloads]
    rows = geometry.ep_size * tokens_per_rank
    views = []
    for index, payload in enumerate(payloads):
        start = geometry.payload_offset(tokens_per_rank, row_bytes, index)
        end = start + rows * row_bytes[index]
        view = wrap_workspace(workspace[ep_rank], (rows,), start, end, payload.dtype)
        views.append(view.view(rows, payload.shape[1]))  # no rows do not say how wide they are
    return views


def combine_input_buffer(
    workspace: Tensor,
    geometry: Geometry,
    ep_rank: int,
    tokens_per_rank: int,
    hidden_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the workspace's own [ep_size * tokens_per_rank, hidden_size] input of combine;
    handing it in saves a copy."""
    rows = geometry.ep_size * tokens_per_rank
    start = geometry.combine_rows_offset
    end = start + rows * hidden_size * dtype.itemsize
    view = wrap_workspace(workspace[ep_rank], (rows,), start, end, dtype)
    return view.view(rows, hidden_size)  # no rows do not say how wide they are


def combine(
    workspace: Tensor,
    geometry: Geometry,
    ep_rank: int,
    expert_output: Tensor,
    num_tokens: int,
    *,
    output_dtype: QuantFormat | None = None,
    output_scales: Tensor | None = None,
    output_scalar_scale: float = 1.0,
    sf_layout: ScaleLayout = ScaleLayout.LINEAR,
    active_rank_mask: Tensor | None = None,
    timeout_sec: int = DEFAULT_TIMEOUT_SEC,
) -> Tensor | tuple[Tensor, Tensor]:
    """Bring the partial rows back to their sources and sum them in float32, in ascending order of
    the owner. Collective.

    expert_output: [ep_size * tokens_per_rank, hidden_size] float32, float16 or bfloat16, rows
        dense.
    num_tokens: what this rank dispatched.
    output_dtype: None: the sums are rounded to the dtype of expert_output. QuantFormat.MXFP8,
        MXFP4 or NVFP4: they are quantised from float32 for the next matrix multiplication.
    output_scales: torch.uint8 tensor that receives the scales; None: a new one.
    output_scalar_scale: the global scale of NVFP4, finite and positive.
    sf_layout: layout of the scales.

    Returns [num_tokens, hidden_size], or for a QuantFormat `(values, scales)`, both torch.uint8:
    values [num_tokens, bytes of a row], scales [padded rows, padded blocks].
    """
    if expert_output.dim() != 2:
        raise MoEEpConfigError(
            f"expert_output must be 2-D [ep_size * tokens_per_rank, hidden_size], got "
            f"{list(expert_output.shape)}."
        )
    rows, hidden_size = expert_output.shape
    if output_dtype is not None:
        check_quantization(output_dtype, output_scalar_scale)
        _check_output_scales(
            output_scales, scale_shape(output_dtype, num_tokens, hidden_size, sf_layout)
        )
    tokens_per_rank = rows // geometry.ep_size
    fields = geometry.fields()
    where = (
        workspace,
        expert_output,
        active_rank_mask,
        fields,
        ep_rank,
        num_tokens,
        tokens_per_rank,
    )
    what = (hidden_size, expert_output.dtype, timeout_sec)
    with raise_typed_errors():
        if output_dtype is None:
            combined: Tensor = torch.ops.moe_ep.cake_combine(*where, *what)
            return combined
        values, scales = torch.ops.moe_ep.cake_combine_quantized(
            *where,
            *what,
            int(_native.QuantFormat.__members__[output_dtype.name]),
            int(_native.ScaleLayout.__members__[sf_layout.name]),
            output_scalar_scale,
        )
    if output_scales is None:
        return values, scales
    output_scales.copy_(scales.view(output_scales.shape))
    return values, output_scales


def _check_output_scales(output_scales: Tensor | None, shape: tuple[int, int]) -> None:
    if output_scales is None:
        return
    wanted = shape[0] * shape[1]
    if output_scales.dtype != torch.uint8 or output_scales.numel() != wanted:
        raise MoEEpConfigError(
            f"output_scales must be torch.uint8 with {wanted} elements, got "
            f"{output_scales.dtype} with {output_scales.numel()}."
        )


def check(workspace: Tensor, geometry: Geometry, ep_rank: int) -> None:
    """Raise what this rank recorded: MoEEpTimeoutError, or MoEEpInputError for the round in
    flight."""
    with raise_typed_errors():
        torch.ops.moe_ep.cake_check(workspace, geometry.fields(), ep_rank)


def sanitize_expert_ids(
    topk_ids: Tensor, recv_token_counts: Tensor, invalid_expert_id: int
) -> None:
    """Give every row without a token the invalid id, in place.

    topk_ids: [ep_size, tokens_per_rank, top_k] int32, contiguous; recv_token_counts: [ep_size]
        int32.
    """
    with raise_typed_errors():
        torch.ops.moe_ep.sanitize_expert_ids(topk_ids, recv_token_counts, invalid_expert_id)


def active_rank_mask(
    ranks: Sequence[int], ep_size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return [ceil(ep_size / 64)] torch.uint64 with bit i set for each active rank i."""
    with raise_typed_errors():
        mask: Tensor = torch.ops.moe_ep.active_rank_mask(list(ranks), ep_size)
    return mask.to(device)


def wrap_workspace(
    workspace: Tensor,
    leading_shape: Sequence[int],
    slice_start: int,
    slice_end: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return bytes [slice_start, slice_end) of a rank's row as a tensor [*leading_shape, columns]
    of `dtype`.

    workspace: one row of the workspace, [bytes] torch.uint8. The columns follow from the size of
        the slice.
    """
    if torch.compiler.is_compiling():
        raise MoEEpStateError(
            "views of the workspace are for eager code and captured CUDA graphs: torch.compile may "
            "move a read of one behind the next dispatch. Use torch.ops.moe_ep.cake_received_rows "
            "in compiled graphs."
        )
    count = 1
    for size in leading_shape:
        count *= size
    size_bytes = slice_end - slice_start
    if not 0 <= slice_start <= slice_end <= workspace.shape[0]:
        raise MoEEpConfigError(
            f"the slice must lie in [0, {workspace.shape[0]}], got [{slice_start}, {slice_end}]."
        )
    if size_bytes % max(count * dtype.itemsize, 1) != 0:
        raise MoEEpConfigError(
            f"{size_bytes} bytes do not fill {tuple(leading_shape)} rows of {dtype} evenly."
        )
    columns = size_bytes // (count * dtype.itemsize) if count > 0 else 0
    return workspace[slice_start:slice_end].view(dtype).view(*leading_shape, columns)
