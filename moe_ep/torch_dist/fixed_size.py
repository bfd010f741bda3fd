"""How does a round go in a CUDA graph? In blocks of a fixed size, without the host.

The host cannot learn how many rows a rank gets, so each rank gets `tokens_per_rank` of them, with
the number of those that count in front. That is what the result has room for anyway, and more than
need travel: an eager round sends no row in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ep.torch_dist.records import as_bytes

_COUNT_BYTES = 8


@dataclass(frozen=True)
class Places:
    """Where the tokens of a rank go.

    goes: [n, ep_size] bool: whether the token goes to the rank.
    rows: [n, ep_size] int64: its row in the block for that rank, 0 where it does not go.
    """

    goes: Tensor
    rows: Tensor

    @classmethod
    def of(cls, goes: Tensor) -> Places:
        """Return the places of tokens in ascending order. goes: [n, ep_size] bool."""
        return cls(goes, (goes.cumsum(0) - 1).where(goes, 0))


def pack_blocks(columns: Sequence[Tensor], places: Places, tokens_per_rank: int) -> Tensor:
    """Return [ep_size, bytes] uint8, contiguous: for each rank the number of its rows, then these.

    columns: [n, *] each, of any dtype: value row, scale row, ids, weights of a token.
    """
    num_tokens, ep_size = places.goes.shape
    device = places.goes.device
    tokens = torch.arange(num_tokens, device=device).expand(ep_size, -1)
    # A token that does not go to a rank is written to one row too many, which is cut off. In rows
    # without a token there is a record of zeros, behind those of the tokens.
    token_of_row = tokens.new_full((ep_size, tokens_per_rank + 1), num_tokens)
    row_of_token = places.rows.where(places.goes, tokens_per_rank)
    token_of_row.scatter_(1, row_of_token.t(), tokens)
    records = torch.cat([as_bytes(column) for column in columns], dim=1)
    records = torch.cat([records, records.new_zeros(1, records.shape[1])])
    rows = records.index_select(0, token_of_row[:, :tokens_per_rank].reshape(-1))
    counts = as_bytes(places.goes.sum(0).view(ep_size, 1))
    return torch.cat([counts, rows.view(ep_size, -1)], dim=1)


def unpack_blocks(
    blocks: Tensor, columns: Sequence[Tensor], tokens_per_rank: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the number of rows [ep_size] int64 from each rank, and what came of each column.

    blocks: as `pack_blocks` returned them on the ranks. columns: one's own, for dtypes and widths;
    the results are [ep_size, tokens_per_rank, *], contiguous, zeros in rows without a token.
    """
    ep_size = blocks.shape[0]
    counts = blocks[:, :_COUNT_BYTES].contiguous().view(torch.int64).view(ep_size)
    records = blocks[:, _COUNT_BYTES:].view(ep_size, tokens_per_rank, -1)
    widths = [column.shape[1] * column.element_size() for column in columns]
    received = [
        part.contiguous().view(column.dtype)
        for part, column in zip(torch.split(records, widths, dim=2), columns, strict=True)
    ]
    return counts, received


def sum_by_places(partials: Tensor, places: Places) -> Tensor:
    """Return [n, hidden_size] float32: the sums of the partial rows, in ascending order of ranks.

    partials: [ep_size, tokens_per_rank, hidden_size].
    """
    num_tokens, ep_size = places.goes.shape
    total = partials.new_zeros((num_tokens, partials.shape[2]), dtype=torch.float32)
    for rank in range(ep_size):
        rows = partials[rank].index_select(0, places.rows[:, rank])
        goes = places.goes[:, rank].view(-1, 1)
        total = torch.where(goes, total + rows.float(), total)
    return total
