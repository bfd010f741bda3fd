"""How do gradients flow through dispatch and combine? Each one's backward is the other.

The backward of a layer is one round in the other direction, with the forward's topk_ids:

    combine's backward    dispatch of grad_output     opens the round; brings the gradient of
                                                      expert_output
    experts' backward
    dispatch's backward   combine of the row          closes it; brings the gradient of
                          gradients                   hidden_states

Weights are float32 and rows may not be, so the gradient of topk_weights comes back in a round of
its own, whose dispatch carries next to nothing and whose combine carries top_k columns of float32.

These rounds are collective, but autograd runs only the nodes that a rank's loss reaches. What keeps
the ranks together:

* A recorded dispatch has a third output, `link`, an empty tensor that goes into combine. So combine
  is recorded where dispatch is, also on a rank whose experts got no token and touched nothing, and
  wherever combine's backward runs, dispatch's runs after it.
* Each recorded round is played back in full, whichever of its nodes a backward reaches. Dispatch's
  backward without combine's first dispatches zeros. A round that was opened and not closed (only
  gradients of the experts were asked for) is closed by the next call.
* Nobody goes on with an incomplete sum. Gradients of peers that come to a rank whose loss leaves
  combine out raise there; a peer that waits for gradients that this rank has not computed gets NaN.
* Whether the gradient of rows and weights is wanted was decided in the forward pass, by
  requires_grad, which must be the same on all ranks.

Autograd saves what the experts compute with. In the workspace the next round would overwrite it, in
backward at the latest, so in grad mode dispatch returns copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_ep import states
from moe_ep.errors import MoEEpConfigError, MoEEpStateError, MoEEpTimeoutError

if TYPE_CHECKING:
    from moe_ep.communication import MoEEpCommunication, MoEEpDispatchResult

Call = TypeVar("Call", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class RecordedRound:
    """What both nodes of a forward round share. Tensors are not in it: autograd saves them, and
    activation checkpointing may drop and recompute them.

    rows_need_grad, weights_need_grad: whether hidden_states and topk_weights required grad.
    """

    communication: MoEEpCommunication
    num_tokens: int
    tokens_per_rank: int
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
class Recorded:
    """A round with its routing: one that is open in the forward pass, or one in the backward.

    link: None where dispatch has no node, and in the backward.
    """

    round: RecordedRound
    topk_ids: Tensor
    active_rank_mask: Tensor | None
    link: Tensor | None = None


def records_dispatch(run: Call) -> Call:
    """Make a dispatch record its gradients, where grad mode is on."""

    @functools.wraps(run)
    def dispatch(
        self: MoEEpCommunication,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None,
        **options: Any,
    ) -> MoEEpDispatchResult:
        if not (torch.is_grad_enabled() and _can_record(self)):
            without: MoEEpDispatchResult = run(
                self, hidden_states, topk_ids, topk_weights, **options
            )
            return without
        rows_need_grad, weights_need_grad = map(_requires_grad, (hidden_states, topk_weights))
        if rows_need_grad or weights_need_grad:
            _require_usual_stream(self)
        if weights_need_grad:
            _weight_columns_per_round(self)
        with torch.no_grad():
            result = run(self, hidden_states, topk_ids, topk_weights, **options)
            with self._on_stream():
                result = _copy_of(result)
        mask = options.get("active_rank_mask")
        sizes = (hidden_states.shape[0], result.tokens_per_rank)
        one = RecordedRound(self, *sizes, rows_need_grad, weights_need_grad)
        link = None
        if one.has_dispatch_node:
            rows, weights, link = _Dispatch.apply(  # type: ignore[no-untyped-call]
                hidden_states, topk_weights, topk_ids, mask, one, result
            )
            result = replace(result, hidden_states=rows, topk_weights=weights)
        self._recorded = Recorded(one, topk_ids, mask, link)
        return result

    return dispatch  # type: ignore[return-value]


def records_combine(run: Call) -> Call:
    """Make a combine record its gradient, where grad mode is on and there is something to record:
    its dispatch has a node, or expert_output requires grad."""

    @functools.wraps(run)
    def combine(
        self: MoEEpCommunication,
        expert_output: Tensor,
        *,
        output: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
    ) -> Tensor:
        options = {"output": output, "active_rank_mask": active_rank_mask}
        if not (torch.is_grad_enabled() and _can_record(self)):
            without: Tensor = run(self, expert_output, **options)
            return without
        recorded, needs_grad = self._recorded, _requires_grad(expert_output)
        if not needs_grad and (recorded is None or recorded.link is None):
            unrecorded: Tensor = run(self, expert_output, **options)
            return unrecorded
        self._require(states.DISPATCHED, "combine")
        if recorded is None:
            raise MoEEpStateError(
                "expert_output requires grad, but its dispatch ran without grad mode: call both in "
                "the same mode. (The inputs of dispatch need not require grad.)"
            )
        if output is not None:
            raise MoEEpConfigError(
                "output must be None in a round with gradients: combine returns a new tensor there."
            )
        if needs_grad:
            _require_usual_stream(self)
            _refuse_library_memory(self, expert_output)
        one, ids, mask = recorded.round, recorded.topk_ids, recorded.active_rank_mask
        exchange = functools.partial(run, self, **options)
        combined: Tensor = _Combine.apply(  # type: ignore[no-untyped-call]
            expert_output, recorded.link, ids, mask, one, exchange
        )
        return combined

    return combine  # type: ignore[return-value]


class _Dispatch(torch.autograd.Function):
    """Hangs what a dispatch has brought into the graph. The exchange is done already."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        topk_weights: Tensor | None,
        topk_ids: Tensor,
        mask: Tensor | None,
        one: RecordedRound,
        result: MoEEpDispatchResult,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.round = one
        ctx.save_for_backward(topk_ids, mask)
        rows, weights = result.hidden_states, result.topk_weights
        given = ((rows, one.rows_need_grad), (weights, one.weights_need_grad))
        ctx.mark_non_differentiable(*[t for t, needs in given if t is not None and not needs])
        return rows, weights, torch.empty(0, device=rows.device)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_rows: Tensor | None, grad_weights: Tensor | None, _link: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        topk_ids, mask = ctx.saved_tensors
        one: RecordedRound = ctx.round
        with _naming_backward_of(one, "dispatch"):
            pending = _pending_of(one.communication)
            lost = None
            if pending is None or pending.round is not one:
                lost = _open(Recorded(one, topk_ids, mask), None)
            grads = _close(one.communication, grad_rows, grad_weights)
        if lost is not None and lost.any():  # after the close: peers wait for that
            raise MoEEpStateError(
                "the loss of this rank depends on what dispatch returned, but not on the output of "
                "its combine, while a peer's loss does: the gradient of expert_output is lost. "
                "Call backward on a loss that has the output in it on all ranks; "
                "0 * output.sum() is enough."
            )
        return *grads, None, None, None, None


class _Combine(torch.autograd.Function):
    """Saves tensors although dispatch has saved the same: autograd takes them after the exchange,
    so that a checkpoint that stops to recompute at the last saved tensor has played the round to
    its end."""

    @staticmethod
    def forward(
        ctx: Any,
        expert_output: Tensor,
        link: Tensor | None,
        topk_ids: Tensor,
        mask: Tensor | None,
        one: RecordedRound,
        exchange: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        combined = exchange(expert_output)
        one.communication._recorded = None
        ctx.round, ctx.shape = one, expert_output.shape
        ctx.save_for_backward(topk_ids, mask)
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        # First of all: a checkpoint recomputes here, and plays the forward round again.
        topk_ids, mask = ctx.saved_tensors
        one: RecordedRound = ctx.round
        with _naming_backward_of(one, "combine"):
            grad_rows = _open(Recorded(one, topk_ids, mask), grad_output)
            if not one.has_dispatch_node:
                _close(one.communication)
        grad = grad_rows.view(ctx.shape) if ctx.needs_input_grad[0] else None
        return grad, None, None, None, None, None


def close_left_open(communication: MoEEpCommunication) -> None:
    """Close the round of a backward that reached combine and not dispatch, if one is open."""
    if _pending_of(communication) is not None:
        _close(communication, fill=float("nan"))


def _open(wanted: Recorded, grad_output: Tensor | None) -> Tensor:
    """Open a round of the backward with the gradient of the tokens, None for zeros. Returns that of
    expert_output, [ep_size * tokens_per_rank, hidden_size]; rows without a token are zero.
    """
    one = wanted.round
    communication = one.communication
    if torch.compiler.is_compiling():
        raise MoEEpStateError("the backward of dispatch and combine cannot be compiled.")
    close_left_open(communication)
    communication._require(states.IDLE, "backward")
    # The forward pass has recorded the ids of no expert; here they are padding.
    ids = wanted.topk_ids
    ids = torch.where(ids < communication.params.num_experts, ids, -1)
    pending = replace(wanted, topk_ids=ids)
    if grad_output is None:
        grad_output = one.zero_tokens(communication.params.hidden_size)
    result = _dispatch(pending, grad_output)
    communication._backward = pending
    with communication._on_stream():
        return torch.where(_has_token(result)[:, None], result.hidden_states, 0)


def _close(
    communication: MoEEpCommunication,
    grad_rows: Tensor | None = None,
    grad_weights: Tensor | None = None,
    fill: float = 0.0,
) -> tuple[Tensor | None, Tensor | None]:
    """Close the round of the backward with the gradients of the received rows and weights, `fill`
    for one that is None. Returns those of hidden_states and topk_weights that are wanted.
    """
    pending = _pending_of(communication)
    assert pending is not None
    one, params = pending.round, communication.params
    travelling: list[Tensor] = []
    if one.rows_need_grad:
        filled = one.rows_of(fill, params.hidden_size, params.token_dtype)
        travelling.append(filled if grad_rows is None else grad_rows)
    if one.weights_need_grad:
        filled = one.rows_of(fill, params.top_k, torch.float32)
        weights = filled if grad_weights is None else grad_weights
        travelling.extend(weights.split(_weight_columns_per_round(communication), dim=1))
    if not travelling:  # only combine was recorded; its round must end
        travelling.append(one.rows_of(fill, 1, params.token_dtype))
    returned = []
    for index, rows in enumerate(travelling):
        if index > 0:
            _dispatch(pending, one.zero_tokens(1))
        returned.append(_combine(pending, rows))
    grad_hidden = returned.pop(0) if one.rows_need_grad else None
    return grad_hidden, torch.cat(returned, dim=1) if one.weights_need_grad else None


def _dispatch(pending: Recorded, rows: Tensor) -> MoEEpDispatchResult:
    communication = pending.round.communication
    return communication._attempt(
        communication._dispatch,
        rows,
        pending.topk_ids,
        None,
        hidden_states_scale=None,
        tokens_per_rank=pending.round.tokens_per_rank,
        eplb_local_stats=None,
        active_rank_mask=pending.active_rank_mask,
        before=states.IDLE,
        after=states.IN_BACKWARD,
    )


def _combine(pending: Recorded, rows: Tensor) -> Tensor:
    communication = pending.round.communication
    return communication._attempt(
        communication._combine,
        rows,
        num_tokens=pending.round.num_tokens,
        tokens_per_rank=pending.round.tokens_per_rank,
        output=None,
        active_rank_mask=pending.active_rank_mask,
        before=states.IN_BACKWARD,
        after=states.IDLE,
    )


def _pending_of(communication: MoEEpCommunication) -> Recorded | None:
    """Return the round that a backward has open, if any."""
    return communication._backward if communication._state == states.IN_BACKWARD else None


def _has_token(result: MoEEpDispatchResult) -> Tensor:
    """Return [ep_size * tokens_per_rank] bool: the received rows with a token."""
    counts = result.recv_token_counts
    return (torch.arange(result.tokens_per_rank, device=counts.device) < counts[:, None]).flatten()


def _copy_of(result: MoEEpDispatchResult) -> MoEEpDispatchResult:
    """Return the result in memory of its own, zeros in rows without a token: the gradients of the
    experts' parameters are sums over all rows, and 0 * NaN would spoil them."""
    has_token, weights = _has_token(result)[:, None], result.topk_weights
    stats = result.eplb_gathered_stats
    return replace(
        result,
        hidden_states=torch.where(has_token, result.hidden_states, 0),
        topk_ids=result.topk_ids.clone(),
        topk_weights=None if weights is None else torch.where(has_token, weights, 0),
        eplb_gathered_stats=None if stats is None else stats.clone(),
        recv_token_counts=result.recv_token_counts.clone(),
    )


def _can_record(communication: MoEEpCommunication) -> bool:
    return communication._has_gradients and not torch.compiler.is_compiling()


def _requires_grad(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _weight_columns_per_round(communication: MoEEpCommunication) -> int:
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


def _require_usual_stream(communication: MoEEpCommunication) -> None:
    """Autograd runs a backward on the stream of its forward, where nobody would wait for another
    one that the user chose for the communication."""
    chosen = communication._bootstrap.stream
    if chosen != 0 and torch.cuda.current_stream(communication.device).cuda_stream != chosen:
        raise MoEEpConfigError(
            "rounds with gradients must run with the bootstrap's stream as the current one, in "
            "forward and backward: call them under torch.cuda.stream(...)."
        )


def _refuse_library_memory(communication: MoEEpCommunication, expert_output: Tensor) -> None:
    """The experts' last step may have saved what it wrote, and backward would overwrite it."""
    buffer = communication._combine_input_buffer()
    if buffer is not None and expert_output.data_ptr() == buffer.data_ptr():
        raise MoEEpConfigError(
            "expert_output requires grad and is the memory of get_combine_input_buffer, which the "
            "backward overwrites: use a tensor of your own, or torch.no_grad()."
        )


@contextmanager
def _naming_backward_of(one: RecordedRound, call: str) -> Iterator[None]:
    try:
        yield
    except MoEEpTimeoutError as error:
        said = (
            f"in the backward of {call}: {error} Every rank must run backward through the same "
            "dispatch and combine calls, in the same order, and requires_grad of each argument "
            "must be the same on all of them."
        )
        one.communication._broken_by = said
        raise MoEEpTimeoutError(said) from None
