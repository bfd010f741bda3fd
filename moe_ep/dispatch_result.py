"""What does a dispatch return?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class MoEEpDispatchResult:
    """What one rank received. Views of library memory, valid until the matching combine; in grad
    mode, where autograd may keep them, copies, with zeros in rows without a token.

    With R = ep_size, tpr = tokens_per_rank, rows `[s * tpr, (s + 1) * tpr)` come from source rank
    s: its tokens first, in ascending order, then rows without a token, whose ids are all
    `invalid_expert_id` and whose other contents are unspecified.

    hidden_states: [R * tpr, row] as given to dispatch (same dtype, same row width).
    topk_ids: [R * tpr, top_k] int32, global expert ids.
    topk_weights: [R * tpr, top_k] float32, or None where dispatch got none.
    tokens_per_rank: rows per source rank in this round.
    hidden_states_scale: [R * tpr, scale_row] as given to dispatch, or None.
    eplb_gathered_stats: [R, eplb_stats_num_experts] int32, row r as given by rank r, or None.
    recv_token_counts: [R] int32 on the device; entry s is the number of tokens received from rank
        s.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor | None
    tokens_per_rank: int
    hidden_states_scale: Tensor | None
    eplb_gathered_stats: Tensor | None
    recv_token_counts: Tensor


def rows_with_token(counts: Tensor, tokens_per_rank: int) -> Tensor:
    """Return [R * tokens_per_rank] bool: the received rows that hold a token.

    counts: [R], as recv_token_counts.
    """
    rows = torch.arange(tokens_per_rank, device=counts.device)
    return (rows < counts.view(-1, 1)).flatten()


def copy_of(result: MoEEpDispatchResult) -> MoEEpDispatchResult:
    """Return the result in memory of its own, zeros in rows without a token: the gradients of the
    experts' parameters are sums over all rows, and 0 * NaN would spoil them."""
    filled = rows_with_token(result.recv_token_counts, result.tokens_per_rank)[:, None]
    weights, scales = result.topk_weights, result.hidden_states_scale
    stats = result.eplb_gathered_stats
    return replace(
        result,
        hidden_states=_filled_rows(result.hidden_states, filled),
        topk_ids=result.topk_ids.clone(),
        topk_weights=None if weights is None else torch.where(filled, weights, 0),
        hidden_states_scale=None if scales is None else _filled_rows(scales, filled),
        eplb_gathered_stats=None if stats is None else stats.clone(),
        recv_token_counts=result.recv_token_counts.clone(),
    )


def _filled_rows(rows: Tensor, filled: Tensor) -> Tensor:
    if rows.element_size() > 1:
        return torch.where(filled, rows, 0)
    # As bytes: some dtypes of quantised rows know no fill.
    return torch.where(filled, rows.view(torch.uint8), 0).view(rows.dtype)
