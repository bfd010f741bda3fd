"""How are the partial rows of a token added? In float32, by ascending owner, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep.torch_dist.routing import Routing


def sum_by_token(partials: Tensor, routing: Routing, num_tokens: int) -> Tensor:
    """Return [num_tokens, hidden_size]: the sums of the partial rows, rounded once.

    partials: [sum(send_counts), hidden_size], in the order of `routing.tokens`.
    """
    total = partials.new_zeros((num_tokens, partials.shape[1]), dtype=torch.float32)
    tokens_by_owner = torch.split(routing.tokens, routing.send_counts)
    rows_by_owner = torch.split(partials, routing.send_counts)
    # One owner after the other fixes the order of the additions; a token is at most once in each.
    for tokens, rows in zip(tokens_by_owner, rows_by_owner, strict=True):
        # Not index_add_: the additions of atomics on CUDA lose subnormal numbers.
        total.index_copy_(0, tokens, total.index_select(0, tokens) + rows.float())
    return rounded(total, partials.dtype)


def rounded(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 sums in the dtype of the rows; every NaN is the canonical one."""
    inf = float("inf")
    # Whatever a NaN's sign and payload; infinities stay.
    return total.to(dtype).nan_to_num_(nan=float("nan"), posinf=inf, neginf=-inf)
