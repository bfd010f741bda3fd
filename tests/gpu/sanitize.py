"""Do cake's kernels pass compute-sanitizer? Plays a few rounds under it and fails on any report.

    python -m tests.gpu.sanitize [--tools memcheck racecheck ...]

Two ranks, on two GPUs where there are two. On one GPU they take turns: no MPS daemon, whose server
the tools cannot look into. What the tools slow down most is the number of kernels, so the list is
short: a step of few tokens and one of many, with rows of odd widths, with scales and without.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from moe_ep import CakeAlltoAll, MoEEpCommParams, QuantFormat
from tests.ranks import RankContext, devices
from tests.rounds import Round, check, play, random_round

SIZE = 2
SECONDS = 150
WAIT_SECONDS = 100  # under a tool a peer is slow, and on one GPU the ranks take turns
TOOLS = ("memcheck", "racecheck")
# Calls of torch and of the probing for handle kinds fail and are answered: no business of ours.
OPTIONS = {"memcheck": ["--report-api-errors", "no"]}
OUR_KERNELS = "moe_ep"  # their namespace; to look into torch's, too, takes minutes
CASES = (
    MoEEpCommParams(10, 3, 160, 1001),
    MoEEpCommParams(10, 3, 160, 203, dispatch_format=QuantFormat.MXFP8),
)
COUNTS = ((3, 1), (160, 97))
_SUMMARY = re.compile(r"SUMMARY: (\d+) (?:errors?|hazards?)")


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer, or None."""
    folders = [os.environ.get("CUDA_HOME") or "/usr/local/cuda", "/usr/local/cuda"]
    path = os.pathsep.join([os.environ.get("PATH", ""), *[f"{folder}/bin" for folder in folders]])
    return shutil.which("compute-sanitizer", path=path)


def reason_to_skip(sanitizer: str | None) -> str | None:
    """Return why nothing can be sanitised here, or None. sanitizer: what `find_sanitizer` found."""
    if torch.cuda.device_count() == 0:
        return "needs a CUDA device, found none"
    if sanitizer is None:
        return "needs compute-sanitizer, found none on the PATH or beside the compiler"
    return CakeAlltoAll.unsupported_reason(torch.device("cuda", 0))


def problem_in(report: str, status: int) -> str | None:
    """Return what is wrong with a tool's run, or None.

    report: all that the tool and the ranks wrote. status: the tool's exit status.
    """
    summaries = [int(count) for count in _SUMMARY.findall(report)]
    if any(summaries):
        return f"{sum(summaries)} reports"
    if status != 0:
        return f"exit status {status}"
    if not summaries:
        return "no summary: the tool has seen no CUDA"
    played = report.count("rounds are exact")
    return None if played == SIZE else f"{played} ranks of {SIZE} played to the end"


def sanitize(sanitizer: str, tool: str) -> str | None:
    """Return what is wrong under one tool, or None."""
    print(f"=== {tool}", flush=True)
    command = [sanitizer, "--tool", tool, "--target-processes", "all", "--error-exitcode", "86"]
    command += ["--kernel-name", f"kns={OUR_KERNELS}"]
    command += [*OPTIONS.get(tool, []), sys.executable, "-m", __spec__.name, "--rank", "0"]
    try:
        result = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        print(output.decode(errors="replace") if isinstance(output, bytes) else output)
        return f"not done after {SECONDS} s"
    print(result.stdout, flush=True)
    return problem_in(result.stdout, result.returncode)


def rounds_of(params: MoEEpCommParams) -> list[Round]:
    """Return the rounds of a case; the same on every rank."""
    return [
        random_round(params, counts, seed, tokens_per_rank=max(counts))
        for seed, counts in enumerate(COUNTS)
    ]


def play_rank(rank: int, port: int) -> None:
    """Play a rank's part, and compare what came with the oracle.

    port: of rank 0's store; 0 on rank 0, which starts the others.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    others = []
    if rank == 0:
        command = [sys.executable, "-m", __spec__.name, "--port", str(store.port), "--rank"]
        others = [subprocess.Popen([*command, str(other)]) for other in range(1, SIZE)]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    context = RankContext(rank, SIZE, dist.group.WORLD, devices.enter(devices.SPREAD, rank, SIZE))
    for params in CASES:
        rounds = rounds_of(params)
        played = play(context, "cake", params, rounds, {"timeout_sec": WAIT_SECONDS})
        for one, got in zip(rounds, played, strict=True):
            check(params, one, [got if r == rank else None for r in range(SIZE)])
    print(f"rank {rank}: all rounds are exact", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    for other in others:
        if other.wait() != 0:
            sys.exit(f"a rank ended with status {other.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), help="of compute-sanitizer")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        play_rank(options.rank, options.port)
        return
    sanitizer = find_sanitizer()
    reason = reason_to_skip(sanitizer)
    if reason is not None or sanitizer is None:
        print(f"{Path(__file__).name} skipped: {reason}")
        return
    problems = {tool: sanitize(sanitizer, tool) for tool in options.tools}
    for tool, problem in problems.items():
        print(f"{tool}: {problem or 'no reports'}")
    sys.exit(any(problem is not None for problem in problems.values()))


if __name__ == "__main__":
    main()
