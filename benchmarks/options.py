"""What does the user ask for? The command line, its defaults for each device, and its checks."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_sharing import reason_against_sharing
from variants import CUDA_MODIFIERS, MODIFIERS, Variant, parse_variant
from workload import DISPATCH_FORMATS, DTYPES, ROUTINGS, Case

import moe_ep

NCCL_BACKEND = "torch_dist"
"""Needs NCCL on GPUs, which refuses two ranks on one."""


@dataclass(frozen=True)
class Defaults:
    """What holds on one device where the user says nothing."""

    hidden_size: list[int]
    num_experts: int
    tokens: list[int]
    profiles: dict[str, list[int]]
    seconds: float
    block_seconds: float


DEFAULTS = {
    "cpu": Defaults(
        hidden_size=[2048, 7168],
        num_experts=64,
        tokens=[32, 128, 1024],
        profiles={"decode": [1, 8, 32, 128], "prefill": [1024, 4096]},
        seconds=6.0,
        block_seconds=0.1,
    ),
    "cuda": Defaults(
        hidden_size=[7168],
        num_experts=256,
        tokens=[1, 8, 32, 128, 512, 4096],
        profiles={
            "decode": [1, 2, 4, 8, 16, 32, 64, 128],
            "prefill": [256, 512, 1024, 2048, 4096, 8192],
        },
        seconds=1.0,
        block_seconds=0.02,
    ),
}


@dataclass(frozen=True)
class Plan:
    """One start of the ranks: what they run."""

    ranks: int
    variants: list[Variant]
    cases: list[Case]

    @property
    def needs_nccl(self) -> bool:
        return any(variant.backend == NCCL_BACKEND for variant in self.variants)


def parse(description: str | None) -> tuple[argparse.Namespace, list[Plan]]:
    """Return the options, completed, and a plan for each number of ranks.

    Ends the process with status 2 and a message where they cannot be run.
    """
    parser = _parser(description)
    options = parser.parse_args()
    problem = _missing_device(options)
    if problem:
        parser.error(problem)
    _complete(options)
    try:
        plans = [_plan(options, ranks) for ranks in options.ranks]
        for plan in plans:
            for case in plan.cases:
                case.params  # noqa: B018  validates the sizes
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    return options, plans


def as_json(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options for json.dump."""
    return {name: value for name, value in vars(options).items() if name != "json"}


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=list(DEFAULTS), default="cpu", help="where the tokens are (cpu)")
    add(
        "--backends",
        type=_names,
        metavar="A,B",
        help=f"of {_commas(moe_ep.available_communication_backends())} (cake,{NCCL_BACKEND}); each "
        "may carry settings of its own, as in cake,cake:no-pdl: " + ", ".join(MODIFIERS),
    )
    add(
        "--ranks",
        type=_positive,
        nargs="+",
        help="processes, one or more numbers (cpu: 4; cuda: 4 on one GPU, else one a GPU)",
    )
    add(
        "--gpus",
        type=_positive,
        help="that the ranks share equally, under MPS where they are more (1)",
    )
    add("--threads", type=_positive, default=1, help="torch threads in each process (1)")
    add("--dtype", choices=list(DTYPES), default="bf16", help="of unquantised rows (bf16)")
    add(
        "--dispatch-format",
        choices=list(DISPATCH_FORMATS),
        default="none",
        help="of the rows that are dispatched, their scales beside them (none: --dtype)",
    )
    add("--hidden-size", type=_sizes, metavar="H,...", help=_by_device("hidden_size"))
    add("--tokens", type=_sizes, metavar="N,...", help=f"of each rank ({_by_device('tokens')})")
    profiles = "; ".join(
        f"{device} {name}: {_commas(sizes)}"
        for device, defaults in DEFAULTS.items()
        for name, sizes in defaults.profiles.items()
    )
    add(
        "--profile",
        choices=list(DEFAULTS["cpu"].profiles),
        help=f"preset for --tokens ({profiles})",
    )
    add(
        "--num-experts", type=_positive, help=f"of all ranks together ({_by_device('num_experts')})"
    )
    add("--top-k", type=_positive, default=8, help="experts of a token (8)")
    add(
        "--routing", choices=ROUTINGS, default="random", help="which experts tokens choose (random)"
    )
    add(
        "--zero-copy",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="experts write where combine reads, if the backend can do that (yes)",
    )
    add(
        "--graph",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="cuda: time captured graphs, where the backend can be captured (yes)",
    )
    add(
        "--phases",
        action="store_true",
        help="cuda: also run graphs with an event after every call, which tell dispatch from "
        "combine",
    )
    add(
        "--pdl",
        action=argparse.BooleanOptionalAction,
        help="cuda: programmatic dependent launch (as the backend decides)",
    )
    add("--seconds", type=float, help=f"of measuring, for each case ({_by_device('seconds')})")
    add(
        "--iterations", type=_positive, help="rounds of each backend and case, instead of --seconds"
    )
    add("--seed", type=int, default=0, help="of inputs and routing (0)")
    add("--json", type=Path, metavar="FILE", help="write all figures there too")
    return parser


def _missing_device(options: argparse.Namespace) -> str | None:
    """Return what this machine lacks for these options."""
    if options.device == "cpu":
        cuda_only = [
            name
            for name, given in (
                ("--gpus", options.gpus is not None),
                ("--phases", options.phases),
                ("--pdl", options.pdl is not None),
            )
            if given
        ]
        return f"{_commas(cuda_only)}: only with --device cuda" if cuda_only else None
    if not torch.cuda.is_available():
        return (
            f"--device cuda: torch {torch.__version__} finds no CUDA device here; use --device cpu"
        )
    there = torch.cuda.device_count()
    if (options.gpus or 1) > there:
        return f"--gpus {options.gpus}: there are {there}"
    return None


def _complete(options: argparse.Namespace) -> None:
    defaults = DEFAULTS[options.device]
    options.gpus = (options.gpus or 1) if options.device == "cuda" else 0
    options.ranks = options.ranks or [options.gpus if options.gpus > 1 else 4]
    options.hidden_size = options.hidden_size or defaults.hidden_size
    options.num_experts = options.num_experts or defaults.num_experts
    profile = defaults.profiles.get(options.profile, defaults.tokens)
    options.tokens = options.tokens or profile
    options.seconds = options.seconds or defaults.seconds


def _plan(options: argparse.Namespace, ranks: int) -> Plan:
    """Raises ValueError where these options do not go with so many ranks."""
    if options.gpus and ranks % options.gpus:
        raise ValueError(f"--ranks {ranks} must be a multiple of --gpus {options.gpus}")
    if options.gpus and ranks > options.gpus:
        reason = reason_against_sharing()
        if reason is not None:
            raise ValueError(f"--ranks {ranks}: several ranks a GPU need MPS, but {reason}")
    variants = _variants(options, ranks)
    cases = [
        Case(
            ranks=ranks,
            gpus=options.gpus,
            dtype=options.dtype,
            dispatch_format=options.dispatch_format,
            hidden_size=hidden_size,
            tokens=tokens,
            num_experts=options.num_experts,
            top_k=options.top_k,
            routing=options.routing,
            seed=options.seed,
        )
        for hidden_size in options.hidden_size
        for tokens in options.tokens
    ]
    return Plan(ranks, variants, cases)


def _variants(options: argparse.Namespace, ranks: int) -> list[Variant]:
    on_cpu = options.device == "cpu"
    shared = not on_cpu and ranks != options.gpus
    mode = "graph" if options.graph and not on_cpu else "eager"
    variants = []
    for text in options.backends or ["cake", NCCL_BACKEND]:
        is_nccl = text.split(":")[0] == NCCL_BACKEND
        if is_nccl and shared:
            continue
        variant = parse_variant(
            text,
            mode="eager" if is_nccl else mode,
            zero_copy=options.zero_copy,
            pdl=None if is_nccl else options.pdl,
        )
        if on_cpu and any(word in CUDA_MODIFIERS for word in text.split(":")[1:]):
            raise ValueError(f"--backends: {text}: only with --device cuda")
        variants.append(variant)
    known = moe_ep.available_communication_backends()
    unknown = [variant.backend for variant in variants if variant.backend not in known]
    if unknown:
        raise ValueError(f"--backends: {_commas(unknown)} unknown; there are {_commas(known)}")
    if not variants:
        raise ValueError(
            f"--backends: NCCL refuses several ranks on one GPU: {NCCL_BACKEND} needs --ranks "
            f"{options.gpus} with --gpus {options.gpus}, got --ranks {ranks}"
        )
    if options.phases:
        variants += [variant.with_phases for variant in variants if variant.mode == "graph"]
    return variants


def _by_device(field: str) -> str:
    values = {device: getattr(defaults, field) for device, defaults in DEFAULTS.items()}
    return "; ".join(
        f"{device}: {_commas(value) if isinstance(value, list) else value}"
        for device, value in values.items()
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _sizes(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _commas(items: Iterable[object]) -> str:
    return ",".join(str(item) for item in items)
