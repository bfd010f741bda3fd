"""How are the partial rows of a token added? In float32, by ascending owner, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ep.torch_dist.routing import Routing


def sum_by_token(rows_by_owner: Sequence[Tensor], routing: Routing, num_tokens: int) -> Tensor:
    """Return [num_tokens, hidden_size]: the sums of the partial rows, rounded once.

    rows_by_owner: of each rank [send_counts[rank], hidden_size], in the order of `routing.tokens`.
    """
    first = rows_by_owner[0]
    total = first.new_zeros((num_tokens, first.shape[1]), dtype=torch.float32)
    tokens_by_owner = torch.split(routing.tokens, routing.send_counts)
    # One owner after the other fixes the order of the additions; a token is at most once in each.
    for tokens, rows in zip(tokens_by_owner, rows_by_owner, strict=True):
        # Not index_add_: the additions of atomics on CUDA lose subnormal numbers.
        total.index_copy_(0, tokens, total.index_select(0, tokens) + rows.float())
    return rounded(total, first.dtype)


def rounded(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 sums in the dtype of the rows; every NaN is the canonical one."""
    inf = float("inf")
    # Whatever a NaN's sign and payload; infinities stay.
    return total.to(dtype).nan_to_num_(nan=float("nan"), posinf=inf, neginf=-inf)
