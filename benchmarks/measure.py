"""How is a case timed? All contestants in turn, in short blocks; the slowest rank counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from contestants import MEMCPY, Contestant, CopyLimit, Exchange
from torch import Tensor
from workload import Case, PhysicalBytes, Workload

BLOCK_SECONDS = 0.1
"""A contestant's turn: long against its first, cold round, short against the machine's moods."""

MIN_BLOCKS = 5
"""Turns of each contestant, however slow it is: a median of fewer means nothing."""


@dataclass(frozen=True)
class Spread:
    """Microseconds of the slowest rank, over the rounds."""

    median: float
    p99: float

    @classmethod
    def of(cls, seconds: Tensor) -> Spread:
        ordered = (seconds * 1e6).sort().values
        last_percent = math.ceil(0.99 * len(ordered)) - 1
        return cls(float(ordered.median()), float(ordered[last_percent]))


@dataclass(frozen=True)
class Timing:
    """One contestant's figures. memcpy has no phases, only a round."""

    name: str
    rounds: int
    round_us: Spread
    dispatch_us: Spread | None = None
    combine_us: Spread | None = None


@dataclass(frozen=True)
class CaseResult:
    case: Case
    physical_bytes: PhysicalBytes
    timings: list[Timing]


@dataclass(frozen=True)
class Effort:
    """How long to measure one case.

    seconds: of all contestants together.
    iterations: at least so many rounds of each contestant, however long they take; or None.
    """

    seconds: float
    iterations: int | None


def measure_case(
    case: Case,
    rank: int,
    backends: list[str],
    effort: Effort,
    progress: Callable[[float], None],
) -> CaseResult:
    """Time all backends and memcpy on one case. Collective; every rank returns the same result.

    progress: called with the share of the case that was done since the last call.
    """
    workload = Workload(case, rank)
    physical_bytes = workload.physical_bytes
    contestants: list[Contestant] = [Exchange(backend, workload) for backend in backends]
    contestants.append(CopyLimit(physical_bytes.round, case.ranks))
    for contestant in contestants:
        contestant.verify()

    rounds_per_block, blocks = _plan(contestants, effort)
    stamps: list[list[tuple[float, ...]]] = [[] for _ in contestants]
    for _ in range(blocks):
        for contestant, rounds, into in zip(contestants, rounds_per_block, stamps, strict=True):
            _take_turn(contestant, rounds, into)
        progress(1 / blocks)

    for contestant in contestants:
        contestant.verify_last_round()
        contestant.verify()
    timings = [_timing(c.name, _slowest(s)) for c, s in zip(contestants, stamps, strict=True)]
    for contestant in contestants:
        contestant.close()
    return CaseResult(case, physical_bytes, timings)


def _take_turn(contestant: Contestant, rounds: int, into: list[tuple[float, ...]]) -> None:
    dist.barrier()  # sleeps in Gloo; what its exit costs falls into the round that is not counted
    contestant.run(1)
    into += contestant.run(rounds)


def _plan(contestants: list[Contestant], effort: Effort) -> tuple[list[int], int]:
    """Return each contestant's rounds in a block, and the number of blocks. Alike on all ranks."""
    seconds_per_round = [_seconds_per_round(contestant) for contestant in contestants]
    rounds = [max(1, round(BLOCK_SECONDS / seconds)) for seconds in seconds_per_round]
    if effort.iterations is not None:
        blocks = min(MIN_BLOCKS, effort.iterations)
        asked = math.ceil(effort.iterations / blocks)
        # memcpy keeps a block that is long against the ranks' different starts.
        return [
            n if c.name == MEMCPY else asked for c, n in zip(contestants, rounds, strict=True)
        ], blocks
    block = sum((n + 1) * seconds for n, seconds in zip(rounds, seconds_per_round, strict=True))
    return rounds, max(MIN_BLOCKS, round(effort.seconds / block))


def _seconds_per_round(contestant: Contestant) -> float:
    """Return about how long a round takes: a guess from two, then one from a tenth of a block."""
    seconds = BLOCK_SECONDS
    for _ in range(2):
        trial: list[tuple[float, ...]] = []
        _take_turn(contestant, max(2, round(0.1 * BLOCK_SECONDS / seconds)), trial)
        seconds = float(_slowest(trial)[:, -1].median())
    return seconds


def _slowest(stamps: list[tuple[float, ...]]) -> Tensor:
    """[rounds, phases] seconds: for each round and phase those of the rank that took longest."""
    slowest = torch.tensor(stamps, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest


def _timing(name: str, slowest: Tensor) -> Timing:
    phases = [Spread.of(column) for column in slowest.unbind(1)]
    if name == MEMCPY:
        return Timing(name, len(slowest), phases[0])
    dispatch, combine, whole = phases
    return Timing(name, len(slowest), whole, dispatch, combine)
