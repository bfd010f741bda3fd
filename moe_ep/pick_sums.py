"""What do the picks of a row add up to? In float32 and in their order, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep.tensors import dense_rows, host_may_read


def sum_of_picks(
    rows: Tensor,
    weights: Tensor | None,
    row_of_pick: Tensor,
    output: Tensor | None = None,
    *,
    zero_others: bool = False,
) -> Tensor:
    """Return [N, *] in the rows' dtype: the rows of each pick, times their weights.

    rows: [M, *]. weights: [N, top_k] float32, or None. row_of_pick: [N, top_k] int64, M for a pick
    that has none. output: where the host may read: to write to; a row without a pick stays as it
    is, or with zero_others becomes zeros.
    """
    if not host_may_read(row_of_pick):
        return _slot_by_slot(rows, weights, row_of_pick)
    if output is None:
        output, zero_others = rows.new_empty((row_of_pick.shape[0], rows.shape[1])), True
    factors = None if weights is None else weights.float().contiguous()
    torch.ops.moe_ep.sum_rows(dense_rows(rows), factors, row_of_pick, output, zero_others)
    return output


def _slot_by_slot(rows: Tensor, weights: Tensor | None, row_of_pick: Tensor) -> Tensor:
    """All sizes are known beforehand."""
    num_rows, top_k = row_of_pick.shape
    total = rows.new_zeros((num_rows, rows.shape[1]), dtype=torch.float32)
    if rows.shape[0] == 0:
        return total.to(rows.dtype)
    for slot in range(top_k):
        index = row_of_pick[:, slot]
        has_row = index < rows.shape[0]
        part = rows.index_select(0, index.where(has_row, 0)).float()
        if weights is not None:
            part *= weights[:, slot : slot + 1]
        total = torch.where(has_row.view(-1, 1), total + part, total)
    return total.to(rows.dtype)
