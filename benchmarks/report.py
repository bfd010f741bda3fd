"""What does the reader get? One table for people, one JSON document for programs."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from contestants import MEMCPY
from measure import CaseResult, Timing

import moe_ep

BASELINE = "torch_dist"
"""The backend that the others are compared with: it runs on any network."""


def machine() -> dict[str, Any]:
    """Where and with what figures are taken. The load is that of before, if called before."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": f"{platform.system()} {platform.release()}",
        "load_average_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "moe_ep": moe_ep.__version__,
    }


def figures(result: CaseResult) -> list[dict[str, Any]]:
    """One record for each backend and for memcpy. Times in microseconds, rates in 1e9 bytes/s.

    Rates count the physical bytes of all ranks. share_of_memcpy and times_faster_than_baseline
    compare medians of whole rounds; the latter is None where the baseline did not run.
    """
    by_name = {timing.name: timing for timing in result.timings}
    memcpy, baseline = by_name[MEMCPY], by_name.get(BASELINE)
    return [_figures_of(timing, result, memcpy, baseline) for timing in result.timings]


def document(
    where: dict[str, Any], options: dict[str, Any], results: list[CaseResult]
) -> dict[str, Any]:
    """Everything, for json.dump. where: what `machine` returned before the first case."""
    return {
        "benchmark": "moe_ep_comm",
        "machine": where,
        "options": options,
        "cases": [
            {
                **asdict(result.case),
                "physical_bytes": asdict(result.physical_bytes),
                "figures": figures(result),
            }
            for result in results
        ],
    }


def table(results: list[CaseResult]) -> str:
    """All figures in lines and columns."""
    header = ["backend", "H", "tokens", "rounds", "dispatch µs", "combine µs", "round µs"]
    header += ["p99 µs", "GB/s", "of memcpy", f"x {BASELINE}"]
    lines = [header]
    for result in results:
        for record in figures(result):
            dispatch, combine = record["dispatch_us"], record["combine_us"]
            times = record["times_faster_than_baseline"]
            lines.append(
                [
                    record["backend"],
                    str(result.case.hidden_size),
                    str(result.case.tokens),
                    str(record["rounds"]),
                    _number(dispatch["median"]) if dispatch else "",
                    _number(combine["median"]) if combine else "",
                    _number(record["round_us"]["median"]),
                    _number(record["round_us"]["p99"]),
                    f"{record['gb_per_s']:.2f}",
                    _share(record["share_of_memcpy"]),
                    f"{times:.2f}" if times else "",
                ]
            )
    return _aligned(lines, cases_of=[len(result.timings) for result in results])


def _figures_of(
    timing: Timing, result: CaseResult, memcpy: Timing, baseline: Timing | None
) -> dict[str, Any]:
    median = timing.round_us.median
    compared = None if timing.name == MEMCPY else baseline
    return {
        "backend": timing.name,
        "rounds": timing.rounds,
        "dispatch_us": asdict(timing.dispatch_us) if timing.dispatch_us else None,
        "combine_us": asdict(timing.combine_us) if timing.combine_us else None,
        "round_us": asdict(timing.round_us),
        "gb_per_s": result.physical_bytes.round / median / 1e3,
        "share_of_memcpy": memcpy.round_us.median / median,
        "times_faster_than_baseline": compared.round_us.median / median if compared else None,
    }


def _number(microseconds: float) -> str:
    return f"{microseconds:.0f}" if microseconds >= 100 else f"{microseconds:.1f}"


def _share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


def _aligned(lines: list[list[str]], cases_of: list[int]) -> str:
    """Put columns side by side, a rule below the header and an empty line between cases."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    texts = [
        "  ".join(
            [line[0].ljust(widths[0])]
            + [c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)]
        )
        for line in lines
    ]
    header, body = texts[0], texts[1:]
    parts = [header, "-" * len(header)]
    for count in cases_of:
        parts += [*body[:count], ""]
        body = body[count:]
    return "\n".join(parts).rstrip()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
