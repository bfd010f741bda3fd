"""How do received rows get into groups, one a local expert, and back? For grouped matrix products.

Everything stays on the device, and all sizes are known beforehand: there is room for every pick
that could be local, unless the caller says how many rows are enough. What then finds no room is
counted, and the received rows it belongs to come back as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ep.checks import check_dtype, check_type
from moe_ep.config import require_int_in_range
from moe_ep.derivatives import differentiable_once
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.errors import MoEEpConfigError
from moe_ep.limits import INT32_MAX
from moe_ep.params import TOKEN_DTYPES
from moe_ep.pick_groups import entries_or, group_picks, rows_or_zeros
from moe_ep.pick_sums import sum_of_picks


@dataclass(frozen=True)
class ExpertMajorRows:
    """Received rows grouped by local expert: one for each pick of it.

    L = num_local_experts, N = R * tpr received rows, M rows that there is room for. Local expert e
    has rows `[expert_offsets[e], expert_offsets[e] + expert_counts[e])`, in the order of the
    received rows and their picks. All other rows are zeros.

    hidden_states: [M, row], dtype and width of the received rows.
    hidden_states_scale: [M, scale_row], or None.
    topk_weights: [M] float32, the weight of each row's pick, 0 in rows of zeros; or None.
    expert_counts: [L] int32.
    expert_offsets: [L + 1] int32, multiples of the alignment. `expert_offsets[1:]` is the `offs` of
        torch.nn.functional.grouped_mm.
    expert_of_row: [M] int32: 0..L-1, and -1 in rows of zeros.
    row_of_pick: [N, top_k] int64: the row of each pick, M for one that has none.
    pick_weights: [N, top_k] float32, as received, or None.
    is_incomplete: [N] bool: a local pick of the received row found no room; None where the host
        knows that all found some.
    """

    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_weights: Tensor | None
    expert_counts: Tensor
    expert_offsets: Tensor
    expert_of_row: Tensor
    row_of_pick: Tensor
    pick_weights: Tensor | None
    is_incomplete: Tensor | None


def permute_to_experts(
    result: MoEEpDispatchResult,
    first_local_expert: int,
    num_local_experts: int,
    *,
    alignment: int = 1,
    max_rows: int | None = None,
) -> ExpertMajorRows:
    """Return the received rows grouped by local expert; see
    MoEEpCommunication.permute_to_experts.

    Raises TypeError and MoEEpConfigError for a wrong alignment or max_rows.
    """
    check_type("result", result, MoEEpDispatchResult)
    topk_ids, num_picks = _as_int32(result.topk_ids), result.topk_ids.numel()
    most = _most_rows(num_picks, num_local_experts, alignment, max_rows)
    room = most if max_rows is None else min(most, max_rows)
    groups = group_picks(
        topk_ids,
        first_local_expert,
        num_local_experts,
        alignment=alignment,
        room=room,
        may_lack_room=room < most,
    )
    top_k = topk_ids.shape[1]
    row = groups.pick_of_row // top_k
    scales, weights = result.hidden_states_scale, result.topk_weights
    return ExpertMajorRows(
        hidden_states=_ToExperts.apply(result.hidden_states, row, groups.row_of_pick),
        hidden_states_scale=None if scales is None else rows_or_zeros(scales, row),
        topk_weights=None if weights is None else entries_or(0.0, weights, groups.pick_of_row),
        expert_counts=groups.counts.int(),
        expert_offsets=groups.offsets.int(),
        expert_of_row=entries_or(-1, topk_ids - first_local_expert, groups.pick_of_row),
        row_of_pick=groups.row_of_pick,
        pick_weights=weights,
        is_incomplete=groups.is_incomplete,
    )


def unpermute_from_experts(
    rows: Tensor,
    permuted: ExpertMajorRows,
    *,
    apply_weights: bool = True,
    output: Tensor | None = None,
) -> Tensor:
    """Return [N, hidden_size]: for each received row the sum over its local picks; see
    MoEEpCommunication.unpermute_from_experts.

    output: to write to, without gradients, where the host may read. Rows without a local pick stay
        as they are.
    """
    check_type("permuted", permuted, ExpertMajorRows)
    check_rows_of_experts(rows, permuted.expert_of_row.shape[0], output)
    if apply_weights and permuted.pick_weights is None:
        raise MoEEpConfigError(
            "apply_weights must be False: dispatch was called without topk_weights."
        )
    weights = permuted.pick_weights if apply_weights else None
    combined: Tensor
    if output is None:
        combined = _FromExperts.apply(rows, weights, permuted.row_of_pick)
    else:
        combined = sum_of_picks(rows, weights, permuted.row_of_pick, output)
    if permuted.is_incomplete is None:
        return combined
    return combined.masked_fill(permuted.is_incomplete.view(-1, 1), float("nan"))


def check_rows_of_experts(rows: Tensor, num_rows: int, output: Tensor | None) -> None:
    """Raise TypeError or MoEEpConfigError unless experts have made `num_rows` rows, which fit into
    the output, if there is one."""
    check_type("rows", rows, Tensor)
    if rows.dim() != 2 or rows.shape[0] != num_rows:
        raise MoEEpConfigError(
            f"rows must be [{num_rows}, hidden_size], a row for each that the experts were given, "
            f"got {list(rows.shape)}."
        )
    check_dtype("rows", rows, TOKEN_DTYPES)
    if output is not None and (rows.shape[1], rows.dtype) != (output.shape[1], output.dtype):
        raise MoEEpConfigError(
            f"rows must be [{num_rows}, {output.shape[1]}] {output.dtype}, as combine takes them, "
            f"got {list(rows.shape)} {rows.dtype}."
        )


def _as_int32(topk_ids: Tensor) -> Tensor:
    """Dispatch gives int32; a caller that has put other ids in their place may have int64."""
    if topk_ids.dtype == torch.int32:
        return topk_ids
    return topk_ids.clamp(-1, INT32_MAX).int()


def _most_rows(num_picks: int, num_experts: int, alignment: int, max_rows: int | None) -> int:
    """Return how many rows there can be, paddings included; check what the user gave."""
    require_int_in_range("alignment", alignment, 1, INT32_MAX)
    if max_rows is not None and (not isinstance(max_rows, int) or isinstance(max_rows, bool)):
        raise TypeError(f"max_rows must be an int, got {max_rows!r} ({type(max_rows).__name__}).")
    if max_rows is not None and (max_rows < 0 or max_rows % alignment != 0):
        raise MoEEpConfigError(
            f"max_rows must be a multiple of alignment={alignment} and not negative, got "
            f"{max_rows}."
        )
    # Every pick in a group of its own, as long as there are groups, pads most.
    return (num_picks + min(num_picks, num_experts) * (alignment - 1)) // alignment * alignment


class _ToExperts(torch.autograd.Function):
    """Copies each received row to the rows of its picks. Backward adds what comes back of them, in
    float32 and in the order of the picks."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor, row_of_pick: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_pick)
        return rows_or_zeros(source, index)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (row_of_pick,) = ctx.saved_tensors
        return sum_of_picks(grad, None, row_of_pick), None, None


class _FromExperts(torch.autograd.Function):
    """Adds the rows of each received row's picks, times their weights."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, row_of_pick: Tensor) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights, row_of_pick)
        ctx.room = rows.shape[0]
        return sum_of_picks(rows, weights, row_of_pick)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weights, row_of_pick = ctx.saved_tensors
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            # Each row has one pick at most: nothing is added up.
            grad_rows = grad.new_zeros((ctx.room + 1, grad.shape[1]))
            for slot in range(row_of_pick.shape[1]):
                part = grad if weights is None else grad.float() * weights[:, slot : slot + 1]
                grad_rows.index_copy_(0, row_of_pick[:, slot], part.to(grad.dtype))
            grad_rows = grad_rows[: ctx.room]
        if ctx.needs_input_grad[1]:
            columns = [
                (rows_or_zeros(rows, index).float() * grad.float()).sum(1)
                for index in row_of_pick.unbind(1)
            ]
            grad_weights = torch.stack(columns, 1)
        return grad_rows, grad_weights, None
