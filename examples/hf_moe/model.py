"""A small Qwen3-MoE with random weights, its tokenizer, and English text; all made locally."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_moe.options import MAX_TOKENS_PER_RANK, NUM_EXPERTS

WEIGHTS_SEED = 0


def model_config(num_layers: int) -> Qwen3MoeConfig:
    """Every layer is a MoE layer, 8 experts for each token."""
    return Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=1024,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        moe_intermediate_size=128,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=MAX_TOKENS_PER_RANK,
        initializer_range=0.05,  # wide enough for logits that differ clearly from token to token
    )


def saved_model(num_layers: int, cache: Path) -> Path:
    """The folder in `cache` with the model and its tokenizer; made there if it is missing."""
    config = model_config(num_layers)
    digest = hashlib.sha256(f"{config.to_json_string()} {WEIGHTS_SEED}".encode()).hexdigest()
    folder = cache / f"qwen3_moe-{num_layers}-layers-{digest[:12]}"
    if folder.exists():
        return folder
    unfinished = cache / f"unfinished-{os.getpid()}"
    unfinished.mkdir(parents=True, exist_ok=True)
    try:
        torch.manual_seed(WEIGHTS_SEED)
        Qwen3MoeForCausalLM(config).save_pretrained(unfinished)
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(
            english_text().splitlines(), vocab_size=config.vocab_size, show_progress=False
        )
        tokenizer.save(str(unfinished / "tokenizer.json"))
        try:
            unfinished.rename(folder)  # so a folder of this name is always complete
        except OSError:
            if not folder.exists():  # else another run was faster
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def english_text() -> str:
    """The chapters of the Python reference that the standard library ships for `help()`."""
    return "\n".join(topics[name] for name in sorted(topics))


def input_ids(model_folder: Path, tokens_per_rank: int, rank: int, ranks: int) -> Tensor:
    """Rank `rank`'s own piece of the text: int64 [1, tokens_per_rank].

    Raises ValueError if the text is too short for all ranks.
    """
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    ids = tokenizer.encode(english_text()).ids
    if tokens_per_rank * ranks > len(ids):
        raise ValueError(
            f"the text has {len(ids)} tokens, {ranks} ranks with --tokens {tokens_per_rank} need "
            f"{tokens_per_rank * ranks}: give fewer tokens"
        )
    first = rank * tokens_per_rank
    return torch.tensor([ids[first : first + tokens_per_rank]])
