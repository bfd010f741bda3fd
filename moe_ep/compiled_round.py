"""How does a round go in a compiled graph where the compiler must not see its memory?

By two ops without side effects in their schemas (`moe_ep.round_ops`), which run the round as eager
code does: what they return is new memory, so that a graph has no view of the workspace and nothing
to clone. Each has an autograd formula whose backward is another such op, as in `moe_ep.autograd`.
The ops are registered as ordered effects: the compiler neither drops, merges nor reorders them, in
backward either.

Backends with ops of their own for compiled graphs use those without gradients, and these with
gradients and in exported programs, which would take a copy of the workspace along. No state of the
communication is traced: the ops go through all of them when they run. (torch.export runs this code
and may be left in the middle, by an exception of the user's.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

import moe_ep.round_ops  # noqa: F401  (registers the ops)
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.errors import MoEEpConfigError, MoEEpStateError

if TYPE_CHECKING:
    from moe_ep.rounds import Rounds


class TracedRound(NamedTuple):
    """What a traced combine needs of its dispatch."""

    topk_ids: Tensor
    active_rank_mask: Tensor | None
    link: Tensor
    has_weights: bool
    rows_need_grad: bool
    weights_need_grad: bool


def is_wanted(communication: Rounds) -> bool:
    """Whether a dispatch that is being traced goes through the ops here."""
    if not torch.compiler.is_compiling():
        return False
    needs_gradients = torch.is_grad_enabled() and communication._has_gradients
    # Not is_exporting(), which the Dynamo of torch 2.11 takes for true in every graph.
    exports = torch.compiler._is_exporting_flag
    return needs_gradients or exports or not communication._has_graph_ops


def is_open(communication: Rounds) -> bool:
    """Whether a dispatch has been traced through the ops here, and its combine not yet."""
    return torch.compiler.is_compiling() and communication._traced is not None


def require_traced_dispatch(communication: Rounds, expert_output: Tensor) -> None:
    """Raise MoEEpStateError where a combine with gradients is traced, and its dispatch was not."""
    is_alone = torch.compiler.is_compiling() and communication._traced is None
    records = torch.is_grad_enabled() and communication._has_gradients
    if is_alone and records and expert_output.requires_grad:
        raise MoEEpStateError(
            "combine of a round with gradients is in a compiled graph, and its dispatch was not: "
            "compile both or neither."
        )


def dispatch(
    communication: Rounds,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    *,
    hidden_states_scale: Tensor | None,
    tokens_per_rank: int,
    eplb_local_stats: Tensor | None,
    active_rank_mask: Tensor | None,
) -> MoEEpDispatchResult:
    """Trace a dispatch. Its arguments have been checked."""
    has_weights = topk_weights is not None
    records = torch.is_grad_enabled() and communication._has_gradients
    rows_need_grad = records and hidden_states.requires_grad
    weights_need_grad = records and topk_weights is not None and topk_weights.requires_grad
    rows, ids, weights, counts, scales, stats, link = torch.ops.moe_ep.round_dispatch(
        hidden_states,
        topk_weights,
        topk_ids,
        hidden_states_scale,
        eplb_local_stats,
        active_rank_mask,
        communication._graph_name,
        communication.ep_size,
        tokens_per_rank,
        rows_need_grad,
        weights_need_grad,
    )
    communication._traced = TracedRound(
        topk_ids, active_rank_mask, link, has_weights, rows_need_grad, weights_need_grad
    )
    return MoEEpDispatchResult(
        hidden_states=rows,
        topk_ids=ids,
        topk_weights=weights if has_weights else None,
        tokens_per_rank=tokens_per_rank,
        hidden_states_scale=scales if hidden_states_scale is not None else None,
        eplb_gathered_stats=stats if eplb_local_stats is not None else None,
        recv_token_counts=counts,
    )


def combine(
    communication: Rounds,
    expert_output: Tensor,
    *,
    num_tokens: int,
    tokens_per_rank: int,
    output: Tensor | None,
    active_rank_mask: Tensor | None,
) -> Tensor:
    """Trace a combine. Its arguments have been checked."""
    traced = communication._traced
    communication._traced = None
    assert traced is not None
    combined: Tensor = torch.ops.moe_ep.round_combine(
        expert_output,
        traced.link,
        traced.topk_ids,
        active_rank_mask,
        communication._graph_name,
        communication.ep_size,
        num_tokens,
        tokens_per_rank,
        traced.has_weights,
        traced.rows_need_grad,
        traced.weights_need_grad,
    )
    if output is None:
        return combined
    if combined.requires_grad:
        raise MoEEpConfigError(
            "output must be None in a round with gradients: combine returns a new tensor there."
        )
    return output.copy_(combined)
