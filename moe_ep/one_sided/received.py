"""What does a dispatch leave, and where?

In eager code and captured CUDA graphs everything stays in the workspace, and callers get views of
it. In graphs of torch.compile they get new tensors: a view that outlives its round cannot be told
there from one that does not, and a late read was seen to be silently wrong. When Inductor writes
the code, it can be told: see `moe_ep.inductor_views`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ep import _native
from moe_ep._native import Geometry
from moe_ep.errors import MoEEpConfigError, MoEEpStateError
from moe_ep.one_sided.ops import OneSidedOps


class ReceivedTokens(NamedTuple):
    """What one dispatch brought, with R = ep_size and tpr = tokens_per_rank.

    Views of the workspace, valid until combine.

    payloads: for each payload given, [R * tpr, columns] of its dtype.
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


def run_dispatch(
    ops: OneSidedOps,
    workspace: Tensor,
    layout: Geometry,
    geometry: list[int],
    ep_rank: int,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    payloads: list[Tensor],
    *,
    eplb_local_stats: Tensor | None,
    active_rank_mask: Tensor | None,
    invalid_expert_id: int,
    tokens_per_rank: int,
    timeout_sec: int,
    enable_pdl: bool,
) -> ReceivedTokens:
    """Call the op that fits eager or compiled code and return what it brought. Raises what the op
    raises.

    geometry: `layout.fields()`, which compiled graphs cannot call.
    """
    arguments = (
        workspace,
        topk_ids,
        topk_weights,
        payloads,
        eplb_local_stats,
        active_rank_mask,
        geometry,
        ep_rank,
        invalid_expert_id,
        tokens_per_rank,
        timeout_sec,
        enable_pdl,
    )
    if torch.compiler.is_compiling():
        ids, weights, counts, stats = ops.dispatch(*arguments)
        weights = None if topk_weights is None else weights
        stats = None if eplb_local_stats is None else stats
        rows = _new_received_rows(ops, workspace, geometry, ep_rank, tokens_per_rank, payloads)
    else:
        ops.dispatch_in_place(*arguments)
        rows = received_rows(workspace, layout, ep_rank, tokens_per_rank, payloads)
        segment = workspace[ep_rank]
        ids = _ids(segment, layout, tokens_per_rank)
        weights = None if topk_weights is None else _weights(segment, layout, tokens_per_rank)
        counts = _counts(segment, layout)
        stats = None if eplb_local_stats is None else _stats(segment, layout)
    return ReceivedTokens(rows, ids, weights, counts, stats)


def received_rows(
    workspace: Tensor,
    geometry: Geometry,
    ep_rank: int,
    tokens_per_rank: int,
    payloads: Sequence[Tensor],
) -> list[Tensor]:
    """Return for each payload given to dispatch its received rows [ep_size * tokens_per_rank,
    columns], as views.

    Not in compiled graphs, see `wrap_workspace`.
    """
    segment, rows = workspace[ep_rank], geometry.ep_size * tokens_per_rank
    row_bytes = _row_bytes(payloads)
    return [
        _rows(
            segment,
            geometry.payload_offset(tokens_per_rank, row_bytes, index),
            rows,
            payload.shape[1],
            _native.row_pitch(row_bytes[index]),
            payload.dtype,
        )
        for index, payload in enumerate(payloads)
    ]


def combine_input_buffer(
    workspace: Tensor,
    geometry: Geometry,
    ep_rank: int,
    tokens_per_rank: int,
    hidden_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the workspace's own [ep_size * tokens_per_rank, hidden_size] input of combine;
    handing it in saves a copy. Rows begin on 16-byte boundaries. A low-precision combine takes it
    only where it leaves rows as they are, see `combine`.

    Raises MoEEpConfigError for rows or numbers of them that the workspace has no room for.
    """
    row_bytes = hidden_size * dtype.itemsize
    if not 1 <= row_bytes <= geometry.combine_bytes_per_token:
        raise MoEEpConfigError(
            f"hidden_size={hidden_size} of {dtype} takes {row_bytes} bytes a row, and the "
            f"workspace has room for 1 to {geometry.combine_bytes_per_token}."
        )
    if not 0 <= tokens_per_rank <= geometry.max_tokens_per_rank:
        raise MoEEpConfigError(
            f"tokens_per_rank must be in [0, {geometry.max_tokens_per_rank}], got "
            f"{tokens_per_rank}."
        )
    return _rows(
        workspace[ep_rank],
        geometry.combine_rows_offset,
        geometry.ep_size * tokens_per_rank,
        hidden_size,
        _native.row_pitch(row_bytes),
        dtype,
    )


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

    Raises MoEEpStateError in compiled graphs: torch.compile may move a read of a view behind the
    next dispatch. The op `received_rows` of the backend gives received rows as new tensors.
    """
    _require_eager()
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


def _ids(segment: Tensor, geometry: Geometry, tokens_per_rank: int) -> Tensor:
    rows, columns = geometry.ep_size * tokens_per_rank, geometry.top_k
    return _dense(segment, geometry.topk_ids_offset, rows, columns, torch.int32)


def _weights(segment: Tensor, geometry: Geometry, tokens_per_rank: int) -> Tensor:
    rows, columns = geometry.ep_size * tokens_per_rank, geometry.top_k
    return _dense(segment, geometry.topk_weights_offset, rows, columns, torch.float32)


def _counts(segment: Tensor, geometry: Geometry) -> Tensor:
    return _dense(segment, geometry.recv_counts_offset, 1, geometry.ep_size, torch.int32)[0]


def _stats(segment: Tensor, geometry: Geometry) -> Tensor:
    columns = geometry.eplb_stats_num_experts
    return _dense(segment, geometry.eplb_stats_offset, geometry.ep_size, columns, torch.int32)


def _dense(segment: Tensor, start: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return _rows(segment, start, rows, columns, columns * dtype.itemsize, dtype)


def _rows(
    segment: Tensor, start: int, rows: int, columns: int, pitch: int, dtype: torch.dtype
) -> Tensor:
    """Return [rows, columns] from byte `start` on, rows `pitch` bytes apart."""
    _require_eager()
    # One call in place of a slice and two: half of an eager round's host time were views.
    elements = segment.view(dtype)
    first = elements.storage_offset() + start // dtype.itemsize
    return elements.as_strided((rows, columns), (pitch // dtype.itemsize, 1), first)


def _new_received_rows(
    ops: OneSidedOps,
    workspace: Tensor,
    geometry: list[int],
    ep_rank: int,
    tokens_per_rank: int,
    payloads: Sequence[Tensor],
) -> list[Tensor]:
    where = (workspace, geometry, ep_rank, tokens_per_rank, _row_bytes(payloads))
    return [ops.received_rows(*where, i, payload.dtype) for i, payload in enumerate(payloads)]


def _row_bytes(payloads: Sequence[Tensor]) -> list[int]:
    return [payload.shape[1] * payload.element_size() for payload in payloads]


def _require_eager() -> None:
    if torch.compiler.is_compiling():
        raise MoEEpStateError(
            "views of the workspace are for eager code and captured CUDA graphs: torch.compile may "
            "move a read of one behind the next dispatch. Use the op received_rows of the backend "
            "in compiled graphs."
        )
