"""Which row of its expert's group does each pick have, and what is in it?

On the host by ops of the library, elsewhere and in compiled graphs by torch's: the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_ep.tensors import dense_rows, host_may_read


@dataclass(frozen=True)
class PickGroups:
    """Where each pick goes, with L local experts, N rows and M rows of groups. All int64.

    counts: [L], rows of each group. offsets: [L + 1], where they begin.
    row_of_pick: [N, top_k]; M for one that has none.
    pick_of_row: [M], of the picks one after the other; N * top_k where there is none.
    is_incomplete: [N] bool, a local pick of the row has none of the M rows; None where that is seen
        to be true of none.
    """

    counts: Tensor
    offsets: Tensor
    row_of_pick: Tensor
    pick_of_row: Tensor
    is_incomplete: Tensor | None = None


def group_picks(
    topk_ids: Tensor,
    first_expert: int,
    num_experts: int,
    *,
    alignment: int,
    room: int,
    may_lack_room: bool,
) -> PickGroups:
    """Return where picks go when each local expert's begin at a multiple of `alignment`.

    topk_ids: [N, top_k] int32, global. room: M. may_lack_room: False: it is enough for any picks.
    """
    if host_may_read(topk_ids):
        groups = PickGroups(
            counts=topk_ids.new_empty(num_experts, dtype=torch.long),
            offsets=topk_ids.new_empty(num_experts + 1, dtype=torch.long),
            row_of_pick=topk_ids.new_empty(topk_ids.shape, dtype=torch.long),
            pick_of_row=topk_ids.new_empty(room, dtype=torch.long),
        )
        outputs = (groups.counts, groups.offsets, groups.row_of_pick, groups.pick_of_row)
        ids = topk_ids.contiguous()
        if torch.ops.moe_ep.group_picks(ids, first_expert, alignment, *outputs):
            return groups
        local = _local(topk_ids, first_expert, num_experts)
    else:
        local = _local(topk_ids, first_expert, num_experts)
        groups = _sorted_picks(local, num_experts, alignment, room)
        if not may_lack_room:
            return groups
    incomplete = ((local < num_experts) & (groups.row_of_pick == room)).any(1)
    return replace(groups, is_incomplete=incomplete)


def rows_of_picks(
    source: Tensor, topk_ids: Tensor, first_expert: int, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a row for each pick of a local expert, in the order of their groups, where the host
    may read: rows [M, *], their local experts [M, 1] int64, and row_of_pick as of PickGroups.

    source: [N, *]. topk_ids: [N, top_k] int32 or int64, global. Where no pick is local, there is
    one row of zeros, for the first expert.
    """
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.moe_ep.rows_of_picks(
        dense_rows(source), topk_ids.contiguous(), first_expert, num_experts
    )
    return found


def rows_or_zeros(source: Tensor, index: Tensor) -> Tensor:
    """Return rows `index` of the source, zeros where that is the number of its rows."""
    num_rows = source.shape[0]
    if host_may_read(source):
        rows = source.new_empty((index.shape[0], source.shape[1]))
        torch.ops.moe_ep.copy_rows(dense_rows(source), index.contiguous(), rows)
        return rows
    # As bytes: some dtypes of quantised rows know no fill.
    source_bytes = source.contiguous().view(torch.uint8)
    if num_rows == 0:
        zeros = source_bytes.new_zeros((index.shape[0], source_bytes.shape[1]))
        return zeros.view(source.dtype)
    is_row = index < num_rows
    rows = source_bytes.index_select(0, index.where(is_row, 0))
    return rows.masked_fill_(~is_row.view(-1, 1), 0).view(source.dtype)


def entries_or(otherwise: float, values: Tensor, index: Tensor) -> Tensor:
    """Return entries `index` of the values one after the other, `otherwise` where that is their
    number."""
    if values.numel() == 0:
        return values.new_full(index.shape, otherwise)
    is_entry = index < values.numel()
    return values.flatten().index_select(0, index.where(is_entry, 0)).where(is_entry, otherwise)


def _sorted_picks(local: Tensor, num_experts: int, alignment: int, room: int) -> PickGroups:
    """All sizes are known beforehand. local: see `_local`."""
    expert = local.flatten()
    counts = expert.new_zeros(num_experts + 1).scatter_add_(0, expert, torch.ones_like(expert))
    counts = counts[:num_experts]
    padded = (counts + alignment - 1) // alignment * alignment
    ends = padded.cumsum(0)
    # Sorted picks of an expert lie together, in their order; those of no expert come last.
    order = expert.argsort(stable=True)
    place = torch.arange(expert.numel(), device=expert.device)
    to_offset = torch.cat([ends - padded - (counts.cumsum(0) - counts), ends.new_full((1,), room)])
    row = (place + to_offset[expert[order]]).clamp(max=room)
    row_of_pick = torch.empty_like(row).scatter_(0, order, row).view(local.shape)
    # Row M stands for none: what is written there is cut off.
    pick_of_row = row.new_full((room + 1,), row.numel()).scatter_(0, row, order)[:room]
    offsets = torch.cat([ends.new_zeros(1), ends]).clamp(max=room)
    return PickGroups(
        counts=torch.minimum(counts, (room - offsets[:-1]).clamp(min=0)),
        offsets=offsets,
        row_of_pick=row_of_pick,
        pick_of_row=pick_of_row,
    )


def _local(topk_ids: Tensor, first_expert: int, num_experts: int) -> Tensor:
    """Return local ids, [N, top_k] int64; num_experts for one that is not local."""
    local = topk_ids.long() - first_expert
    return local.where((local >= 0) & (local < num_experts), num_experts)
