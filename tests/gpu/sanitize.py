"""Do the kernels pass compute-sanitizer? Plays a few rounds under it; any report fails.

    python -m tests.gpu.sanitize [--tools memcheck racecheck synccheck] [--backends cake]

Two ranks, each under a tool of its own, on two GPUs where there are two. On one GPU they take turns
instead of sharing it by MPS, of which NVIDIA says that memcheck works there, and no more. What the
tools slow down most is the number of kernels, so the list is short: a step of few tokens, one of
some and one of many, with rows of odd widths and of usual ones, with scales and without.

Before that, a kernel is made to write past the end of its tensor, and memcheck must report it: a
tool that looks at nothing finds nothing.

initcheck is no choice: it does not know what other processes write, and would report all of it.
racecheck before 2025.4 (CUDA 13.1) knows mbarriers in part only: look twice at hazards between bulk
copies and what reads them.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from moe_ep import MoEEpCommParams, QuantFormat
from moe_ep.cake.kernels import sanitize_expert_ids
from tests.backends import named
from tests.ranks import RankContext, devices
from tests.rounds import Round, check, play, random_round
from tools.mps import without_daemon

SIZE = 2
SECONDS = 170
WAIT_SECONDS = 100  # under a tool a peer is slow, and on one GPU the ranks take turns
TOOLS = ("memcheck", "racecheck")
MORE_TOOLS = ("synccheck",)
# Calls of torch and of the probing for handle kinds fail and are answered: no business of ours.
OPTIONS = {"memcheck": ["--report-api-errors", "no"]}
OUR_KERNELS = "moe_ep"  # their namespace; to look into torch's, too, takes minutes
ERROR_EXIT_CODE = 86
# A tensor is then an allocation of its own, whose end the tool knows.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
# Each is played with rows that travel back as they are, or in low precision by who can do that.
CASES = (
    (MoEEpCommParams(10, 3, 160, 1001), False),
    (MoEEpCommParams(10, 3, 160, 203, dispatch_format=QuantFormat.MXFP8), False),
    (MoEEpCommParams(32, 8, 160, 1008), False),  # the usual: aligned rows, eight even experts
    (MoEEpCommParams(10, 3, 160, 200), True),
)
COUNTS = ((3, 1), (40, 33), (160, 97))
# With all small steps as packets, there and back.
BACKENDS: dict[str, dict[str, Any]] = {
    "cake": {},
    "nvlink_one_sided": {"lamport": True},
    "nvlink_two_sided": {},
}
PLAYED = "all rounds are exact"
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
    return reason_against("nvlink_one_sided")  # no other needs less of a GPU


def reason_against(backend: str) -> str | None:
    """Return why a backend cannot run on the GPU, or None."""
    return named(backend).communication.unsupported_reason(torch.device("cuda", 0))


def reports_in(output: str) -> int | None:
    """Return how many reports a tool counts, or None where it has not come to count."""
    summaries = [int(count) for count in _SUMMARY.findall(output)]
    return sum(summaries) if summaries else None


def problem_in(output: str, status: int | None) -> str | None:
    """Return what is wrong with one rank under a tool, or None.

    output: all that the tool and the rank wrote. status: the tool's exit status; None: it was
        ended, since it took too long.
    """
    reports = reports_in(output)
    if reports:
        return f"{reports} reports"
    if "Device not supported" in output:
        return "the tool cannot look into the GPU of this machine"
    if status is None:
        return f"not done after {SECONDS} s"
    if status != 0:
        return f"exit status {status}"
    if reports is None:
        return "no summary: the tool has seen no CUDA"
    return None if PLAYED in output else "did not play to the end"


def run_under(
    sanitizer: str, tool: str, arguments: Sequence[Sequence[str]]
) -> list[tuple[str, int | None]]:
    """Run this module once with each of the arguments, all at the same time, each under the tool;
    return what they wrote, and the exit statuses: None for what was ended after SECONDS.
    """
    command = [sanitizer, "--tool", tool, "--target-processes", "all"]
    command += ["--error-exitcode", str(ERROR_EXIT_CODE), "--kernel-name", f"kns={OUR_KERNELS}"]
    command += [*OPTIONS.get(tool, []), sys.executable, "-m", __spec__.name]
    environment = {**without_daemon(os.environ), **ENVIRONMENT}
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in arguments]
        processes = [
            subprocess.Popen(
                [*command, *more],
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the tool's children can then be ended with it
            )
            for more, file in zip(arguments, files, strict=True)
        ]
        deadline = time.monotonic() + SECONDS
        statuses = [_status_of(process, deadline) for process in processes]
        outputs = []
        for file in files:
            file.seek(0)
            outputs.append(file.read())
    return list(zip(outputs, statuses, strict=True))


def _status_of(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    try:
        return process.wait(timeout=max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def sanitize(sanitizer: str, tool: str, backend: str) -> str | None:
    """Return what is wrong with a backend under one tool, or None."""
    print(f"=== {tool} of {backend}", flush=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = ["--port", str(store.port), "--backends", backend]
    ranks = [["--rank", str(rank), *where] for rank in range(SIZE)]
    problems = []
    for rank, (output, status) in enumerate(run_under(sanitizer, tool, ranks)):
        print(f"--- rank {rank}\n{output}", flush=True)
        problem = problem_in(output, status)
        if problem is not None:
            problems.append(f"rank {rank}: {problem}")
    return "; ".join(problems) or None


def blindness(sanitizer: str) -> str | None:
    """Return what speaks against the tools' seeing our kernels, or None."""
    print("=== memcheck of a write past the end", flush=True)
    [(output, _)] = run_under(sanitizer, "memcheck", [["--overrun"]])
    print(output, flush=True)
    if reports_in(output):
        return None
    return "a write past the end of a tensor was not reported"


def rounds_of(params: MoEEpCommParams) -> list[Round]:
    """Return the rounds of a case; the same on every rank."""
    return [
        random_round(params, counts, seed, tokens_per_rank=max(counts))
        for seed, counts in enumerate(COUNTS)
    ]


def play_rank(rank: int, port: int, backend: str) -> None:
    """Play a rank's part, and compare what came with the oracle. port: of the ranks' store."""
    faulthandler.dump_traceback_later(SECONDS - 10, exit=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    context = RankContext(rank, SIZE, dist.group.WORLD, devices.enter(devices.SPREAD, rank, SIZE))
    for params, low_precision in CASES:
        if low_precision and not named(backend).low_precision:
            continue
        rounds = rounds_of(params)
        precision = {"use_low_precision_combine": True} if low_precision else {}
        options = {"timeout_sec": WAIT_SECONDS, **precision}
        played = play(context, backend, params, rounds, {**options, **BACKENDS[backend]})
        for one, got in zip(rounds, played, strict=True):
            of_ranks = [got if r == rank else None for r in range(SIZE)]
            check(params, one, of_ranks, low_precision=low_precision)
    print(f"rank {rank}: {PLAYED}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


class _Longer:
    """An array that says that it has more elements than a tensor whose memory it is."""

    def __init__(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        self._tensor = tensor
        self._shape = shape

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": self._shape,
            "typestr": "<i4",
            "data": (self._tensor.data_ptr(), False),
            "version": 2,
        }


def overrun() -> None:
    """Let a kernel of ours write a row that lies behind the end of its memory."""
    device = torch.device("cuda", 0)
    memory = torch.zeros(255, dtype=torch.int32, device=device)
    ids = torch.as_tensor(_Longer(memory, (1, 86, 3)), device=device)
    counts = torch.tensor([85], dtype=torch.int32, device=device)
    with contextlib.suppress(RuntimeError):  # the tool may end the context
        sanitize_expert_ids(ids, counts, -1)
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--tools",
        nargs="+",
        choices=[*TOOLS, *MORE_TOOLS],
        default=list(TOOLS),
        help="of compute-sanitizer",
    )
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--overrun", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.overrun:
        overrun()
        return
    if options.rank is not None:
        play_rank(options.rank, options.port, *options.backends)
        return
    sanitizer = find_sanitizer()
    reason = reason_to_skip(sanitizer)
    if reason is not None or sanitizer is None:
        print(f"{Path(__file__).name} skipped: {reason}")
        return
    subprocess.run([sanitizer, "--version"], check=False)
    problems = {"the tool": blindness(sanitizer)}
    for backend in options.backends:
        if (reason := reason_against(backend)) is not None:
            print(f"{backend} skipped: {reason}")
            continue
        for tool in options.tools:
            problems[f"{tool} of {backend}"] = sanitize(sanitizer, tool, backend)
    for tool, problem in problems.items():
        print(f"{tool}: {problem or 'no reports'}")
    sys.exit(any(problem is not None for problem in problems.values()))


if __name__ == "__main__":
    main()
