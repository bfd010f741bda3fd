"""Does a MoEEpLayer take what it should, refuse the rest, and let others register kernels?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import (
    BootstrapConfig,
    GroupedGemmConfig,
    IdentityConfig,
    KernelConfig,
    MoEEpCommParams,
    MoEEpConfigError,
    MoEEpDispatchResult,
    MoEEpLayer,
    MoEEpStateError,
    MoEEpTensors,
    MoEWeightPack,
    SplitConfig,
    SplitKernel,
    available_split_kernels,
    register_split_kernel,
)
from tests.rounds.layers import plain_experts, random_inputs, random_state, small_integers

PARAMS = MoEEpCommParams(4, 2, 8, 16, dtype=torch.float32)
ALONE = BootstrapConfig(1, 0, device="cpu")
EXPERTS = GroupedGemmConfig(intermediate_size=8, activation="relu")


def alone(kernel: Any = EXPERTS, comm: Any = "torch_dist", **more: Any) -> MoEEpLayer:
    return MoEEpLayer(ALONE, PARAMS, SplitConfig(comm=comm, kernel=kernel), **more)


def test_a_backend_alone_means_the_identity() -> None:
    for backend in ("torch_dist", SplitConfig(comm="torch_dist")):
        layer = MoEEpLayer(ALONE, PARAMS, backend)
        assert layer.kernel.kernel_name == "identity"
        assert list(layer.parameters()) == []
        x = small_integers((3, 16), 0)
        assert torch.equal(layer(x, torch.tensor([[0, 1]] * 3)), x)


def test_weights_given_at_once_are_those_of_the_rank() -> None:
    state = random_state(PARAMS, EXPERTS, small_integers)
    layer = alone(weights=MoEWeightPack(state["w13"], state["w2"]))
    inputs = random_inputs(PARAMS, 5, small_integers, 3)
    assert torch.equal(layer(*inputs), plain_experts(EXPERTS, state, *inputs))
    assert torch.equal(layer(MoEEpTensors(*inputs)), layer(*inputs))


def test_fresh_experts_start_like_linear_layers() -> None:
    torch.manual_seed(0)
    layer = alone(GroupedGemmConfig(intermediate_size=64, bias=True))
    shapes = {name: tuple(value.shape) for name, value in layer.named_parameters()}
    assert shapes == {
        "kernel.w13": (4, 128, 16),
        "kernel.w2": (4, 16, 64),
        "kernel.w13_bias": (4, 128),
        "kernel.w2_bias": (4, 16),
    }
    for name, fan_in in (("w13", 16), ("w2", 64), ("w13_bias", 16), ("w2_bias", 64)):
        value = getattr(layer.kernel, name)
        assert 0.9 * fan_in**-0.5 < value.abs().max().item() <= fan_in**-0.5


def test_sums_are_unweighted_where_no_weights_are_given() -> None:
    state = random_state(PARAMS, EXPERTS, small_integers)
    layer = alone()
    layer.load_full_state_dict(state)
    x, ids, weights = random_inputs(PARAMS, 5, small_integers, 3)
    wanted = plain_experts(EXPERTS, state, x, ids, torch.ones_like(weights))
    assert torch.equal(layer(x, ids), wanted)


def test_rows_that_have_no_token_reach_no_gradient() -> None:
    """Rows past the last group are uninitialised memory, here NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    try:
        kernel = GroupedGemmConfig(intermediate_size=8, bias=True, alignment=4)
        layer = alone(kernel)
        x, ids, weights = random_inputs(PARAMS, 2, small_integers, 3)
        layer(x.requires_grad_(), ids, weights.requires_grad_()).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    for value in (x, weights, *layer.parameters()):
        assert value.grad is not None
        assert value.grad.isfinite().all()


@dataclass(frozen=True)
class DoublingConfig(KernelConfig):
    kernel_name = "doubling"
    factor: float = 2.0


class Doubling(SplitKernel):
    config_type = DoublingConfig

    def forward(self, received: MoEEpDispatchResult) -> Tensor:
        return received.hidden_states * self.config.factor


def test_kernels_of_others_are_found_by_name_and_config() -> None:
    register_split_kernel("doubling")(Doubling)
    try:
        assert "doubling" in available_split_kernels()
        x, ids = small_integers((3, 16), 0), torch.tensor([[0, 1]] * 3)
        assert torch.equal(alone("doubling")(x, ids), 2 * x)
        assert torch.equal(alone(DoublingConfig(factor=3.0))(x, ids), 3 * x)
        register_split_kernel("doubling")(Doubling)  # again
        with pytest.raises(MoEEpConfigError, match="name 'doubling' is taken by Doubling"):
            register_split_kernel("doubling")(type("Other", (Doubling,), {}))
        with pytest.raises(MoEEpConfigError, match=r"kernel_name must be 'other'"):
            register_split_kernel("other")(Doubling)
    finally:
        from moe_ep.experts import kernel

        del kernel._registry["doubling"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"intermediate_size": 0}, MoEEpConfigError, "intermediate_size must be"),
        ({"intermediate_size": 8.0}, TypeError, "intermediate_size must be an int"),
        ({"activation": "silu"}, MoEEpConfigError, r"activation must be one of .*swiglu.*'silu'"),
        ({"bias": 1}, TypeError, "bias must be a bool, got 1"),
        ({"alignment": 0}, MoEEpConfigError, "alignment must be"),
        ({"alignment": 8, "max_rows": 12}, MoEEpConfigError, "max_rows must be a multiple"),
    ],
)
def test_wrong_settings_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        GroupedGemmConfig(**{"intermediate_size": 8, **options})


def test_rows_must_be_what_grouped_products_take() -> None:
    with pytest.raises(MoEEpConfigError, match=r"intermediate_size must be a multiple of 4 "):
        alone(GroupedGemmConfig(intermediate_size=6))
    params = MoEEpCommParams(4, 2, 8, 18)
    with pytest.raises(MoEEpConfigError, match=r"hidden_size must be a multiple of 8 .*got 18"):
        MoEEpLayer(ALONE, params, SplitConfig(comm="torch_dist", kernel=EXPERTS))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(KeyError, match="unknown kernel 'triton'; registered are: grouped_gemm, id"):
        alone("triton")
    with pytest.raises(TypeError, match="kernel 'grouped_gemm' needs settings: pass a GroupedGemm"):
        alone("grouped_gemm")
    with pytest.raises(TypeError, match="kernel must be a name or a KernelConfig, got int"):
        alone(3)
    with pytest.raises(TypeError, match="weights must be a MoEWeightPack, got dict"):
        alone(weights={})
    state = random_state(PARAMS, EXPERTS, small_integers)
    with pytest.raises(MoEEpConfigError, match="kernel 'identity' has no weights"):
        alone(IdentityConfig(), weights=MoEWeightPack(state["w13"], state["w2"]))
    with pytest.raises(KeyError, match="unknown backend 'pigeon'"):
        alone(comm="pigeon")


def test_a_communication_must_be_the_layers_own_kind() -> None:
    layer = alone()
    other = MoEEpCommParams(4, 2, 8, 32, dtype=torch.float32)
    with pytest.raises(MoEEpConfigError, match="params must be those of the communication"):
        MoEEpLayer(ALONE, other, SplitConfig(comm=layer.communication, kernel=EXPERTS))


def test_weights_that_the_experts_have_no_place_for_are_refused() -> None:
    state = random_state(PARAMS, EXPERTS, small_integers)
    biases = torch.ones(4, 8), torch.ones(4, 16)
    with pytest.raises(MoEEpConfigError, match=r"weights has 'w13_bias', 'w2_bias'.*w13, w2"):
        alone(weights=MoEWeightPack(state["w13"], state["w2"], *biases))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([1.0], r"'w2' must be a torch.Tensor, got list"),
        (torch.zeros(4, 16, 8, dtype=torch.uint8), r"'w2' must be floating.*got torch.uint8"),
    ],
    ids=["a list", "quantised"],
)
def test_weights_must_be_tensors_of_a_floating_dtype(wrong: Any, message: str) -> None:
    state = random_state(PARAMS, EXPERTS, small_integers)
    with pytest.raises(TypeError, match=message):
        alone(weights=MoEWeightPack(state["w13"], wrong))
    with pytest.raises(TypeError, match=message):
        alone().load_full_state_dict({**state, "w2": wrong})


def test_weights_of_which_one_is_wrong_change_nothing() -> None:
    state = random_state(PARAMS, EXPERTS, small_integers)
    layer = alone()
    before = layer.kernel.w13.clone()
    with pytest.raises(MoEEpConfigError, match="'w2' must be"):
        layer.load_full_state_dict({**state, "w2": state["w2"][:2]})
    assert torch.equal(layer.kernel.w13, before)


@pytest.mark.parametrize(
    ("rank", "error"), [(1, MoEEpConfigError), (-1, MoEEpConfigError), ("0", TypeError)], ids=str
)
def test_weights_are_gathered_for_a_rank_of_the_group(rank: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="only_rank must be"):
        alone().full_state_dict(only_rank=rank)


def test_full_weights_must_be_complete_and_fit() -> None:
    state = dict(random_state(PARAMS, EXPERTS, small_integers))
    layer = alone()
    with pytest.raises(KeyError, match=r"state_dict has no 'w2'; the experts need: w13, w2"):
        layer.load_full_state_dict({"w13": state["w13"]})
    with pytest.raises(MoEEpConfigError, match=r"'w2' must be \[4, 16, 8\].*all 4 experts, got \["):
        layer.load_full_state_dict({**state, "w2": state["w2"][:2]})


def test_tensors_come_in_one_way_or_the_other() -> None:
    layer = alone("identity")
    x, ids, weights = random_inputs(PARAMS, 5, small_integers, 3)
    with pytest.raises(TypeError, match="topk_ids must be given with hidden_states"):
        layer(x)
    with pytest.raises(TypeError, match="topk_ids must be in the MoEEpTensors"):
        layer(MoEEpTensors(x, ids, weights), ids)


def test_destroy_is_idempotent_and_final() -> None:
    x, ids, _ = random_inputs(PARAMS, 5, small_integers, 3)
    with alone("identity", comm="cake") as layer:
        layer(x, ids)
    layer.destroy()
    with pytest.raises(MoEEpStateError, match="dispatch after destroy"):
        layer(x, ids)
