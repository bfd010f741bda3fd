"""What does the reader get? One table for people, one JSON document for programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from measure import CaseResult, Timing

REFERENCE = "torch_dist"
"""The backend that the others are compared with: it runs on any network."""


def figures(result: CaseResult) -> list[dict[str, Any]]:
    """One record for each variant and limit. Times in microseconds, rates in 1e9 bytes/s.

    gb_per_s counts the physical bytes of all ranks (the link's limit: those of one direction).
    share_of_copy_limit, share_of_link_limit and times_faster_than_baseline compare medians of whole
    rounds; each is None where there is nothing to compare with.
    """
    limits = [timing for timing in result.timings if timing.variant is None]
    copy = limits[0]
    link = next((limit for limit in limits if limit.name.startswith("link")), None)
    compared = baseline(result)
    return [_figures_of(timing, copy, link, compared) for timing in result.timings]


def baseline(result: CaseResult) -> Timing | None:
    """Return what the variants are compared with: torch_dist if it ran, else the first of several
    variants.
    """
    variants = [timing for timing in result.timings if timing.variant is not None]
    for timing in variants:
        if timing.name == REFERENCE:
            return timing
    return variants[0] if len(variants) > 1 else None


def document(
    where: dict[str, Any], options: dict[str, Any], results: list[CaseResult]
) -> dict[str, Any]:
    """Everything, for json.dump."""
    return {
        "benchmark": "moe_ep_comm",
        "machine": where,
        "options": options,
        "cases": [
            {
                **asdict(result.case),
                "physical_bytes": asdict(result.physical_bytes),
                "link_bytes": result.link_bytes,
                "figures": figures(result),
            }
            for result in results
        ],
    }


@dataclass(frozen=True)
class _Column:
    title: str
    text: Callable[[CaseResult, dict[str, Any]], str]


def table(results: list[CaseResult]) -> str:
    """All figures in lines and columns; a column that would be empty is left out."""
    first = results[0]
    copy_limit = next(timing.name for timing in first.timings if timing.variant is None)
    compared = baseline(first)
    columns = [
        _Column("backend", lambda result, record: str(record["backend"])),
        _Column("mode", lambda result, record: str(record["mode"])),
        _Column("H", lambda result, record: str(result.case.hidden_size)),
        _Column("tokens", lambda result, record: str(result.case.tokens)),
        _Column("rounds", lambda result, record: str(record["rounds"])),
        _Column("host µs", lambda result, record: _median(record["host_us"])),
        _Column("dispatch µs", lambda result, record: _median(record["dispatch_us"])),
        _Column("combine µs", lambda result, record: _median(record["combine_us"])),
        _Column("round µs", lambda result, record: _median(record["round_us"])),
        _Column("p99 µs", lambda result, record: _number(record["round_us"]["p99"])),
        _Column("GB/s", lambda result, record: _rate(record["gb_per_s"])),
        _Column(f"of {copy_limit}", lambda result, record: _share(record["share_of_copy_limit"])),
        _Column("link GB/s", lambda result, record: _rate(record["link_gb_per_s"])),
        _Column("of link", lambda result, record: _share(record["share_of_link_limit"])),
        _Column(
            f"x {compared.name if compared else REFERENCE}",
            lambda result, record: _times(record["times_faster_than_baseline"]),
        ),
    ]
    rows = [(result, record) for result in results for record in figures(result)]
    filled = []
    for column in columns:
        texts = [column.text(*row) for row in rows]
        if any(texts):
            filled.append([column.title, *texts])
    lines = [list(line) for line in zip(*filled, strict=True)]
    return _aligned(lines, cases_of=[len(result.timings) for result in results])


def _figures_of(
    timing: Timing,
    copy: Timing,
    link: Timing | None,
    compared: Timing | None,
) -> dict[str, Any]:
    median = timing.round_us.median
    variant = timing.variant
    is_link = timing is link
    crosses = timing.link_bytes if variant is not None or is_link else 0
    return {
        "backend": timing.name,
        "mode": timing.mode,
        "settings": asdict(variant) if variant else None,
        "samples": timing.samples,
        "rounds": timing.rounds,
        **{f"{name}_us": None for name in ("host", "dispatch", "combine")},
        **{f"{name}_us": asdict(spread) for name, spread in timing.phases.items()},
        "gb_per_s": timing.counted_bytes / median / 1e3,
        "share_of_copy_limit": None if is_link else copy.round_us.median / median,
        "link_gb_per_s": crosses / median / 1e3 if crosses else None,
        "share_of_link_limit": link.round_us.median / median if link and crosses else None,
        "times_faster_than_baseline": (
            compared.round_us.median / median if compared and variant else None
        ),
    }


def _median(spread: dict[str, float] | None) -> str:
    return _number(spread["median"]) if spread else ""


def _number(microseconds: float) -> str:
    if microseconds >= 100:
        return f"{microseconds:.0f}"
    return f"{microseconds:.1f}" if microseconds >= 20 else f"{microseconds:.2f}"


def _rate(gb_per_s: float | None) -> str:
    if gb_per_s is None:
        return ""
    return f"{gb_per_s:.0f}" if gb_per_s >= 100 else f"{gb_per_s:.2f}"


def _share(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


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
