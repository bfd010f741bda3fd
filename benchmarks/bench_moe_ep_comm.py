"""How fast are dispatch and combine? Backends against each other and against memcpy, in one run.

    python benchmarks/bench_moe_ep_comm.py --device cpu
    python benchmarks/bench_moe_ep_comm.py --profile decode --hidden-size 7168 --json decode.json

It starts its own ranks. Every case is run by all backends and by memcpy in turn, in short blocks; a
time is the slowest rank's, the median (or the 99th percentile) over the rounds. Inputs are random.
All outputs are compared element by element with what they must be, before and after the timing and
for the last timed round. Bytes are physical: a row is read once and written once for each rank that
gets it; combine reads one row from each such rank and writes one. "of memcpy" is the time in which
as many processes copy as many bytes, divided by the round's.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import report
import torch
from launch import run_ranks
from measure import CaseResult, Effort, measure_case
from progress import Progress
from workload import DTYPES, ROUTINGS, Case

import moe_ep

PROFILES = {"decode": [1, 8, 32, 128], "prefill": [1024, 4096]}
DEFAULT_TOKENS = [32, 128, 1024]


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    options.tokens = options.tokens or PROFILES.get(options.profile, DEFAULT_TOKENS)
    problem = _problem(options)
    if problem:
        parser.error(problem)
    cases = [
        Case(
            ranks=options.ranks,
            dtype=options.dtype,
            hidden_size=hidden_size,
            tokens=tokens,
            num_experts=options.num_experts,
            top_k=options.top_k,
            routing=options.routing,
            zero_copy=options.zero_copy,
            seed=options.seed,
        )
        for hidden_size in options.hidden_size
        for tokens in options.tokens
    ]
    try:
        for case in cases:
            case.params  # noqa: B018  validates the sizes
    except moe_ep.MoEEpConfigError as error:
        parser.error(str(error))

    where = report.machine()
    effort = Effort(options.seconds, options.iterations)
    body = functools.partial(_all_cases, cases, options.backends, effort)
    results = run_ranks(options.ranks, options.threads, body)
    print(_title(options, where))
    print(report.table(results))
    if options.json:
        document = report.document(where, _as_json(options), results)
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _all_cases(
    cases: list[Case], backends: list[str], effort: Effort, rank: int
) -> list[CaseResult]:
    """Run by every rank."""
    results = []
    with Progress(len(cases), shown=rank == 0) as progress:
        for case in cases:
            progress.start_case(f"H {case.hidden_size}, {case.tokens} tokens")
            results.append(measure_case(case, rank, backends, effort, progress.advance))
    return results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where the tokens are (cpu)")
    add(
        "--backends",
        type=_names,
        default=["cake", "torch_dist"],
        metavar="A,B",
        help="(cake,torch_dist)",
    )
    add("--ranks", type=_positive, default=4, help="processes (4)")
    add("--threads", type=_positive, default=1, help="torch threads in each process (1)")
    add("--dtype", choices=list(DTYPES), default="bf16", help="of the tokens (bf16)")
    add("--hidden-size", type=_sizes, default=[2048, 7168], metavar="H,...", help="(2048,7168)")
    add("--tokens", type=_sizes, metavar="N,...", help="of each rank (32,128,1024)")
    presets = ", ".join(f"{name}: {_commas(sizes)}" for name, sizes in PROFILES.items())
    add("--profile", choices=list(PROFILES), help=f"preset for --tokens ({presets})")
    add("--num-experts", type=_positive, default=64, help="of all ranks together (64)")
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
    add("--seconds", type=float, default=6.0, help="of measuring, for each case (6)")
    add(
        "--iterations", type=_positive, help="rounds of each backend and case, instead of --seconds"
    )
    add("--seed", type=int, default=0, help="of inputs and routing (0)")
    add("--json", type=Path, metavar="FILE", help="write all figures there too")
    return parser


def _problem(options: argparse.Namespace) -> str | None:
    """Return what keeps these options from running on this machine."""
    if options.device == "cuda" and not torch.cuda.is_available():
        return (
            f"--device cuda: torch {torch.__version__} finds no CUDA device here; use --device cpu"
        )
    if options.device == "cuda":
        return (
            "--device cuda: this version of the benchmark times the CPU backends; use --device cpu"
        )
    known = moe_ep.available_communication_backends()
    unknown = [name for name in options.backends if name not in known]
    if unknown:
        return f"--backends: {_commas(unknown)} unknown; there are {_commas(known)}"
    return None


def _title(options: argparse.Namespace, where: dict[str, Any]) -> str:
    zero_copy = "zero-copy combine" if options.zero_copy else "combine from ordinary memory"
    return (
        f"{where['cpu']}, {where['cores']} cores, {where['kernel']}, Python {where['python']}, "
        f"torch {where['torch']}, moe_ep {where['moe_ep']}\n"
        f"{options.ranks} ranks, {options.dtype}, top {options.top_k} of {options.num_experts} "
        f"experts, {options.routing} routing, {zero_copy}\n"
        "times of the slowest rank, medians over the rounds unless p99\n"
        f"{_busy(where)}"
    )


def _busy(where: dict[str, Any]) -> str:
    """Return a warning where other programs will have cost more than a little."""
    load, cores = where["load_average_before"], where["cores"]
    if load < cores / 2:
        return ""
    return f"the machine was busy (load {load:.1f} on {cores} cores): trust the ratios only\n"


def _as_json(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name != "json"}


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


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
