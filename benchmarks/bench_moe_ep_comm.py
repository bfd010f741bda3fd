"""How fast are dispatch and combine? Backends against each other and against copying, in one run.

    python benchmarks/bench_moe_ep_comm.py --device cpu
    python benchmarks/bench_moe_ep_comm.py --profile decode --hidden-size 7168 --json decode.json
    python benchmarks/bench_moe_ep_comm.py --device cuda --ranks 2 4 8
    python benchmarks/bench_moe_ep_comm.py --device cuda --gpus 2 --backends cake,cake:no-pdl

It starts its own ranks. Every case is run by all backends and by the copies in turn, in short
blocks; a time is the slowest rank's, the median (or the 99th percentile) over the samples. Inputs
are random. All outputs are compared bit for bit with what they must be: before the timing, for the
last timed round, and for a last round over poisoned memory. Bytes are physical: a row is read once
and written once for each rank that gets it; combine reads one row from each such rank and writes
one. Ids and weights are not counted. "of memcpy" is the time in which as many processes copy as
many bytes, divided by the round's.

On the CPU a sample is one round. On GPUs it is the mean of the 50 (to 256 tokens), 20 (to 1024) or
8 rounds of one CUDA graph, between two events; the ranks start each replay together. Several ranks
on one GPU run under MPS with equal shares of its multiprocessors. "of copy kernel" is against a
plain kernel of torch that reads and writes 16 bytes a thread, 256 MiB in each process, all at once.
"link" is what leaves or reaches the busiest GPU, against copies between GPUs in both directions.
"fifo kernels", beside nvlink_two_sided, are the memory traffic of such a round without its flags.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from typing import Any

import options as command_line
import report
from launch import Launch, run_ranks
from machine import gpu_machine, gpu_of, machine
from measure import CaseResult, Effort, measure_case
from options import Plan
from places import Place
from progress import Progress
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException


def main() -> None:
    options, plans = command_line.parse(__doc__)
    where = machine()
    if options.device == "cuda":
        where |= gpu_machine()
    defaults = command_line.DEFAULTS[options.device]
    effort = Effort(options.seconds, options.iterations, defaults.block_seconds)
    results: list[CaseResult] = []
    for plan in plans:
        launch = Launch(
            plan.ranks, options.threads, options.gpus, options.gpus > 0 and plan.needs_nccl
        )
        gpu, of_plan = run_ranks(launch, functools.partial(_all_cases, plan, effort))
        where |= gpu
        results += of_plan
        print(_title(options, plan, where))
        print(report.table(of_plan), flush=True)
        if options.json:  # after every plan: a run that is cut short leaves what it has
            document = report.document(where, command_line.as_json(options), results)
            options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        if plan is not plans[-1]:
            print()


def _all_cases(plan: Plan, effort: Effort, place: Place) -> tuple[dict[str, Any], list[CaseResult]]:
    """Run by every rank. Returns what it sees of its GPU, and the results."""
    results = []
    with Progress(len(plan.cases), shown=place.rank == 0) as progress:
        for case in plan.cases:
            progress.start_case(f"H {case.hidden_size}, {case.tokens} tokens")
            results.append(measure_case(case, place, plan.variants, effort, progress.advance))
    return gpu_of(place) if place.gpus else {}, results


def _title(options: argparse.Namespace, plan: Plan, where: dict[str, Any]) -> str:
    versions = f"Python {where['python']}, torch {where['torch']}, moe_ep {where['moe_ep']}"
    host = f"{where['cpu']}, {where['cores']} cores, {where['kernel']}, {versions}"
    zero_copy = "zero-copy combine" if options.zero_copy else "combine from ordinary memory"
    rows = options.dtype
    if options.dispatch_format != "none":
        rows = f"{options.dispatch_format} rows out, {options.dtype} back"
    work = (
        f"{plan.ranks} ranks{_on_gpus(options, plan, where)}, {rows}, top {options.top_k} of "
        f"{options.num_experts} experts, {options.routing} routing, {zero_copy}"
    )
    over = "samples" if options.gpus else "rounds"
    lines = [host, work, f"times of the slowest rank, medians over the {over} unless p99"]
    if options.gpus:
        gpus = f"{options.gpus} x {where['gpu']}, driver {where['driver']}, CUDA {where['cuda']}"
        lines.insert(1, gpus + (f", NCCL {where['nccl']}" if plan.needs_nccl else ""))
    return "\n".join([*lines, _busy(where)])


def _on_gpus(options: argparse.Namespace, plan: Plan, where: dict[str, Any]) -> str:
    if not options.gpus:
        return ""
    gpus = f" on {options.gpus} GPU{'s' if options.gpus > 1 else ''}"
    if plan.ranks == options.gpus:
        return gpus
    return f"{gpus} under MPS ({where['multiprocessors_per_rank']} multiprocessors each)"


def _busy(where: dict[str, Any]) -> str:
    """Return a warning where other programs will have cost more than a little."""
    load, cores = where["load_average_before"], where["cores"]
    if load < cores / 2:
        return ""
    return f"the machine was busy (load {load:.1f} on {cores} cores): trust the ratios only\n"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except (ProcessRaisedException, ProcessExitedException) as error:
        sys.exit(f"a rank failed, and the others were ended: {error}")
