"""How does a round of the backward go? Like one of the forward, with gradients for rows.

See `moe_ep.autograd` for which round that is, and why the ranks stay in step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_ep.dispatch_result import MoEEpDispatchResult, rows_with_token
from moe_ep.errors import MoEEpConfigError, MoEEpStateError, MoEEpTimeoutError
from moe_ep.workspaces import DISPATCHED, IDLE, IN_BACKWARD

if TYPE_CHECKING:
    from moe_ep.rounds import Rounds


@dataclass(frozen=True, eq=False)
class ForwardRound:
    """What both nodes of a forward round share. Tensors are not in it: autograd saves them, and
    activation checkpointing may drop and recompute them.

    has_weights: whether dispatch was given topk_weights.
    rows_need_grad, weights_need_grad: whether hidden_states and topk_weights required grad.
    """

    communication: Rounds
    num_tokens: int
    tokens_per_rank: int
    has_weights: bool
    rows_need_grad: bool
    weights_need_grad: bool

    @property
    def has_dispatch_node(self) -> bool:
        return self.rows_need_grad or self.weights_need_grad

    def zero_tokens(self, columns: int) -> Tensor:
        """Return [n, columns] of zeros in the token dtype."""
        of = self.communication
        zero = torch.zeros((), dtype=of.params.token_dtype, device=of.device)
        return zero.expand(self.num_tokens, columns)

    def rows_of(self, value: float, columns: int, dtype: torch.dtype) -> Tensor:
        """Return [ep_size * tokens_per_rank, columns] of one value."""
        one = torch.full((), value, dtype=dtype, device=self.communication.device)
        return one.expand(self.communication.ep_size * self.tokens_per_rank, columns)


@dataclass(frozen=True, eq=False)
class RoutedRound:
    """A round with its routing: one that is open in the forward pass, or one in the backward.

    link: None where dispatch has no node, and in the backward.
    """

    round: ForwardRound
    topk_ids: Tensor
    active_rank_mask: Tensor | None
    link: Tensor | None = None


def close_left_open(communication: Rounds) -> None:
    """Close the round of a backward that reached combine and not dispatch, if one is open: this
    communication's, or of one that shares its workspace.
    """
    if communication._shared.state == IN_BACKWARD:
        close_round(communication, fill=float("nan"))


def start_backward(routed: RoutedRound, grad_output: Tensor | None) -> Tensor:
    """Play combine's backward: return the gradient of expert_output. Collective."""
    one = routed.round
    with naming_backward_of(one, "combine"):
        grad_rows = open_round(routed, grad_output)
        if not one.has_dispatch_node:
            close_round(one.communication)
    return grad_rows


def finish_backward(
    routed: RoutedRound, grad_rows: Tensor | None, grad_weights: Tensor | None, *, is_open: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Play dispatch's backward: return the gradients of hidden_states and topk_weights that are
    wanted. Collective.

    is_open: whether combine's backward has opened the round.
    """
    one, lost = routed.round, None
    with naming_backward_of(one, "dispatch"):
        if not is_open:
            lost = open_round(routed, None)
        grads = close_round(one.communication, grad_rows, grad_weights)
    if lost is not None and lost.any():  # after the close: peers wait for that
        raise MoEEpStateError(
            "the loss of this rank depends on what dispatch returned, but not on the output of its "
            "combine, while a peer's loss does: the gradient of expert_output is lost. Call "
            "backward on a loss that has the output in it on all ranks; 0 * output.sum() is enough."
        )
    return grads


def open_round(wanted: RoutedRound, grad_output: Tensor | None) -> Tensor:
    """Open a round of the backward with the gradient of the tokens, None for zeros. Returns that of
    expert_output, [ep_size * tokens_per_rank, hidden_size]; rows without a token are zero.
    """
    one = wanted.round
    communication = one.communication
    if torch.compiler.is_compiling():
        raise MoEEpStateError("the backward of dispatch and combine cannot be compiled.")
    close_left_open(communication)
    if communication._shared.state == DISPATCHED:
        raise MoEEpStateError(
            "backward while a round is open: call combine before backward. Where activation "
            "checkpointing has just recomputed the dispatch, its combine must be in the same "
            "checkpointed region."
        )
    communication._require(IDLE, "backward")
    # The forward pass has recorded the ids of no expert; here they are padding.
    ids = wanted.topk_ids
    ids = torch.where(ids < communication.params.num_experts, ids, -1)
    pending = replace(wanted, topk_ids=ids)
    if grad_output is None:
        grad_output = one.zero_tokens(communication.params.hidden_size)
    result = _dispatch(pending, grad_output)
    communication._shared.backward = pending
    with communication._on_stream():
        has_token = rows_with_token(result.recv_token_counts, result.tokens_per_rank)
        return torch.where(has_token[:, None], result.hidden_states, 0)


def close_round(
    communication: Rounds,
    grad_rows: Tensor | None = None,
    grad_weights: Tensor | None = None,
    fill: float = 0.0,
) -> tuple[Tensor | None, Tensor | None]:
    """Close the round of the backward with the gradients of the received rows and weights, `fill`
    for one that is None. Returns those of hidden_states and topk_weights that are wanted.
    """
    pending = open_in_backward(communication)
    if pending is None:
        raise MoEEpStateError(
            "the backward of dispatch came before that of its combine: the compiler has moved a "
            "round. Call the layer in a function under torch.compiler.disable."
        )
    one, communication = pending.round, pending.round.communication
    params, communication._shared.backward = communication.params, None
    # Wanted or not: ranks that differ in what requires grad must not exchange rows of other widths,
    # and a peer that wants what this rank has not computed gets NaN.
    missing = fill if one.rows_need_grad else float("nan")
    filled = one.rows_of(missing, params.hidden_size, params.token_dtype)
    travelling = [filled if grad_rows is None or not one.rows_need_grad else grad_rows]
    if one.weights_need_grad:
        filled = one.rows_of(fill, params.top_k, torch.float32)
        weights = filled if grad_weights is None else grad_weights
        travelling.extend(torch.split(weights, weight_columns_per_round(communication), dim=1))
    returned = []
    for index, rows in enumerate(travelling):
        if index > 0:
            _dispatch(pending, one.zero_tokens(1))
        returned.append(_combine(pending, rows))
    grad_hidden = returned.pop(0)
    grads = torch.cat(returned, dim=1) if one.weights_need_grad else None
    return grad_hidden if one.rows_need_grad else None, grads


def _dispatch(pending: RoutedRound, rows: Tensor) -> MoEEpDispatchResult:
    one, communication = pending.round, pending.round.communication
    # Weights that mean nothing, where the forward had none, and none where it had some: a rank that
    # has left its backward out is in its next forward, and the ranks must see that they disagree.
    weights = None
    if not one.has_weights:
        zero = torch.zeros((), dtype=torch.float32, device=communication.device)
        weights = zero.expand(one.num_tokens, communication.params.top_k)
    return communication._attempt(
        communication._dispatch,
        rows,
        pending.topk_ids,
        weights,
        hidden_states_scale=None,
        tokens_per_rank=pending.round.tokens_per_rank,
        eplb_local_stats=None,
        active_rank_mask=pending.active_rank_mask,
        before=IDLE,
        after=IN_BACKWARD,
    )


def _combine(pending: RoutedRound, rows: Tensor) -> Tensor:
    communication = pending.round.communication
    return communication._attempt(
        communication._combine,
        rows,
        num_tokens=pending.round.num_tokens,
        tokens_per_rank=pending.round.tokens_per_rank,
        output=None,
        active_rank_mask=pending.active_rank_mask,
        before=IN_BACKWARD,
        after=IDLE,
    )


def open_in_backward(communication: Rounds) -> RoutedRound | None:
    """Return the round that a backward has open in the workspace, if any."""
    shared = communication._shared
    return shared.backward if shared.state == IN_BACKWARD else None


def weight_columns_per_round(communication: Rounds) -> int:
    """Return how many columns of float32 fit into a row on its way back."""
    params = communication.params
    columns = params.combine_bytes_per_token // torch.float32.itemsize
    if columns == 0:
        raise MoEEpConfigError(
            f"topk_weights requires grad, which needs rows of 4 bytes or more to come back in, and "
            f"hidden_size={params.hidden_size} of {params.token_dtype} has "
            f"{params.combine_bytes_per_token}: pass topk_weights.detach()."
        )
    return columns


@contextmanager
def naming_backward_of(one: ForwardRound, call: str) -> Iterator[None]:
    try:
        yield
    except (MoEEpConfigError, MoEEpTimeoutError) as error:
        said = (
            f"in the backward of {call}: {str(error).rstrip('.')}. Every rank must run backward "
            "through the same "
            "dispatch and combine calls, in the same order, and requires_grad of each argument "
            "must be the same on all of them."
        )
        one.communication._shared.broken_by = said  # if it is broken
        raise type(error)(said) from None
