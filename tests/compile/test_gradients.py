"""Are gradients of compiled layers those of eager ones, bit for bit, with rounds in step?

Values are small integers in float32: whatever Inductor fuses, the result is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from moe_ep import (
    GroupedGemmConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpLayer,
    SplitConfig,
    create_communication,
)
from tests.backends import ALL
from tests.compile.graph_memory import WatchedGraphs
from tests.conftest import RunOnRanks
from tests.ranks import RankContext
from tests.rounds.layers import random_inputs, random_state, small_integers

pytestmark = pytest.mark.multirank
BACKENDS = [backend.name for backend in ALL]
PARAMS = MoEEpCommParams(4, 2, 8, 16, dtype=torch.float32)
Model = Callable[..., Tensor]


def one_layer(comm: MoEEpCommunication, x: Tensor, ids: Tensor, w: Tensor, gate: Tensor) -> Tensor:
    received = comm.dispatch(x, ids, w)
    first, end = comm.first_local_expert, comm.first_local_expert + comm.num_local_experts
    is_local = (received.topk_ids >= first) & (received.topk_ids < end)
    assert received.topk_weights is not None
    weight = torch.where(is_local, received.topk_weights, 0).sum(1, keepdim=True)
    return comm.combine(received.hidden_states * weight * gate)


def chain(layers: int) -> Callable[[list[MoEEpCommunication]], Model]:
    def of(comms: list[MoEEpCommunication]) -> Model:
        def model(x: Tensor, ids: Tensor, w: Tensor, gate: Tensor) -> Tensor:
            for layer in range(layers):
                x = x + one_layer(comms[layer % len(comms)], x, ids, w, gate)
            return x

        return model

    return of


def side_by_side(comms: list[MoEEpCommunication]) -> Model:
    """No data orders these layers."""

    def model(x: Tensor, ids: Tensor, w: Tensor, gate: Tensor) -> Tensor:
        others = torch.where(ids < 0, ids, 3 - ids)
        return one_layer(comms[0], x, ids, w, gate) - one_layer(comms[1], x, others, w, gate) * 2

    return model


def of_experts_alone(comms: list[MoEEpCommunication]) -> Model:
    def model(x: Tensor, ids: Tensor, w: Tensor, gate: Tensor) -> Tensor:
        return one_layer(comms[0], x.detach(), ids, w.detach(), gate)

    return model


def of_nothing_here(comms: list[MoEEpCommunication]) -> Model:
    """Experts whose output hangs on nothing: gradients of their tokens are zeros, in step."""

    def model(x: Tensor, ids: Tensor, w: Tensor, gate: Tensor) -> Tensor:
        received = comms[0].dispatch(x, ids, w)
        return comms[0].combine(torch.ones_like(received.hidden_states)) + 0 * gate

    return model


def kept_late(comms: list[MoEEpCommunication]) -> Model:
    """What the first dispatch brought is used after the second round."""

    def model(x: Tensor, ids: Tensor, w: Tensor, gate: Tensor) -> Tensor:
        kept = comms[0].dispatch(x, ids, w).hidden_states
        y = comms[0].combine(kept * 2)
        return one_layer(comms[1], y, ids, w, gate) + kept.sum(0)

    return model


# What AOTAutograd makes of them, and, where there is something to reorder, Inductor.
COMPILERS = {"side by side": "inductor"}
PATTERNS: dict[str, Callable[[list[MoEEpCommunication]], Model]] = {
    "x1": chain(1),
    "x4": chain(4),
    "side by side": side_by_side,
    "experts alone": of_experts_alone,
    "nothing": of_nothing_here,
    "kept late": kept_late,
}


def gradients(model: Model, inputs: tuple[Tensor, Tensor, Tensor], times: int = 1) -> list[Any]:
    x, ids, weights = (t.clone() for t in inputs)
    gate = (small_integers((16,), 7) + 3).requires_grad_()
    x.requires_grad_()
    weights.requires_grad_()
    outputs = [model(x, ids, weights, gate) for _ in range(times)]
    for y in outputs:  # all forward passes first, as microbatches
        y.backward(small_integers(y.shape, 5))
    return [outputs[0].detach(), x.grad, weights.grad, gate.grad]


def two_communications(context: RankContext, backend: str) -> list[MoEEpCommunication]:
    """That share a workspace, where the backend has one."""
    how = {"timeout_sec": 100}
    return [create_communication(context.bootstrap(), PARAMS, backend, **how) for _ in range(2)]


@torch.enable_grad()
def compiled_as_eager(
    context: RankContext,
    backend: str,
    pattern: str,
    tokens: list[int],
    compiler: str,
    times: int = 1,
) -> dict[str, int]:
    """Body: compare, and return how many graphs there are and what was skipped."""
    torch._dynamo.reset()
    counters.clear()
    comms = two_communications(context, backend)
    model = PATTERNS[pattern](comms)
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    for step, n in enumerate(tokens):
        n = max(0, n - context.rank)
        inputs = random_inputs(PARAMS, n, small_integers, 10 * step + context.rank)
        wanted = gradients(model, inputs, times)
        # With aot_eager, torch 2.11 takes a saved number of tokens for a tensor to donate.
        with torch._functorch.config.patch(donated_buffer=False):
            got = gradients(compiled, inputs, times)
        for name, one, other in zip(("y", "x", "weights", "gate"), got, wanted, strict=True):
            same = one is other is None or (one is not None and torch.equal(one, other))
            assert same, f"{pattern}, n={n}: {name} is {one}, not {other}"
    for comm in comms:
        comm.destroy()
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "skips": counters["inductor"]["cudagraph_skips"],
    }


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_of_compiled_layers_are_those_of_eager_ones(
    ranks: RunOnRanks, pattern: str
) -> None:
    how = {"backend": "cake", "pattern": pattern, "tokens": [6], "times": 2}
    how["compiler"] = COMPILERS.get(pattern, "aot_eager")
    wanted = {"graphs": 1, "skips": 0}
    assert ranks(2, compiled_as_eager, **how) == [wanted, wanted]


def watched_training(context: RankContext, layers: int) -> tuple[int, int]:
    """Body: train one step, and return how many graphs ran and what they held of the workspace."""
    torch._dynamo.reset()
    comms = two_communications(context, "cake")
    graphs = WatchedGraphs(comms)
    compiled = torch.compile(chain(layers)(comms), fullgraph=True, backend=graphs.backend)
    with torch.enable_grad():
        gradients(compiled, random_inputs(PARAMS, 5, small_integers, context.rank))
    for comm in comms:
        comm.destroy()
    return graphs.runs, graphs.parts


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_no_graph_of_a_training_step_holds_a_part_of_the_workspace(
    ranks: RunOnRanks, layers: int
) -> None:
    """So that no compiler can clone it, and nothing that backward needs lies in it."""
    assert ranks(2, watched_training, layers=layers) == [(2, 0), (2, 0)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_token_counts_are_dynamic_after_one_recompile(ranks: RunOnRanks, backend: str) -> None:
    how = {"backend": backend, "pattern": "x1", "tokens": [6, 7, 4, 8, 6]}
    how["compiler"] = "inductor" if backend == "cake" else "aot_eager"
    wanted = {"graphs": 2, "skips": 0}
    assert ranks(2, compiled_as_eager, **how) == [wanted, wanted]


def without_gradients(context: RankContext) -> list[int]:
    """Body: a backend without ops of its own for compiled graphs."""
    torch._dynamo.reset()
    counters.clear()
    with create_communication(context.bootstrap(), PARAMS, "torch_dist") as comm:
        gate = small_integers((16,), 7)

        def model(x: Tensor, ids: Tensor, w: Tensor, output: Tensor) -> Tensor:
            y = one_layer(comm, x, ids, w, gate)
            return comm.combine(comm.dispatch(y, ids).hidden_states, output=output)

        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for n in (5, 7, 3):
            inputs = random_inputs(PARAMS, n, small_integers, context.rank)
            outputs = [torch.empty_like(inputs[0]) for _ in range(2)]
            model(*inputs, outputs[0])
            compiled(*inputs, outputs[1])
            assert torch.equal(*outputs)
    return [counters["stats"]["unique_graphs"], int(comm._traced is None)]


def test_other_backends_compile_without_gradients_too(ranks: RunOnRanks) -> None:
    assert ranks(2, without_gradients) == [[2, 1], [2, 1]]


@torch.enable_grad()
def checkpointed(context: RankContext) -> None:
    """Body: compiled layers, each a region that is recomputed in backward."""
    torch._dynamo.reset()
    with create_communication(context.bootstrap(), PARAMS, "cake", timeout_sec=100) as comm:
        layer = torch.compile(chain(1)([comm]), fullgraph=True, backend="aot_eager")

        def model(x: Tensor, ids: Tensor, w: Tensor, gate: Tensor) -> Tensor:
            for _ in range(2):
                y = checkpoint(layer, x, ids, w, gate, use_reentrant=False)
                assert isinstance(y, Tensor)
                x = y
            return x

        inputs = random_inputs(PARAMS, 5 + context.rank, small_integers, context.rank)
        wanted = gradients(chain(2)([comm]), inputs)
        for one, other in zip(gradients(model, inputs), wanted, strict=True):
            assert torch.equal(one, other)


def test_compiled_layers_can_be_checkpointed(ranks: RunOnRanks) -> None:
    ranks(2, checkpointed)


@torch.enable_grad()
def whole_layer(context: RankContext) -> int:
    """Body: a MoEEpLayer with grouped products, trained in one graph."""
    torch._dynamo.reset()
    counters.clear()
    params = MoEEpCommParams(4, 2, 8, 16)
    kernel = GroupedGemmConfig(intermediate_size=16, activation="relu", bias=True)
    layer = MoEEpLayer(context.bootstrap(), params, SplitConfig(comm="cake", kernel=kernel))
    layer.load_full_state_dict(random_state(params, kernel, small_integers))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)

    def train(run: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        layer.zero_grad()
        x, ids, _ = (t.clone() for t in inputs)
        weights = torch.ones(ids.shape).requires_grad_()
        y = run(x.requires_grad_(), ids, weights)
        y.backward(torch.ones_like(y))
        return [y.detach(), x.grad, weights.grad, *(p.grad for p in layer.parameters())]

    for n in (6, 7):
        inputs = random_inputs(params, n, small_integers, n + 10 * context.rank)
        for one, other in zip(train(compiled, inputs), train(layer, inputs), strict=True):
            assert torch.equal(one, other)
    layer.destroy()
    return counters["stats"]["unique_graphs"]


def test_a_layer_with_grouped_products_trains_in_one_graph(ranks: RunOnRanks) -> None:
    assert ranks(2, whole_layer) == [1, 1]
