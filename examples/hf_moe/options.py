"""Which options does hf_moe_inference.py take, and which of them cannot work here?"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from pathlib import Path

import torch.distributed as dist

from hf_moe.places import reason_against_gpus
from moe_ep import available_communication_backends

NUM_EXPERTS = 32
MAX_TOKENS_PER_RANK = 4096
TRANSFORMERS_NEEDED = (5, 24)  # the first with a registry of expert-parallel implementations
DEFAULT_CACHE = Path(__file__).resolve().parents[2] / "build" / "hf_moe_inference"


def parse_options() -> argparse.Namespace:
    """The options of the command line, checked; exits with code 2 if they cannot work."""
    parser = argparse.ArgumentParser(
        description="Run a small Qwen3-MoE expert-parallel through moe_ep; check it and time it."
    )
    parser.add_argument(
        "--backend",
        default="auto",
        choices=["auto", *available_communication_backends()],
        help="what moves the tokens (default: the best one that works here)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=int(os.environ.get("WORLD_SIZE", "4")),
        help=f"processes that share the {NUM_EXPERTS} experts (default: 4)",
    )
    parser.add_argument("--layers", type=int, default=4, help="MoE layers (default: 4)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per rank (default: 256)")
    parser.add_argument("--repeats", type=int, default=5, help="timed forward passes (default: 5)")
    parser.add_argument(
        "--device",
        default="auto",
        choices=["auto", "cpu", "cuda"],
        help="auto is cuda if the ranks can run on the GPUs here (also several on one), else cpu",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=DEFAULT_CACHE,
        help="folder that keeps the model for the next run (default: %(default)s)",
    )
    options = parser.parse_args()
    if options.device == "auto":
        reason = reason_against_gpus(options.ranks, options.backend)
        options.device = "cuda" if reason is None else "cpu"
    elif options.device == "cuda":
        reason = reason_against_gpus(options.ranks, options.backend)
        if reason is not None:
            parser.error(f"--device cuda: {reason}")
    problem = _problem_with(options) or problem_with_packages()
    if problem:
        parser.error(problem)
    return options


def problem_with_packages() -> str | None:
    """Why transformers cannot be used here, or None."""
    versions = {}
    for package in ("transformers", "accelerate"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f'{package} is not installed; install it with: pip install "moe_ep[hf]"'
    major, minor = (int(number) for number in versions["transformers"].split(".")[:2])
    if (major, minor) < TRANSFORMERS_NEEDED:
        needed = ".".join(map(str, TRANSFORMERS_NEEDED))
        return (
            f"transformers {needed} or later is needed, found {versions['transformers']}; "
            'install it with: pip install "moe_ep[hf]"'
        )
    return None


def _problem_with(options: argparse.Namespace) -> str | None:
    ranks = options.ranks
    if dist.is_torchelastic_launched() and ranks != int(os.environ["WORLD_SIZE"]):
        return f"--ranks is {ranks}, but torchrun started {os.environ['WORLD_SIZE']}: leave it out"
    if ranks < 2 or NUM_EXPERTS % ranks:
        return f"--ranks must be 2 or more and divide the {NUM_EXPERTS} experts, got {ranks}"
    if options.layers < 1:
        return f"--layers must be 1 or more, got {options.layers}"
    if not 1 <= options.tokens <= MAX_TOKENS_PER_RANK:
        return f"--tokens must be 1..{MAX_TOKENS_PER_RANK}, got {options.tokens}"
    if options.repeats < 1:
        return f"--repeats must be 1 or more, got {options.repeats}"
    return None
