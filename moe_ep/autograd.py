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
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from moe_ep.backward_round import (
    ForwardRound,
    RoutedRound,
    finish_backward,
    open_in_backward,
    start_backward,
    weight_columns_per_round,
)
from moe_ep.derivatives import differentiable_once
from moe_ep.dispatch_result import MoEEpDispatchResult, copy_of
from moe_ep.errors import MoEEpConfigError, MoEEpStateError
from moe_ep.workspaces import DISPATCHED

if TYPE_CHECKING:
    from moe_ep.rounds import Rounds

Call = TypeVar("Call", bound=Callable[..., Any])


def records_dispatch(run: Call) -> Call:
    """Make a dispatch record its gradients, where grad mode is on."""

    @functools.wraps(run)
    def dispatch(
        self: Rounds,
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
            require_usual_stream(self)
            _refuse_inference_tensors(
                topk_ids=topk_ids, active_rank_mask=options.get("active_rank_mask")
            )
        if weights_need_grad:
            weight_columns_per_round(self)
        with torch.no_grad():
            result = run(self, hidden_states, topk_ids, topk_weights, **options)
            with self._on_stream():
                result = copy_of(result)
        mask = options.get("active_rank_mask")
        sizes = (hidden_states.shape[0], result.tokens_per_rank)
        has_weights = topk_weights is not None
        one = ForwardRound(self, *sizes, has_weights, rows_need_grad, weights_need_grad)
        link = None
        if one.has_dispatch_node:
            rows, weights, link = _Dispatch.apply(
                hidden_states, topk_weights, topk_ids, mask, one, result
            )
            result = replace(result, hidden_states=rows, topk_weights=weights)
        self._recorded = RoutedRound(one, topk_ids, mask, link)
        return result

    return dispatch  # type: ignore[return-value]


def records_combine(run: Call) -> Call:
    """Make a combine record its gradient, where grad mode is on and there is something to record:
    its dispatch has a node, or expert_output requires grad."""

    @functools.wraps(run)
    def combine(
        self: Rounds,
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
        self._require(DISPATCHED, "combine")
        if recorded is None:
            raise MoEEpStateError(
                "expert_output requires grad, but its dispatch ran without grad mode, or in a "
                "compiled graph: call both in the same mode (the inputs of dispatch need not "
                "require grad), and compile both or neither."
            )
        if output is not None:
            raise MoEEpConfigError(
                "output must be None in a round with gradients: combine returns a new tensor there."
            )
        if needs_grad:
            require_usual_stream(self)
            _refuse_library_memory(self, expert_output)
        one, ids, mask = recorded.round, recorded.topk_ids, recorded.active_rank_mask
        exchange = functools.partial(run, self, **options)
        combined: Tensor = _Combine.apply(expert_output, recorded.link, ids, mask, one, exchange)
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
        one: ForwardRound,
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
    @differentiable_once
    def backward(
        ctx: Any, grad_rows: Tensor | None, grad_weights: Tensor | None, _link: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        topk_ids, mask = ctx.saved_tensors
        one: ForwardRound = ctx.round
        pending = open_in_backward(one.communication)
        grads = finish_backward(
            RoutedRound(one, topk_ids, mask),
            grad_rows,
            grad_weights,
            is_open=pending is not None and pending.round is one,
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
        one: ForwardRound,
        exchange: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        combined = exchange(expert_output)
        ctx.round, ctx.shape = one, expert_output.shape
        ctx.save_for_backward(topk_ids, mask)
        return combined

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        # First of all: a checkpoint recomputes here, and plays the forward round again.
        topk_ids, mask = ctx.saved_tensors
        grad_rows = start_backward(RoutedRound(ctx.round, topk_ids, mask), grad_output)
        grad = grad_rows.view(ctx.shape) if ctx.needs_input_grad[0] else None
        return grad, None, None, None, None, None


def _refuse_inference_tensors(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.is_inference():
            raise MoEEpConfigError(
                f"{name} must not be made in inference mode in a round with gradients, where it is "
                "saved for backward: pass a clone()."
            )


def _can_record(communication: Rounds) -> bool:
    return communication._has_gradients and not torch.compiler.is_compiling()


def _requires_grad(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def require_usual_stream(communication: Rounds) -> None:
    """Autograd runs a backward on the stream of its forward, where nobody would wait for another
    one that the user chose for the communication."""
    chosen = communication._bootstrap.stream
    if chosen != 0 and torch.cuda.current_stream(communication.device).cuda_stream != chosen:
        raise MoEEpConfigError(
            "rounds with gradients must run with the bootstrap's stream as the current one, in "
            "forward and backward: call them under torch.cuda.stream(...)."
        )


def _refuse_library_memory(communication: Rounds, expert_output: Tensor) -> None:
    """The experts' last step may have saved what it wrote, and backward would overwrite it."""
    buffer = communication._combine_input_buffer()
    if buffer is None or buffer.numel() == 0:  # all memory of no element is at the same address
        return
    if expert_output.data_ptr() == buffer.data_ptr():
        raise MoEEpConfigError(
            "expert_output requires grad and is the memory of get_combine_input_buffer, which the "
            "backward overwrites: use a tensor of your own, or torch.no_grad()."
        )
