"""The ops behind `moe_ep.compiled_round`: rounds without a workspace in their schemas, and their
autograd formulas.

Their communication is given by its name; `link` orders them for autograd: where dispatch has a
node, combine has one. They are registered as ordered effects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from moe_ep.autograd import require_usual_stream
from moe_ep.backward_round import (
    ForwardRound,
    RoutedRound,
    finish_backward,
    start_backward,
    weight_columns_per_round,
)
from moe_ep.dispatch_result import copy_of
from moe_ep.errors import MoEEpConfigError
from moe_ep.graph_names import find
from moe_ep.inductor_order import teach_inductor

# ---------------------------------------------------------------- forward


@torch.library.custom_op("moe_ep::round_dispatch", mutates_args=())
def _round_dispatch(
    hidden_states: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    hidden_states_scale: Tensor | None,
    eplb_local_stats: Tensor | None,
    active_rank_mask: Tensor | None,
    name: str,
    ep_size: int,
    tokens_per_rank: int,
    rows_need_grad: bool,
    weights_need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    communication = find(name)
    if rows_need_grad or weights_need_grad:
        require_usual_stream(communication)
    if weights_need_grad:
        weight_columns_per_round(communication)
    with torch.no_grad():
        got = communication._run_dispatch(
            hidden_states,
            topk_ids,
            topk_weights,
            hidden_states_scale=hidden_states_scale,
            runtime_max_tokens_per_rank=tokens_per_rank,
            eplb_local_stats=eplb_local_stats,
            active_rank_mask=active_rank_mask,
        )
        with communication._on_stream():
            got = copy_of(got)
    nothing = torch.empty(0, device=hidden_states.device)
    return (
        got.hidden_states,
        got.topk_ids,
        nothing if got.topk_weights is None else got.topk_weights,
        got.recv_token_counts,
        nothing.clone() if got.hidden_states_scale is None else got.hidden_states_scale,
        nothing.clone() if got.eplb_gathered_stats is None else got.eplb_gathered_stats,
        nothing.clone(),
    )


@_round_dispatch.register_fake
def _(
    hidden_states: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    hidden_states_scale: Tensor | None,
    eplb_local_stats: Tensor | None,
    active_rank_mask: Tensor | None,
    name: str,
    ep_size: int,
    tokens_per_rank: int,
    rows_need_grad: bool,
    weights_need_grad: bool,
) -> tuple[Tensor, ...]:
    teach_inductor(*_OVERLOADS)  # here, since importing it takes a second
    num_rows, top_k = ep_size * tokens_per_rank, topk_ids.shape[1]

    def rows_like(given: Tensor | None) -> Tensor:
        if given is None:
            return torch.empty(0, device=topk_ids.device)
        return given.new_empty((num_rows, given.shape[1]))

    stats = torch.empty(0, device=topk_ids.device)
    if eplb_local_stats is not None:
        stats = eplb_local_stats.new_empty((ep_size, eplb_local_stats.shape[0]))
    return (
        rows_like(hidden_states),
        topk_ids.new_empty((num_rows, top_k), dtype=torch.int32),
        rows_like(topk_weights),
        topk_ids.new_empty((ep_size,), dtype=torch.int32),
        rows_like(hidden_states_scale),
        stats,
        torch.empty(0, device=topk_ids.device),
    )


@torch.library.custom_op("moe_ep::round_combine", mutates_args=())
def _round_combine(
    expert_output: Tensor,
    link: Tensor,
    topk_ids: Tensor,
    active_rank_mask: Tensor | None,
    name: str,
    ep_size: int,
    num_tokens: int,
    tokens_per_rank: int,
    has_weights: bool,
    rows_need_grad: bool,
    weights_need_grad: bool,
) -> Tensor:
    communication = find(name)
    with torch.no_grad():
        return communication._run_combine(
            expert_output, output=None, active_rank_mask=active_rank_mask
        )


@_round_combine.register_fake
def _(
    expert_output: Tensor,
    link: Tensor,
    topk_ids: Tensor,
    active_rank_mask: Tensor | None,
    name: str,
    ep_size: int,
    num_tokens: int,
    tokens_per_rank: int,
    has_weights: bool,
    rows_need_grad: bool,
    weights_need_grad: bool,
) -> Tensor:
    return expert_output.new_empty((num_tokens, expert_output.shape[1]))


# ---------------------------------------------------------------- backward


@torch.library.custom_op("moe_ep::round_combine_backward", mutates_args=())
def _round_combine_backward(
    grad_output: Tensor,
    topk_ids: Tensor,
    active_rank_mask: Tensor | None,
    name: str,
    ep_size: int,
    tokens_per_rank: int,
    has_weights: bool,
    rows_need_grad: bool,
    weights_need_grad: bool,
) -> tuple[Tensor, Tensor]:
    communication, num_tokens = find(name), topk_ids.shape[0]
    flags = (has_weights, rows_need_grad, weights_need_grad)
    one = ForwardRound(communication, num_tokens, tokens_per_rank, *flags)
    with torch.no_grad():
        grad_rows = start_backward(RoutedRound(one, topk_ids, active_rank_mask), grad_output)
    return grad_rows, torch.empty(0, device=topk_ids.device)


@_round_combine_backward.register_fake
def _(
    grad_output: Tensor,
    topk_ids: Tensor,
    active_rank_mask: Tensor | None,
    name: str,
    ep_size: int,
    tokens_per_rank: int,
    has_weights: bool,
    rows_need_grad: bool,
    weights_need_grad: bool,
) -> tuple[Tensor, Tensor]:
    rows = grad_output.new_empty((ep_size * tokens_per_rank, grad_output.shape[1]))
    return rows, torch.empty(0, device=topk_ids.device)


@torch.library.custom_op("moe_ep::round_dispatch_backward", mutates_args=())
def _round_dispatch_backward(
    grad_rows: Tensor | None,
    grad_weights: Tensor | None,
    grad_link: Tensor | None,
    topk_ids: Tensor,
    active_rank_mask: Tensor | None,
    name: str,
    tokens_per_rank: int,
    hidden_size: int,
    dtype: torch.dtype,
    has_weights: bool,
    rows_need_grad: bool,
    weights_need_grad: bool,
) -> tuple[Tensor, Tensor]:
    communication, num_tokens = find(name), topk_ids.shape[0]
    flags = (has_weights, rows_need_grad, weights_need_grad)
    one = ForwardRound(communication, num_tokens, tokens_per_rank, *flags)
    routed = RoutedRound(one, topk_ids, active_rank_mask)
    with torch.no_grad():
        of_rows, of_weights = finish_backward(
            routed, grad_rows, grad_weights, is_open=grad_link is not None
        )
    nothing = torch.empty(0, device=topk_ids.device)
    return (
        nothing if of_rows is None else of_rows,
        nothing.clone() if of_weights is None else of_weights,
    )


@_round_dispatch_backward.register_fake
def _(
    grad_rows: Tensor | None,
    grad_weights: Tensor | None,
    grad_link: Tensor | None,
    topk_ids: Tensor,
    active_rank_mask: Tensor | None,
    name: str,
    tokens_per_rank: int,
    hidden_size: int,
    dtype: torch.dtype,
    has_weights: bool,
    rows_need_grad: bool,
    weights_need_grad: bool,
) -> tuple[Tensor, Tensor]:
    nothing = torch.empty(0, device=topk_ids.device)
    of_rows = topk_ids.new_empty((topk_ids.shape[0], hidden_size), dtype=dtype)
    of_weights = topk_ids.new_empty(topk_ids.shape, dtype=torch.float32)
    return (
        of_rows if rows_need_grad else nothing,
        of_weights if weights_need_grad else torch.empty_like(nothing),
    )


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden_states, topk_weights, topk_ids, _, _, mask, name, _, tokens_per_rank, *needs = inputs
    if any(wants and not has for wants, has in zip(ctx.needs_input_grad[:2], needs, strict=True)):
        raise MoEEpConfigError(
            "hidden_states or topk_weights requires grad, but the graph was exported with inputs "
            "that do not: export it with such inputs, or call it under torch.no_grad()."
        )
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(topk_ids, mask)
    ctx.needs = (topk_weights is not None, *needs)
    ctx.where = (name, tokens_per_rank, hidden_states.shape[1], hidden_states.dtype)


def _backward_of_dispatch(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_rows, _, grad_weights, *_, grad_link = grads
    _, rows_need_grad, weights_need_grad = ctx.needs
    of_rows, of_weights = torch.ops.moe_ep.round_dispatch_backward(
        grad_rows, grad_weights, grad_link, *ctx.saved_tensors, *ctx.where, *ctx.needs
    )
    wanted = (of_rows if rows_need_grad else None, of_weights if weights_need_grad else None)
    return *wanted, *[None] * (len(ctx.needs_input_grad) - 2)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, topk_ids, mask, name, ep_size, _, tokens_per_rank, *flags = inputs
    ctx.save_for_backward(topk_ids, mask)
    ctx.where = (name, ep_size, tokens_per_rank)
    ctx.flags = flags


def _backward_of_combine(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    grad_rows, grad_link = torch.ops.moe_ep.round_combine_backward(
        grad_output, *ctx.saved_tensors, *ctx.where, *ctx.flags
    )
    needs_rows, needs_link = ctx.needs_input_grad[:2]
    grads = (grad_rows if needs_rows else None, grad_link if needs_link else None)
    return *grads, *[None] * (len(ctx.needs_input_grad) - 2)


_round_dispatch.register_autograd(_backward_of_dispatch, setup_context=_save_dispatch)
_round_combine.register_autograd(_backward_of_combine, setup_context=_save_combine)
_OVERLOADS = tuple(
    op._opoverload
    for op in (_round_dispatch, _round_combine, _round_combine_backward, _round_dispatch_backward)
)
for _overload in _OVERLOADS:
    _register_effectful_op(_overload, _EffectType.ORDERED)
