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
from moe_ep.derivatives import differentiable_once
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.errors import MoEEpConfigError
from moe_ep.params import TOKEN_DTYPES
from moe_ep.pick_sums import sum_of_picks
from moe_ep.tensors import host_may_read


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
    num_picks = result.topk_ids.numel()
    most = _most_rows(num_picks, num_local_experts, alignment, max_rows)
    room = most if max_rows is None else min(most, max_rows)
    groups = _Groups.of(result.topk_ids, first_local_expert, num_local_experts, alignment, room)
    is_row = groups.pick_of_row < num_picks
    pick = groups.pick_of_row.where(is_row, 0)
    top_k = result.topk_ids.shape[1]
    scales, weights = result.hidden_states_scale, result.topk_weights
    return ExpertMajorRows(
        hidden_states=_ToExperts.apply(
            result.hidden_states, pick // top_k, is_row, groups.row_of_pick
        ),
        hidden_states_scale=None
        if scales is None
        else _rows_or_zeros(scales, pick // top_k, is_row),
        topk_weights=None if weights is None else _entries(weights.flatten(), pick, is_row, 0.0),
        expert_counts=groups.counts.int(),
        expert_offsets=groups.offsets.int(),
        expert_of_row=_entries(groups.expert_of_pick, pick, is_row, -1).int(),
        row_of_pick=groups.row_of_pick,
        pick_weights=weights,
        is_incomplete=groups.is_incomplete(num_local_experts) if room < most else None,
    )


def unpermute_from_experts(
    rows: Tensor, permuted: ExpertMajorRows, *, apply_weights: bool = True
) -> Tensor:
    """Return [N, hidden_size]: for each received row the sum over its local picks; see
    MoEEpCommunication.unpermute_from_experts.
    """
    check_type("permuted", permuted, ExpertMajorRows)
    check_type("rows", rows, Tensor)
    room = permuted.expert_of_row.shape[0]
    if rows.dim() != 2 or rows.shape[0] != room:
        raise MoEEpConfigError(
            f"rows must be [{room}, hidden_size], a row for each of permute_to_experts, got "
            f"{list(rows.shape)}."
        )
    check_dtype("rows", rows, TOKEN_DTYPES)
    if apply_weights and permuted.pick_weights is None:
        raise MoEEpConfigError(
            "apply_weights must be False: dispatch was called without topk_weights."
        )
    weights = permuted.pick_weights if apply_weights else None
    combined: Tensor = _FromExperts.apply(rows, weights, permuted.row_of_pick)
    if permuted.is_incomplete is None:
        return combined
    return combined.masked_fill(permuted.is_incomplete.view(-1, 1), float("nan"))


def _most_rows(num_picks: int, num_experts: int, alignment: int, max_rows: int | None) -> int:
    """Return how many rows there can be, paddings included; check what the user gave."""
    for name, value in (("alignment", alignment), ("max_rows", max_rows)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__}).")
    if alignment < 1:
        raise MoEEpConfigError(f"alignment must be at least 1, got {alignment}.")
    if max_rows is not None and (max_rows < 0 or max_rows % alignment != 0):
        raise MoEEpConfigError(
            f"max_rows must be a multiple of alignment={alignment} and not negative, got "
            f"{max_rows}."
        )
    # Every pick in a group of its own, as long as there are groups, pads most.
    return (num_picks + min(num_picks, num_experts) * (alignment - 1)) // alignment * alignment


@dataclass(frozen=True)
class _Groups:
    """Where each pick goes.

    expert_of_pick: [N * top_k], local; num_local_experts for one that is not local.
    pick_of_row: [M]; N * top_k where there is none. The others as in ExpertMajorRows, int64.
    """

    counts: Tensor
    offsets: Tensor
    expert_of_pick: Tensor
    row_of_pick: Tensor
    pick_of_row: Tensor

    @classmethod
    def of(
        cls, topk_ids: Tensor, first_expert: int, num_experts: int, alignment: int, room: int
    ) -> _Groups:
        local = topk_ids.long() - first_expert
        is_local = (local >= 0) & (local < num_experts)
        expert = local.where(is_local, num_experts).flatten()
        counts = expert.new_zeros(num_experts + 1).scatter_add_(0, expert, torch.ones_like(expert))
        counts = counts[:num_experts]
        padded = (counts + alignment - 1) // alignment * alignment
        ends = padded.cumsum(0)
        # Sorted picks of an expert lie together, in their order; those of no expert come last.
        order = expert.argsort(stable=True)
        place = torch.arange(expert.numel(), device=expert.device)
        to_offset = torch.cat(
            [ends - padded - (counts.cumsum(0) - counts), ends.new_full((1,), room)]
        )
        row = (place + to_offset[expert[order]]).clamp(max=room)
        row_of_pick = torch.empty_like(row).scatter_(0, order, row).view(topk_ids.shape)
        # Row M stands for none: what is written there is cut off.
        pick_of_row = row.new_full((room + 1,), row.numel()).scatter_(0, row, order)[:room]
        offsets = torch.cat([ends.new_zeros(1), ends]).clamp(max=room)
        return cls(
            counts=torch.minimum(counts, (room - offsets[:-1]).clamp(min=0)),
            offsets=offsets,
            expert_of_pick=expert,
            row_of_pick=row_of_pick,
            pick_of_row=pick_of_row,
        )

    def is_incomplete(self, num_experts: int) -> Tensor | None:
        """Return [N] bool: a local pick of the row has none of the M rows. None if that is seen to
        be true of none."""
        is_local = self.expert_of_pick.view(self.row_of_pick.shape) < num_experts
        incomplete = (is_local & (self.row_of_pick == self.pick_of_row.shape[0])).any(1)
        return None if host_may_read(incomplete) and not incomplete.any() else incomplete


class _ToExperts(torch.autograd.Function):
    """Copies each received row to the rows of its picks. Backward adds what comes back of them, in
    float32 and in the order of the picks."""

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, index: Tensor, is_row: Tensor, row_of_pick: Tensor
    ) -> Tensor:
        ctx.save_for_backward(row_of_pick)
        return _rows_or_zeros(source, index, is_row)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (row_of_pick,) = ctx.saved_tensors
        return sum_of_picks(grad, None, row_of_pick), None, None, None


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
            has_row = row_of_pick < ctx.room
            columns = [
                (_rows_or_zeros(rows, index.where(has, 0), has).float() * grad.float()).sum(1)
                for index, has in zip(row_of_pick.unbind(1), has_row.unbind(1), strict=True)
            ]
            grad_weights = torch.stack(columns, 1)
        return grad_rows, grad_weights, None


def _rows_or_zeros(source: Tensor, index: Tensor, is_row: Tensor) -> Tensor:
    """Return rows `index` of the source, and zeros where is_row is False."""
    if source.shape[0] == 0:
        return source.new_zeros((index.shape[0], source.shape[1]))
    # As bytes: some dtypes of quantised rows know no fill.
    rows = source.contiguous().view(torch.uint8).index_select(0, index)
    if host_may_read(is_row):
        rows.index_fill_(0, (~is_row).nonzero().flatten(), 0)  # few, where a mask looks at all
    else:
        rows.masked_fill_(~is_row.view(-1, 1), 0)
    return rows.view(source.dtype)


def _entries(values: Tensor, index: Tensor, is_row: Tensor, otherwise: float) -> Tensor:
    if values.shape[0] == 0:
        return values.new_full(index.shape, otherwise)
    return values.index_select(0, index).where(is_row, otherwise)
