"""Is a MoEEpLayer its experts, whatever ranks own them? Forward, gradients, weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import (
    GroupedGemmConfig,
    IdentityConfig,
    MoEEpCommParams,
    MoEEpConfigError,
    MoEEpLayer,
    MoEEpTensors,
    SplitConfig,
)
from moe_ep.reference import expert_owners
from tests.backends import Backend, every_backend, on_the_cpu
from tests.bits import assert_same_bits
from tests.conftest import RunOnRanks
from tests.problems import expect, problem_of
from tests.ranks import RankContext
from tests.rounds.layers import (
    State,
    plain_experts,
    random_inputs,
    random_state,
    small_integers,
)

pytestmark = pytest.mark.multirank
FP32, BF16 = torch.float32, torch.bfloat16


def layer_of(
    context: RankContext, backend: str, params: MoEEpCommParams, kernel: object, state: State
) -> MoEEpLayer:
    split = SplitConfig(comm=backend, kernel=kernel)
    layer = MoEEpLayer(context.bootstrap(), params, split)
    if state:
        layer.load_full_state_dict(state)
    return layer


@torch.enable_grad()
def train(
    context: RankContext,
    backend: str,
    params: MoEEpCommParams,
    kernel: GroupedGemmConfig,
    state: State,
    inputs: Sequence[tuple[Tensor, Tensor, Tensor]],
) -> tuple[dict[str, Tensor], State]:
    """Body: output, gradients of a rank's tokens and weights, gradients of its experts."""
    layer = layer_of(context, backend, params, kernel, state)
    device = layer.communication.device
    x, ids, weights = (t.to(device) for t in inputs[context.rank])
    x.requires_grad_()
    weights.requires_grad_()
    y = layer(x, ids, weights)
    y.backward(small_integers(y.shape, seed=9).to(y))
    got = {"y": y.detach(), "x": x.grad, "weights": weights.grad}
    no_experts = layer.communication.num_local_experts == 0
    grads = {
        name: (torch.empty_like(value) if no_experts else value.grad).cpu()
        for name, value in layer.kernel.named_parameters()
    }
    layer.destroy()
    return {name: value.cpu() for name, value in got.items()}, grads


def expected(
    kernel: GroupedGemmConfig, state: State, inputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[dict[str, Tensor], State]:
    x, ids, weights = (t.clone() for t in inputs)
    x.requires_grad_()
    weights.requires_grad_()
    leaves = {name: value.clone().requires_grad_() for name, value in state.items()}
    y = plain_experts(kernel, leaves, x, ids, weights)
    y.backward(small_integers(y.shape, seed=9).to(y))
    wanted = {"y": y.detach(), "x": x.grad, "weights": weights.grad}
    grads = {name: torch.zeros_like(v) if v.grad is None else v.grad for name, v in leaves.items()}
    return wanted, grads  # type: ignore[return-value]


CASES: dict[str, dict[str, Any]] = {
    "two ranks": {"size": 2, "experts": 4, "tokens": [5, 3]},
    "uneven shares": {"size": 4, "experts": 10, "tokens": [3, 8, 1, 4]},
    "a rank without tokens": {"size": 2, "experts": 6, "tokens": [0, 7]},
    "no tokens at all": {"size": 2, "experts": 6, "tokens": [0, 0]},
    "ranks without experts": {"size": 4, "experts": 2, "tokens": [4, 2, 0, 5]},
}


@every_backend
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_layer_and_its_gradients_are_those_of_plain_experts(
    ranks: RunOnRanks, backend: Backend, device: str, case: str, bias: bool
) -> None:
    """Small integers and relu: every product and sum is exact in float32."""
    size, num_experts, tokens = (CASES[case][name] for name in ("size", "experts", "tokens"))
    params = MoEEpCommParams(num_experts, 2, 8, 16, dtype=FP32)
    kernel = GroupedGemmConfig(intermediate_size=8, activation="relu", bias=bias)
    state = random_state(params, kernel, small_integers)
    inputs = [random_inputs(params, n, small_integers, seed) for seed, n in enumerate(tokens)]
    body = {"params": params, "kernel": kernel, "state": state, "inputs": inputs}
    got = ranks(size, train, device=device, backend=backend.name, **body)
    of_ranks = [expected(kernel, state, mine) for mine in inputs]
    for rank, (mine, _) in enumerate(got):
        for name, value in of_ranks[rank][0].items():
            assert torch.equal(mine[name], value), f"{name} on rank {rank}"
    for name in state:
        own = torch.cat([grads[name] for _, grads in got])
        assert torch.equal(own, sum(grads[name] for _, grads in of_ranks)), name


@on_the_cpu
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_activations_are_within_rounding_of_float64(
    ranks: RunOnRanks, backend: Backend, device: str, activation: str, dtype: torch.dtype
) -> None:
    """Four roundings to the dtype (both products, activation, partial row), and those of the sums:
    each a relative error of eps / 2 of numbers below 8."""
    params = MoEEpCommParams(6, 3, 8, 32, dtype=dtype)
    kernel = GroupedGemmConfig(intermediate_size=48, activation=activation, bias=True)
    state = random_state(params, kernel, lambda shape, seed: _random(shape, seed) / 8)
    inputs = [random_inputs(params, n, _random, n) for n in (8, 5)]
    body = {"params": params, "kernel": kernel, "state": state, "inputs": inputs}
    got = ranks(2, train, device=device, backend=backend.name, **body)
    exact = {name: value.to(dtype).double() for name, value in state.items()}
    for (mine, _), (x, ids, weights) in zip(got, inputs, strict=True):
        wanted = plain_experts(kernel, exact, x.double(), ids, weights.double())
        error = (mine["y"].double() - wanted).abs().max().item()
        assert error <= 8 * 4 * torch.finfo(dtype).eps, error
        assert all(value.isfinite().all() for value in mine.values())


def _random(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def identity(context: RankContext, backend: str, inputs: Any) -> list[Tensor]:
    """Body: what comes of tokens, given in each of the ways."""
    params = MoEEpCommParams(6, 3, 8, 16)
    layer = layer_of(context, backend, params, "identity", {})
    device = layer.communication.device
    x, ids, weights = (t.to(device) for t in inputs[context.rank])
    output = torch.empty_like(x)
    same = layer(MoEEpTensors(x, ids, weights, output=output))
    assert same is output
    return [t.cpu() for t in (layer(x, ids), layer(x, ids, weights), output)]


@every_backend
def test_identity_gives_each_token_once_for_each_rank_that_it_reaches(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    params = MoEEpCommParams(6, 3, 8, 16)
    inputs = [random_inputs(params, n, small_integers, n) for n in (8, 3)]
    got = ranks(2, identity, device=device, backend=backend.name, inputs=inputs)
    owners = expert_owners(6, 2)
    for mine, (x, ids, _) in zip(got, inputs, strict=True):
        reached = [len({int(owners[i]) for i in row if i >= 0}) for row in ids.tolist()]
        for output in mine:
            assert_same_bits(output, x * torch.tensor(reached).view(-1, 1))


def several_layers(context: RankContext, backend: str, state: State, inputs: Any) -> Any:
    """Body: two layers in turn, one of them over the communication of the other."""
    params = MoEEpCommParams(6, 2, 8, 16, dtype=FP32)
    kernel = GroupedGemmConfig(intermediate_size=8, activation="relu")
    first = layer_of(context, backend, params, kernel, state)
    second = layer_of(context, backend, params, kernel, state)
    third = MoEEpLayer(
        context.bootstrap(), params, SplitConfig(comm=second.communication, kernel=kernel)
    )
    third.load_full_state_dict(state)
    shared = first.communication._shared
    assert shared is second.communication._shared
    assert shared is third.communication._shared
    x, ids, weights = (t.to(first.communication.device) for t in inputs[context.rank])
    outputs = [layer(x, ids, weights).cpu() for layer in (first, second, third, first)]
    third.destroy()  # the communication is not its own
    outputs.append(second(x, ids, weights).cpu())
    second.destroy()
    first.destroy()
    return outputs


@every_backend
def test_layers_share_one_workspace(ranks: RunOnRanks, backend: Backend, device: str) -> None:
    if backend.name == "torch_dist":
        pytest.skip("torch_dist has no workspace to share")
    params = MoEEpCommParams(6, 2, 8, 16, dtype=FP32)
    kernel = GroupedGemmConfig(intermediate_size=8, activation="relu")
    state = random_state(params, kernel, small_integers)
    inputs = [random_inputs(params, n, small_integers, n) for n in (8, 3)]
    got = ranks(2, several_layers, device=device, backend=backend.name, state=state, inputs=inputs)
    for rank, outputs in enumerate(got):
        wanted = plain_experts(kernel, state, *inputs[rank])
        assert all(torch.equal(output, wanted) for output in outputs)


def weights_there_and_back(context: RankContext, state: State) -> tuple[State, State, State | None]:
    """Body: what a rank holds of a full state dict, and what all hold together."""
    params = MoEEpCommParams(5, 2, 8, 16)
    kernel = GroupedGemmConfig(intermediate_size=8, bias=True)
    layer = layer_of(context, "torch_dist", params, kernel, {})
    layer.load_full_state_dict({f"mlp.{name}": t for name, t in state.items()}, prefix="mlp.")
    local = {name: value.detach() for name, value in layer.state_dict().items()}
    return local, layer.full_state_dict(), layer.full_state_dict(only_rank=1)


def test_weights_are_loaded_by_rank_and_gathered_back(ranks: RunOnRanks) -> None:
    params = MoEEpCommParams(5, 2, 8, 16)
    kernel = GroupedGemmConfig(intermediate_size=8, bias=True)
    state = random_state(params, kernel, _random)
    first = 0
    for rank, (local, full, at_one) in enumerate(ranks(3, weights_there_and_back, state=state)):
        count = (2, 2, 1)[rank]
        assert set(full) == set(state)
        assert (at_one is None) == (rank != 1)
        for name, value in state.items():
            assert_same_bits(local[f"kernel.{name}"], value[first : first + count])
            assert_same_bits(full[name], value)
            assert at_one is None or torch.equal(at_one[name], value)
        first += count


def wrong_kernels(context: RankContext) -> list[Any]:
    """Body: what a rank hears of another's mistake, or of its own."""
    params = MoEEpCommParams(5, 2, 8, 16)
    odd = context.rank == 1
    problems = []
    for kernel in (
        GroupedGemmConfig(intermediate_size=8 if odd else 16),
        GroupedGemmConfig(intermediate_size=12 if odd else 8),
        "triton" if odd else "identity",
        IdentityConfig() if odd else GroupedGemmConfig(intermediate_size=8),
    ):
        split = SplitConfig(comm="torch_dist", kernel=kernel)
        problems.append(problem_of(MoEEpLayer, context.bootstrap(), params, split))
    return problems


def test_ranks_that_disagree_about_the_experts_are_told_together(ranks: RunOnRanks) -> None:
    for sizes, odd_size, unknown, kinds in ranks(2, wrong_kernels):
        words = ["the ranks disagree about the experts", "intermediate_size=8", "rank 0", "=16"]
        expect(sizes, MoEEpConfigError, words)
        words = ["creating the experts failed", "rank 1: intermediate_size must be a multiple of 8"]
        expect(odd_size, MoEEpConfigError, words)
        words = ["rank 1: unknown kernel 'triton'; registered are: grouped_gemm, identity"]
        expect(unknown, KeyError, words)
        expect(kinds, MoEEpConfigError, ["IdentityConfig", "GroupedGemmConfig"])
