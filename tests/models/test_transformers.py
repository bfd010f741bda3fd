"""Are expert-parallel models of transformers the plain ones: logits, generated text, training?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import MoEEpConfigError
from tests.conftest import RunOnRanks
from tests.problems import expect, problem_of
from tests.ranks import RankContext

transformers = pytest.importorskip("transformers", "5.17")

from moe_ep.integrations.transformers import ExpertParallelism, register  # noqa: E402
from tests.models.families import (  # noqa: E402
    EXPERTS,
    FAMILIES,
    config_of,
    read_slices,
    save,
    tokens,
)

pytestmark = [pytest.mark.multirank, pytest.mark.slow]
SIZE = 2
# float32 numbers added in another order; logits lie within +-50 here.
TOLERANCE = 2e-4


@torch.enable_grad()
def play(context: RankContext, folders: dict[str, str], **options: Any) -> dict[str, Any]:
    """Body: load each model, run it, let it write, and train it one step."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.distributed.init_process_group("gloo")
    experts = register("cake", max_tokens_per_rank=64, timeout_sec=100)
    got = {}
    for family, folder in folders.items():
        with read_slices() as read:
            model = load(folder, experts, **options)
        got[family] = {"read": read, **use(model, context)}
    got["workspaces"] = len({id(one._shared) for one in experts.communications})
    got["communications"] = len(experts.communications)
    experts.destroy()
    torch.distributed.destroy_process_group()
    return got


def load(folder: str, experts: ExpertParallelism, **options: Any) -> Any:
    how = experts.load_options(folder, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    return model.eval()


def use(model: Any, context: RankContext, shared_batch: bool = False) -> dict[str, Any]:
    ids = tokens(0 if shared_batch else context.rank, 7 if shared_batch else 5 + context.rank)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        text = model.generate(
            ids, max_new_tokens=6, do_sample=False, synced_gpus=True, attention_mask=ids > 0
        )
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    grads = {name: full_grad(value) for name, value in model.named_parameters()}
    return {"logits": logits, "text": text, "loss": loss.detach(), "grads": grads}


def full_grad(parameter: Any) -> Tensor | None:
    grad = parameter.grad
    if grad is None:
        return None
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: tmp_path_factory.mktemp(family) for family in FAMILIES}


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> dict[str, Any]:
    return {family: save(family, folder) for family, folder in folders.items()}


def test_expert_parallel_models_are_the_plain_ones(
    ranks: RunOnRanks, folders: dict[str, Path], plain: dict[str, Any]
) -> None:
    body = {"folders": {family: str(folder) for family, folder in folders.items()}}
    outcomes = ranks(SIZE, play, dedicated=True, **body)
    for outcome in outcomes:
        assert outcome.value is not None, outcome.error
    for rank, outcome in enumerate(outcomes):
        assert outcome.value["workspaces"] == outcome.value["communications"] == 1
        for family in FAMILIES:
            check(outcome.value[family], plain[family], f"{family}, rank {rank}", rank)
    for family in FAMILIES:
        check_gradients(outcomes, plain[family], family)


def check(got: dict[str, Any], model: Any, where: str, rank: int) -> None:
    ids = tokens(rank, 5 + rank)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        text = model.generate(ids, max_new_tokens=6, do_sample=False, attention_mask=ids > 0)
    error = (got["logits"] - wanted).abs().max().item()
    assert error <= TOLERANCE, f"{where}: logits differ by {error}"
    length = text.shape[1]
    assert torch.equal(got["text"][:, :length], text), where
    assert (got["text"][:, length:] == 0).all(), where  # padding while another rank went on
    of_experts = {name: n for name, n in got["read"].items() if ".experts." in name}
    full = sum(v.numel() for name, v in model.named_parameters() if ".experts." in name)
    assert sum(of_experts.values()) == full // SIZE, where


def check_gradients(outcomes: list[Any], model: Any, family: str) -> None:
    """Of the mean of the ranks' losses, as FSDP has it; without FSDP replicated parameters have
    their own rank's gradients, and experts the sum."""
    model.zero_grad()
    for rank in range(SIZE):
        ids = tokens(rank, 5 + rank)
        loss = model(ids, labels=ids, use_cache=False).loss
        assert torch.allclose(outcomes[rank].value[family]["loss"], loss, atol=1e-5)
        loss.backward()
    wanted = {name: value.grad for name, value in model.named_parameters()}
    grads = [outcome.value[family]["grads"] for outcome in outcomes]
    for name, value in wanted.items():
        if value is None:
            continue
        if grads[0][name].shape != value.shape:
            raise AssertionError(f"{family}: {name} has {grads[0][name].shape}, not {value.shape}")
        whole = sum_over_ranks(name, grads)
        scale = value.abs().max().clamp(min=1e-3)
        assert torch.allclose(whole / scale, value / scale, atol=1e-4), f"{family}: {name}"


def sum_over_ranks(name: str, grads: list[dict[str, Tensor]]) -> Tensor:
    if register_has_registry():
        return grads[0][name] * SIZE  # FSDP's mean, on all ranks alike
    return grads[0][name] if ".experts." in name else sum(g[name] for g in grads)  # type: ignore


def register_has_registry() -> bool:
    return register("cake", max_tokens_per_rank=1, name="asks").has_registry


@torch.enable_grad()
def play_shared_batch(context: RankContext, folder: str) -> dict[str, Any]:
    """Body: two ranks hold the same batch."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.distributed.init_process_group("gloo")
    experts = register("cake", max_tokens_per_rank=64, timeout_sec=100)
    got = use(load(folder, experts, tp_size=SIZE), context, shared_batch=True)
    experts.destroy()
    return got


@pytest.mark.skipif(not register_has_registry(), reason="needs transformers' registry (5.24)")
def test_ranks_that_hold_one_batch_get_what_the_plain_model_gives(
    ranks: RunOnRanks, folders: dict[str, Path], plain: dict[str, Any]
) -> None:
    folder, model = folders["qwen3_moe"], plain["qwen3_moe"]
    outcomes = ranks(SIZE, play_shared_batch, dedicated=True, folder=str(folder))
    ids = tokens(0, 7)
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    wanted = model(ids, use_cache=False).logits
    for outcome in outcomes:
        assert outcome.value is not None, outcome.error
        assert (outcome.value["logits"] - wanted).abs().max() <= TOLERANCE
        for name, value in model.named_parameters():
            grad = outcome.value["grads"][name]
            scale = value.grad.abs().max().clamp(min=1e-3)
            assert torch.allclose(grad / scale, value.grad / scale, atol=1e-4), name


def test_models_without_a_plan_are_named() -> None:
    experts = register("cake", max_tokens_per_rank=8)
    config = transformers.LlamaConfig()
    with pytest.raises(MoEEpConfigError, match=r"LlamaConfig .*'llama'.* has no expert-parallel"):
        experts.load_options(config, ep_size=2)


def test_modules_that_cannot_be_dispatched_to_are_named() -> None:
    from moe_ep.integrations.transformers.support import require_dispatchable

    problem = problem_of(require_dispatchable, torch.nn.Linear(2, 2))
    expect(problem, MoEEpConfigError, ["Linear has no num_experts"])
    experts = transformers.AutoModelForCausalLM.from_config(config_of("mixtral")).model.layers[0]
    require_dispatchable(experts.mlp.experts)
    assert experts.mlp.experts.num_experts == EXPERTS
    experts.mlp.experts.config._experts_implementation = "deepgemm_megamoe"
    problem = problem_of(require_dispatchable, experts.mlp.experts)
    expect(problem, MoEEpConfigError, ["MixtralExperts", "moves the tokens itself"])


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(MoEEpConfigError, match="max_tokens_per_rank must be"):
        register("cake", max_tokens_per_rank=0)
