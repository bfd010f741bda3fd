"""What is timed on the CPU? Rounds of a backend, or memcpy of as many bytes, taking turns."""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from rounds import Rounds


class Contestant(ABC):
    """Something that all ranks do at the same time, again and again.

    phases: what the seconds of a sample are of; "round" is always there.
    mode: how rounds are issued, "" where there is only one way.
    rounds_per_sample: a sample is their mean.
    counted_bytes: what a rate divides by the time of a round.
    """

    name: str
    mode: str = ""
    phases: tuple[str, ...] = ("round",)
    rounds_per_sample: int = 1
    counted_bytes: int

    @abstractmethod
    def run(self, samples: int) -> list[tuple[float, ...]]:
        """Return the seconds of each sample's phases on this rank. Collective."""

    @abstractmethod
    def verify(self) -> None:
        """Run a round outside the timing and check every element. Collective."""

    @abstractmethod
    def verify_last_round(self) -> None:
        """Check every element that the last timed round left behind."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held. Collective."""


class HostRounds(Contestant):
    """Dispatch and combine of one backend, back to back: the rounds keep the ranks in step.

    So no barrier has to line up the ranks within the timing, which with more ranks than cores would
    cost more than a small round.
    """

    phases = ("dispatch", "combine", "round")

    def __init__(self, rounds: Rounds, counted_bytes: int) -> None:
        self.name = rounds.variant.label
        self.counted_bytes = counted_bytes
        self._rounds = rounds

    def run(self, samples: int) -> list[tuple[float, ...]]:
        dispatch, combine, clock = self._rounds.dispatch, self._rounds.combine, time.perf_counter
        stamps = []
        for _ in range(samples):
            begin = clock()
            dispatch()
            middle = clock()
            combine()
            stamps.append((begin, middle, clock()))
        return [(middle - begin, end - middle, end - begin) for begin, middle, end in stamps]

    def verify(self) -> None:
        self._rounds.verify()

    def verify_last_round(self) -> None:
        self._rounds.verify_last(self._rounds.received)

    def close(self) -> None:
        self._rounds.close()


class HostCopy(Contestant):
    """memcpy of as many bytes as a round reads and writes, by all processes at once: the limit.

    The ranks do not wait for each other within a run, so a round's time is the run's, from the
    first rank's start to the last rank's end, divided by the number of rounds.
    """

    name = "memcpy"

    def __init__(self, counted_bytes: int, ranks: int) -> None:
        self.counted_bytes = counted_bytes
        # A byte copied is read once and written once.
        self._size = max(counted_bytes // (2 * ranks), 1)
        self._source = torch.randint(0, 256, (self._size,), dtype=torch.uint8)
        self._target = torch.zeros(self._size, dtype=torch.uint8)

    def run(self, samples: int) -> list[tuple[float, ...]]:
        target, source, size = self._target.data_ptr(), self._source.data_ptr(), self._size
        begin = time.perf_counter()
        for _ in range(samples):
            ctypes.memmove(target, source, size)
        # The monotonic clock is the same for all processes of a host.
        edges = torch.tensor([-begin, time.perf_counter()], dtype=torch.float64)
        dist.all_reduce(edges, dist.ReduceOp.MAX)
        return [(float(edges.sum()) / samples,)] * samples

    def verify(self) -> None:
        self.run(1)
        self.verify_last_round()

    def verify_last_round(self) -> None:
        if not torch.equal(self._source, self._target):
            raise AssertionError("memcpy left other bytes than it was given")

    def close(self) -> None:
        """Nothing but ordinary memory to give back."""
