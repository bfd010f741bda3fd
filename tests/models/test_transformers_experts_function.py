"""Is moe_ep right as an experts implementation, with any transformers that has the interface?

A transformers with a registry of expert-parallel implementations would not ask for it, and loads
models in another way: here the registry is hidden, and experts are spread over the ranks by hand.
(`test_transformers.py` loads whole models, through the interface that the installed one has.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moe_ep import MoEEpConfigError
from tests.conftest import RunOnRanks
from tests.ranks import RankContext

transformers = pytest.importorskip("transformers", "5.17")

from moe_ep.integrations.transformers import register, registration  # noqa: E402
from tests.models.families import EXPERTS, TOP_K, config_of  # noqa: E402

SIZE = 2
# float32 numbers added in another order.
TOLERANCE = 1e-5


def experts_of(family: str) -> nn.Module:
    """Experts with random weights, the same at each call."""
    torch.manual_seed(0)
    config = config_of(family)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    experts: nn.Module = model.model.layers[-1].mlp.experts
    for value in experts.parameters():
        value.data.uniform_(-0.5, 0.5)
    return experts


def inputs_of(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rank)
    tokens = 4 + rank
    ids = torch.rand(tokens, EXPERTS, generator=g).topk(TOP_K).indices
    return torch.randn(tokens, 32, generator=g), ids, torch.rand(tokens, TOP_K, generator=g)


def run(experts: nn.Module, rank: int) -> list[Tensor]:
    """Return the output, and the gradients of tokens and weights."""
    x, ids, weights = inputs_of(rank)
    y = experts(x.requires_grad_(), ids, weights.requires_grad_())
    y.square().sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return [y.detach(), x.grad, weights.grad]


@torch.enable_grad()
def run_spread(context: RankContext, family: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Body: also return the gradients of all experts' parameters."""
    experts = experts_of(family)
    mesh = DeviceMesh.from_group(context.group, "cpu")
    for name, value in list(experts.named_parameters()):
        own = value.detach().chunk(SIZE)[context.rank].clone()
        spread = DTensor.from_local(own, mesh, [Shard(0)])
        setattr(experts, name, nn.Parameter(spread))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registration, "has_registry", lambda: False)
        known = register("cake", max_tokens_per_rank=8, timeout_sec=100, name="moe_ep")
    assert not known.has_registry
    config: Any = experts.config
    config._experts_implementation = known.name
    got = run(experts, context.rank)
    known.destroy()
    return got, {name: full(value.grad) for name, value in experts.named_parameters()}


def full(grad: Any) -> Tensor:
    whole: Tensor = grad.full_tensor()
    return whole


@pytest.mark.multirank
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_spread_experts_are_the_plain_ones(ranks: RunOnRanks, family: str) -> None:
    """gpt-oss: with biases, transposed, gates and ups in turn."""
    plain = experts_of(family)
    outcomes = ranks(SIZE, run_spread, family=family)
    with torch.enable_grad():
        wanted = [run(plain, rank) for rank in range(SIZE)]
    for (got, grads), want in zip(outcomes, wanted, strict=True):
        for one, other in zip(got, want, strict=True):
            assert torch.allclose(one, other, atol=TOLERANCE, rtol=TOLERANCE)
        for name, value in plain.named_parameters():
            assert torch.allclose(grads[name], value.grad, atol=TOLERANCE, rtol=TOLERANCE), name


def test_experts_that_are_not_spread_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "has_registry", lambda: False)
    experts: Any = experts_of("mixtral")
    experts.config._experts_implementation = register("cake", max_tokens_per_rank=8).name
    with pytest.raises(MoEEpConfigError, match="MixtralExperts are not spread over ranks"):
        experts(*inputs_of(0))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of a transformers that has the registry
def test_only_experts_parameters_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "has_registry", lambda: False)
    config = config_of("gpt_oss")
    options = register("cake", max_tokens_per_rank=8).load_options(config, ep_size=2)
    assert options["experts_implementation"] == "moe_ep"
    assert options["distributed_config"].tp_size == 2
    plan = options["config"].base_model_ep_plan
    assert set(plan.values()) == {"grouped_gemm"}
    assert all(".experts." in name for name in plan)
