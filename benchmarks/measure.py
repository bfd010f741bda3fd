"""How is a case timed? All contestants in turn, in short blocks; the slowest rank counts."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from contestants import Contestant, HostCopy, HostRounds
from cuda_contestants import cuda_contestant
from cuda_limits import cuda_limits
from fifo_copy import FifoCopy
from places import Place
from rounds import Rounds
from torch import Tensor
from variants import Variant
from workload import Case, PhysicalBytes, Workload

from moe_ep import QuantFormat

MIN_BLOCKS = 5
"""Turns of each contestant, however slow it is: a median of fewer means nothing."""


@dataclass(frozen=True)
class Spread:
    """Microseconds of the slowest rank, over the samples."""

    median: float
    p99: float
    mean: float
    fastest: float
    slowest: float

    @classmethod
    def of(cls, seconds: Tensor) -> Spread:
        ordered = (seconds * 1e6).sort().values
        last_percent = math.ceil(0.99 * len(ordered)) - 1
        return cls(
            median=float(ordered.median()),
            p99=float(ordered[last_percent]),
            mean=float(ordered.mean()),
            fastest=float(ordered[0]),
            slowest=float(ordered[-1]),
        )


@dataclass(frozen=True)
class Timing:
    """One contestant's figures.

    variant: None for a limit.
    link_bytes: that cross the busiest link.
    samples, rounds: how many figures a spread is over, and how many rounds they are the means of.
    phases: "round", and where they were timed "dispatch", "combine", "host".
    """

    name: str
    variant: Variant | None
    mode: str
    samples: int
    rounds: int
    counted_bytes: int
    link_bytes: int
    phases: dict[str, Spread]

    @property
    def round_us(self) -> Spread:
        return self.phases["round"]


@dataclass(frozen=True)
class CaseResult:
    """timings: of the variants in their order, then of the limits."""

    case: Case
    physical_bytes: PhysicalBytes
    link_bytes: int
    timings: list[Timing]


@dataclass(frozen=True)
class Entry:
    """A contestant. variant, workload: what it is of; no variant: a limit."""

    contestant: Contestant
    variant: Variant | None
    workload: Workload


@dataclass(frozen=True)
class Effort:
    """How long to measure one case.

    seconds: of all contestants together.
    iterations: at least so many rounds of each contestant, however long they take; or None.
    block_seconds: a contestant's turn: long against its first, cold round, short against the
        machine's moods.
    """

    seconds: float
    iterations: int | None
    block_seconds: float


def measure_case(
    case: Case,
    place: Place,
    variants: list[Variant],
    effort: Effort,
    progress: Callable[[float], None],
) -> CaseResult:
    """Time all variants and the limits on one case. Collective; all ranks return the same.

    progress: called with the share of the case that was done since the last call.
    """
    workload = Workload(case, place.rank, place.device)
    entries = _contestants(workload, place, variants)
    contestants = [entry.contestant for entry in entries]
    for contestant in contestants:
        contestant.verify()

    samples_per_block, blocks = _plan(entries, effort, place)
    stamps: list[list[tuple[float, ...]]] = [[] for _ in contestants]
    for _ in range(blocks):
        for contestant, samples, into in zip(contestants, samples_per_block, stamps, strict=True):
            _take_turn(contestant, samples, into, place)
        progress(1 / blocks)

    for contestant in contestants:
        _verify_after(contestant, place)
    timings = [_timing(entry, _slowest(s)) for entry, s in zip(entries, stamps, strict=True)]
    for contestant in contestants:
        contestant.close()
    return CaseResult(case, workload.physical_bytes(), workload.link_bytes(), timings)


def _contestants(workload: Workload, place: Place, variants: list[Variant]) -> list[Entry]:
    case = workload.case
    fp8_case = replace(case, dispatch_format=QuantFormat.DeepSeekFp8.value)
    fp8_workload = None
    entries: list[Entry] = []
    for variant in variants:
        work = workload
        if variant.fp8_dispatch:
            fp8_workload = fp8_workload or Workload(fp8_case, place.rank, place.device)
            work = fp8_workload
        rounds = Rounds(variant, work, place)
        moved = work.physical_bytes(fp8_combine=variant.fp8_combine).round
        contestant: Contestant
        if place.device.type == "cuda":
            contestant = cuda_contestant(rounds, moved, case.tokens, place)
        else:
            contestant = HostRounds(rounds, moved)
        entries.append(Entry(contestant, variant, work))
    moved = workload.physical_bytes().round
    limits: list[Contestant]
    if place.device.type == "cuda":
        limits = cuda_limits(moved, workload.link_bytes(), place)
        if any(variant.backend == "nvlink_two_sided" for variant in variants):
            limits.append(FifoCopy(moved, min(case.ranks, case.top_k), place))
    else:
        limits = [HostCopy(moved, case.ranks)]
    return entries + [Entry(limit, None, workload) for limit in limits]


def _take_turn(
    contestant: Contestant, samples: int, into: list[tuple[float, ...]], place: Place
) -> None:
    place.barrier()  # what its exit costs falls into the sample that is not counted
    gc.disable()
    try:
        contestant.run(1)
        into += contestant.run(samples)
    finally:
        gc.enable()


def _verify_after(contestant: Contestant, place: Place) -> None:
    """Check the last timed round, and a timed kind of round over poisoned memory."""
    place.barrier()
    contestant.verify_last_round()
    place.barrier()  # nobody starts a round while another looks at the last
    contestant.verify()
    place.barrier()
    contestant.run(1)
    contestant.verify_last_round()
    place.barrier()


def _plan(entries: list[Entry], effort: Effort, place: Place) -> tuple[list[int], int]:
    """Return each contestant's samples in a block, and the number of blocks. Alike on all ranks."""
    seconds = [_seconds_per_sample(entry.contestant, effort, place) for entry in entries]
    samples = [max(1, round(effort.block_seconds / one)) for one in seconds]
    if effort.iterations is not None:
        blocks = min(MIN_BLOCKS, effort.iterations)
        asked = math.ceil(effort.iterations / blocks)
        # The limits keep a block that is long against the ranks' different starts.
        return [
            n if entry.variant is None else math.ceil(asked / entry.contestant.rounds_per_sample)
            for entry, n in zip(entries, samples, strict=True)
        ], blocks
    block = sum((n + 1) * one for n, one in zip(samples, seconds, strict=True))
    return samples, max(MIN_BLOCKS, round(effort.seconds / block))


def _seconds_per_sample(contestant: Contestant, effort: Effort, place: Place) -> float:
    """Return about how long a sample takes: a guess from two, then one from a tenth of a block."""
    seconds = effort.block_seconds
    for _ in range(2):
        samples = max(2, round(0.1 * effort.block_seconds / seconds))
        place.barrier()
        contestant.run(1)
        start = time.perf_counter()
        contestant.run(samples)
        spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        seconds = float(spent) / samples
    return seconds


def _slowest(stamps: list[tuple[float, ...]]) -> Tensor:
    """[samples, phases] seconds: for each sample and phase those of the rank that took longest."""
    slowest = torch.tensor(stamps, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest


def _timing(entry: Entry, slowest: Tensor) -> Timing:
    contestant, variant = entry.contestant, entry.variant
    fp8_combine = variant is not None and variant.fp8_combine
    spreads = [Spread.of(column) for column in slowest.unbind(1)]
    return Timing(
        name=contestant.name,
        variant=variant,
        mode=contestant.mode,
        samples=len(slowest),
        rounds=len(slowest) * contestant.rounds_per_sample,
        counted_bytes=contestant.counted_bytes,
        link_bytes=entry.workload.link_bytes(fp8_combine=fp8_combine),
        phases=dict(zip(contestant.phases, spreads, strict=True)),
    )
