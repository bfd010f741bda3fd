"""Small random models of the families that are shown, and what a rank does with one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
EXPERTS, TOP_K, INTERMEDIATE = 8, 2, 16


def config_of(family: str) -> PretrainedConfig:
    if family == "qwen3_moe":
        return Qwen3MoeConfig(
            **SIZES,
            head_dim=8,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            moe_intermediate_size=INTERMEDIATE,
            norm_topk_prob=True,
        )
    if family == "mixtral":
        return MixtralConfig(
            **SIZES,
            num_local_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            intermediate_size=INTERMEDIATE,
        )
    if family == "deepseek_v3":
        return DeepseekV3Config(
            **{**SIZES, "num_key_value_heads": 4},
            n_routed_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=INTERMEDIATE,
            intermediate_size=INTERMEDIATE,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        )
    return GptOssConfig(
        **SIZES,
        head_dim=8,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        intermediate_size=INTERMEDIATE,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )


FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")


def save(family: str, folder: Path) -> PreTrainedModel:
    """Save a random model and return it."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)
    model.eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "bias" in name or "sinks" in name:
                value.uniform_(-0.5, 0.5)  # as initialised they would show nothing
    model.save_pretrained(folder)
    return model


def tokens(rank: int, length: int) -> Tensor:
    g = torch.Generator().manual_seed(100 + rank)
    return torch.randint(3, SIZES["vocab_size"], (2, length), generator=g)


@contextmanager
def read_slices() -> Iterator[dict[str, int]]:
    """Count the elements that are read of each tensor in a checkpoint."""
    import transformers.modeling_utils as loading

    read: dict[str, int] = {}
    opened = loading.safe_open

    class Counting:
        def __init__(self, inner: Any, name: str) -> None:
            self._inner, self._name = inner, name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self._inner, attribute)

        def __getitem__(self, index: Any) -> Tensor:
            value: Tensor = self._inner[index]
            read[self._name] = read.get(self._name, 0) + value.numel()
            return value

    class CountingFile:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._inner = opened(*args, **kwargs)

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self._inner, attribute)

        def __enter__(self) -> CountingFile:
            self._inner.__enter__()
            return self

        def __exit__(self, *what: Any) -> Any:
            return self._inner.__exit__(*what)

        def get_slice(self, name: str) -> Counting:
            return Counting(self._inner.get_slice(name), name)

    loading.safe_open = CountingFile
    try:
        yield read
    finally:
        loading.safe_open = opened
