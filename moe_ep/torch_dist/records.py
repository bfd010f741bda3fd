"""How does a token travel? As one record of bytes: value row, scale row, ids, weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def as_bytes(rows: Tensor) -> Tensor:
    """Return [n, c] of any dtype as [n, bytes] uint8, without a copy where it is contiguous."""
    dense = rows.contiguous()
    # contiguous() leaves any stride on a dimension of size 1; a view as bytes needs stride 1.
    return dense.as_strided(dense.shape, (dense.shape[1], 1)).view(torch.uint8)


def pack(columns: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """Return [len(tokens), bytes] uint8, contiguous: the chosen rows of all columns side by side.

    columns: [n, *] each, of any dtype.
    """
    record = torch.cat([as_bytes(column) for column in columns], dim=1)
    return record.index_select(0, tokens)


def unpack_into(columns: Sequence[Tensor], records: Tensor, counts: list[int]) -> None:
    """Write the records of each source to the first rows of its block, column by column.

    columns: [ep_size, tokens_per_rank, *] each, contiguous; records: [sum(counts), bytes] uint8 in
    rank order.
    """
    blocks = [column.view(torch.uint8) for column in columns]
    widths = [block.shape[2] for block in blocks]
    for source, source_records in enumerate(torch.split(records, counts)):
        for block, part in zip(blocks, torch.split(source_records, widths, dim=1), strict=True):
            block[source, : counts[source]].copy_(part)
