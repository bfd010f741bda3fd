"""What are the gradients of a model that exchanges tokens? Of a rank's own, and of all ranks at
once with `moe_ep.reference` in place of the exchange.

Both run the same `run_model`. It sees an exchange of lists, one entry for each rank that plays
here: on a rank its own, in the oracle all of them, in one graph. So the oracle computes in the
defined order what `backward` must give on every rank, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_ep import MoEEpCommParams, MoEEpCommunication
from moe_ep.cake.kernels import active_rank_mask
from moe_ep.params import expert_partition
from moe_ep.reference import ReceivedRows, reference_combine, reference_dispatch

Tensors = Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A small model, its inputs on each rank, and how it is trained.

    topk_ids: for each layer, for each rank, [n, top_k].
    grads: what requires grad, of "x" (hidden_states), "w" (topk_weights), "gates" (the experts').
    losses: for each rank how its loss comes out of the outputs: "weighted", "sum" (an expanded
        gradient), "transposed" (one whose rows are not dense), "rows" (of the last layer only the
        received rows count), "nothing" (backward runs, and everything is zero).
    skips: whether experts without a token return zeros that hang on nothing.
    backwards: passes whose gradients are accumulated. retain: in one graph. interleaved: with all
        forward passes first, as microbatches in a pipeline.
    checkpointed: None, or use_reentrant of the activation checkpointing of each layer.
    """

    params: MoEEpCommParams
    hidden_states: Tensors
    topk_weights: Tensors
    topk_ids: Sequence[Tensors]
    grads: tuple[str, ...] = ("x", "w", "gates")
    losses: tuple[str, ...] = ("weighted",)
    skips: bool = True
    backwards: int = 1
    retain: bool = False
    interleaved: bool = False
    checkpointed: bool | None = None
    tokens_per_rank: int | None = None
    active_ranks: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ep_size(self) -> int:
        return len(self.hidden_states)

    def loss_of(self, rank: int) -> str:
        return self.losses[rank % len(self.losses)]


def random_training(
    params: MoEEpCommParams, num_tokens: Sequence[int], seed: int, layers: int = 1, **how: Any
) -> Training:
    """Return one with random values. Some ids repeat, some are padding, and some are no expert's at
    all but `invalid_expert_id`.
    """
    g = torch.Generator().manual_seed(seed)

    def random_ids(n: int) -> Tensor:
        ids = torch.randint(0, params.num_experts, (n, params.top_k), generator=g)
        chance = torch.rand(ids.shape, generator=g)
        ids = ids.where(chance > 0.1, -1 - ids).where(chance < 0.95, params.invalid_expert_id)
        return ids.to(torch.int32 if seed % 2 else torch.int64)

    return Training(
        params=params,
        hidden_states=[
            torch.randn(n, params.hidden_size, generator=g).to(params.token_dtype)
            for n in num_tokens
        ],
        topk_weights=[torch.randn(n, params.top_k, generator=g) for n in num_tokens],
        topk_ids=[[random_ids(n) for n in num_tokens] for _ in range(layers)],
        **how,
    )


class Exchange(Protocol):
    """Dispatch and combine for the ranks that play here."""

    ranks: Sequence[int]

    def dispatch(self, xs: Tensors, ids: Tensors, ws: Tensors) -> Sequence[ReceivedRows]: ...
    def combine(self, partials: Tensors) -> Tensors: ...


class OwnExchange:
    """A rank's own, over a real communication."""

    def __init__(self, one: Training, communication: MoEEpCommunication) -> None:
        self.ranks = [communication.ep_rank]
        self.communication = communication
        self._tokens_per_rank = one.tokens_per_rank
        self._mask: dict[str, Any] = {}
        if one.active_ranks is not None:
            mask = active_rank_mask(one.active_ranks, one.ep_size, communication.device)
            self._mask = {"active_rank_mask": mask}

    def dispatch(self, xs: Tensors, ids: Tensors, ws: Tensors) -> Sequence[ReceivedRows]:
        tokens_per_rank = self._tokens_per_rank
        where = {"runtime_max_tokens_per_rank": tokens_per_rank, **self._mask}
        return [self.communication.dispatch(xs[0], ids[0], ws[0], **where)]

    def combine(self, partials: Tensors) -> Tensors:
        return (self.communication.combine(partials[0], **self._mask),)


@dataclass(frozen=True)
class _Received:
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    tokens_per_rank: int
    recv_token_counts: Tensor


class ReferenceExchange:
    """That of all ranks at once."""

    def __init__(self, one: Training) -> None:
        self.one = one
        self.ranks = list(range(one.ep_size))
        self.capacity = one.tokens_per_rank or one.params.max_tokens_per_rank
        self._ids: Tensors = []

    def sent(self, ids: Tensors, rows: Tensors, weights: Tensors | None = None) -> Any:
        how = {"tokens_per_rank": self.capacity, "active_ranks": self.one.active_ranks}
        return reference_dispatch(self.one.params, self.one.ep_size, rows, ids, weights, **how)

    def summed(self, ids: Tensors, rows: Tensors) -> Tensors:
        """The sums per token of received rows of any width and dtype."""
        of = self.one.params
        width, dtype = rows[0].shape[1], rows[0].dtype
        params = MoEEpCommParams(of.num_experts, of.top_k, of.max_tokens_per_rank, width, dtype)
        how = {"tokens_per_rank": self.capacity, "active_ranks": self.one.active_ranks}
        return reference_combine(params, self.one.ep_size, ids, rows, **how)

    def dispatch(self, xs: Tensors, ids: Tensors, ws: Tensors) -> Sequence[ReceivedRows]:
        self._ids = ids
        got = _ReferenceDispatch.apply(self, ids, *xs, *ws)
        rows, weights = got[: len(xs)], got[len(xs) :]
        return [
            _Received(rows[r], sent.topk_ids, weights[r], self.capacity, sent.recv_token_counts)
            for r, sent in enumerate(self.sent(ids, [x.detach() for x in xs]))
        ]

    def combine(self, partials: Tensors) -> Tensors:
        combined: Tensors = _ReferenceCombine.apply(self, self._ids, *partials)
        return combined


class _ReferenceDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: ReferenceExchange, ids: Tensors, *given: Tensor) -> Any:
        ctx.exchange, ctx.ids = exchange, ids
        half = len(given) // 2
        sent = exchange.sent(ids, given[:half], given[half:])
        return *[s.hidden_states for s in sent], *[s.topk_weights for s in sent]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        half = len(grads) // 2
        sums = (ctx.exchange.summed(ctx.ids, part) for part in (grads[:half], grads[half:]))
        return None, None, *[one for part in sums for one in part]


class _ReferenceCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: ReferenceExchange, ids: Tensors, *partials: Tensor) -> Any:
        ctx.exchange, ctx.ids = exchange, ids
        return tuple(exchange.summed(ids, partials))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *[s.hidden_states for s in ctx.exchange.sent(ctx.ids, grads)]


def experts(one: Training, rank: int, received: ReceivedRows, gate: Tensor) -> Tensor:
    """A rank's experts: what autograd saves of them are the received rows and weights themselves.

    gate: [hidden_size], a parameter.
    """
    params, weights = one.params, received.topk_weights
    assert weights is not None
    first, count = expert_partition(params.num_experts, one.ep_size, rank)
    is_local = (received.topk_ids >= first) & (received.topk_ids < first + count)
    if one.skips and not is_local.any():
        return torch.zeros_like(received.hidden_states, requires_grad=False)
    parts = torch.where(is_local, weights * (received.topk_ids + 0.5), 0.0)
    factor: Tensor = sum(parts.split(1, dim=1), torch.zeros_like(parts[:, :1]))
    return _Scaled.apply(received.hidden_states, gate, factor.to(gate.dtype))


class _Scaled(torch.autograd.Function):
    """rows * gate * factor. Its sums go in one order on every device, unlike those of broadcasting.

    rows: [n, hidden_size]. gate: [hidden_size]. factor: [n, 1].
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gate: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(rows, gate, factor)
        return rows * gate * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        rows, gate, factor = ctx.saved_tensors
        of_gate = sum((grad * factor * rows).unbind(0), torch.zeros_like(gate))
        of_factor = sum((grad * gate * rows).split(1, dim=1), torch.zeros_like(factor))
        return grad * gate * factor, of_gate, of_factor


@dataclass(frozen=True)
class Trained:
    """What one rank got; gradients are None where autograd left none.

    gates: of each layer.
    """

    output: Tensor
    x: Tensor | None
    w: Tensor | None
    gates: list[Tensor | None]


def run_model(one: Training, exchange: Exchange) -> list[Trained]:
    """Train the model of the ranks that play here and return what each got."""
    ranks = exchange.ranks
    device = getattr(getattr(exchange, "communication", None), "device", "cpu")

    def leaf(name: str, value: Tensor) -> Tensor:
        return value.to(device, copy=True).requires_grad_(name in one.grads)

    xs = [leaf("x", one.hidden_states[r]) for r in ranks]
    ws = [leaf("w", one.topk_weights[r]) for r in ranks]
    columns = torch.arange(one.params.hidden_size, device=device)
    gate = (1 + columns % 3 * 0.375).to(one.params.token_dtype)
    gates = [[leaf("gates", gate + layer) for _ in ranks] for layer in range(len(one.topk_ids))]

    def layer_of(layer: int) -> Callable[..., Any]:
        ids = [one.topk_ids[layer][r].to(device) for r in ranks]

        def run(*given: Tensor) -> Any:
            received = exchange.dispatch(given[: len(ranks)], ids, given[len(ranks) :])
            of_ranks = zip(ranks, received, gates[layer], strict=True)
            return exchange.combine([experts(one, *each) for each in of_ranks]), received

        return run

    def forward() -> tuple[Tensor, Tensors]:
        ys: Tensors = xs
        received: Sequence[ReceivedRows] = []
        for layer in range(len(one.topk_ids)):
            run, before = layer_of(layer), ys
            if one.checkpointed is None or len(ranks) > 1:
                combined, received = run(*ys, *ws)
            else:
                how = {"use_reentrant": one.checkpointed}
                combined = checkpoint(lambda *g, run=run: run(*g)[0], *ys, *ws, **how)
            ys = [y + c for y, c in zip(before, combined, strict=True)]
        losses = [
            _loss(one.loss_of(r), y, combined[i], received[i] if received else None)
            for i, (r, y) in enumerate(zip(ranks, ys, strict=True))
            if one.active_ranks is None or r in one.active_ranks
        ]
        return torch.stack(losses).sum(), ys

    waiting = [forward() for _ in range(one.backwards if one.interleaved else 1)]
    for index in range(one.backwards):
        if index > 0 and not (one.retain or one.interleaved):
            waiting.append(forward())
        loss, outputs = waiting[0 if one.retain else index]
        loss.backward(retain_graph=one.retain)
    return [
        Trained(
            outputs[i].detach().cpu(),
            _cpu(xs[i].grad),
            _cpu(ws[i].grad),
            [_cpu(of_layer[i].grad) for of_layer in gates],
        )
        for i in range(len(ranks))
    ]


def _loss(kind: str, y: Tensor, combined: Tensor, received: ReceivedRows | None) -> Tensor:
    if kind == "sum":
        return y.sum().float()
    if kind == "nothing":
        return (y * 0).float().sum()
    if kind == "rows":
        # Of combine's output nothing counts: only dispatch's node is reached.
        assert received is not None
        assert received.topk_weights is not None
        return received.hidden_states.float().square().sum() + received.topk_weights.sum()
    coefficients = torch.arange(y.numel(), device=y.device).view(y.shape) % 7 - 2.75
    if kind == "transposed":
        return (y.float().t() * coefficients.t().contiguous()).sum()
    return (y.float() * coefficients).sum()


def _cpu(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.cpu().clone()
