"""What is timed? Rounds of a backend, or memcpy of as many bytes: things that take turns."""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor
from workload import Workload

from moe_ep import BootstrapConfig, create_communication

MEMCPY = "memcpy"


class Contestant(ABC):
    """Something that all ranks do at the same time, again and again."""

    name: str

    @abstractmethod
    def run(self, rounds: int) -> list[tuple[float, ...]]:
        """Repeat `rounds` times; return the seconds of each round's phases on this rank.

        Collective.
        """

    @abstractmethod
    def verify(self) -> None:
        """Run a round outside the timing and check every element. Collective."""

    @abstractmethod
    def verify_last_round(self) -> None:
        """Check every element that the last timed round left behind."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held. Collective."""


class Exchange(Contestant):
    """Dispatch and combine of one backend, back to back: the rounds keep the ranks in step.

    Phases: dispatch, combine, and both together. The experts are left out: what they return for
    these inputs lies ready. So no barrier has to line up the ranks within the timing, which with
    more ranks than cores would cost more than a small round.
    """

    def __init__(self, backend: str, workload: Workload) -> None:
        self.name = backend
        self._work = workload
        case = workload.case
        bootstrap = BootstrapConfig(case.ranks, workload.rank, device="cpu")
        self._comm = create_communication(bootstrap, case.params, backend)
        # In memory that has been written before: the first touch of fresh pages costs more than
        # the exchange itself.
        rows = case.ranks * case.tokens
        self._expert_output = torch.zeros(rows, case.hidden_size, dtype=case.params.token_dtype)
        self._output = torch.zeros_like(workload.hidden_states)

    def run(self, rounds: int) -> list[tuple[float, ...]]:
        comm, work = self._comm, self._work
        hidden_states, topk_ids, topk_weights = (
            work.hidden_states,
            work.topk_ids,
            work.topk_weights,
        )
        clock = time.perf_counter
        stamps = []
        for _ in range(rounds):
            begin = clock()
            comm.dispatch(hidden_states, topk_ids, topk_weights)
            middle = clock()
            comm.combine(self._combine_input(), output=self._output)
            stamps.append((begin, middle, clock()))
        return [(middle - begin, end - middle, end - begin) for begin, middle, end in stamps]

    def verify(self) -> None:
        """Run one round, experts included, and check it; leaves the experts' outputs for `run`."""
        result = self._comm.dispatch(
            self._work.hidden_states, self._work.topk_ids, self._work.topk_weights
        )
        self._work.check_dispatch(result)
        combine_input = self._combine_input()
        self._work.evaluate_experts(result.hidden_states, into=combine_input)
        self._comm.combine(combine_input, output=self._output)
        self.verify_last_round()

    def verify_last_round(self) -> None:
        self._work.check_combine(self._output)

    def close(self) -> None:
        self._comm.destroy()

    def _combine_input(self) -> Tensor:
        if self._work.case.zero_copy:
            buffer = self._comm.get_combine_input_buffer(self._expert_output.dtype)
            if buffer is not None:
                return buffer
        return self._expert_output


class CopyLimit(Contestant):
    """memcpy of as many bytes as a round reads and writes, by all processes at once: the limit.

    One phase. The ranks do not wait for each other within a run, so a round's time is the run's,
    from the first rank's start to the last rank's end, divided by the number of rounds.
    """

    name = MEMCPY

    def __init__(self, physical_bytes: int, ranks: int) -> None:
        # A byte copied is read once and written once.
        self._size = max(physical_bytes // (2 * ranks), 1)
        self._source = torch.randint(0, 256, (self._size,), dtype=torch.uint8)
        self._target = torch.zeros(self._size, dtype=torch.uint8)

    def run(self, rounds: int) -> list[tuple[float, ...]]:
        target, source, size = self._target.data_ptr(), self._source.data_ptr(), self._size
        begin = time.perf_counter()
        for _ in range(rounds):
            ctypes.memmove(target, source, size)
        # The monotonic clock is the same for all processes of a host.
        edges = torch.tensor([-begin, time.perf_counter()], dtype=torch.float64)
        dist.all_reduce(edges, dist.ReduceOp.MAX)
        return [(float(edges.sum()) / rounds,)] * rounds

    def verify(self) -> None:
        self.run(1)
        self.verify_last_round()

    def verify_last_round(self) -> None:
        if not torch.equal(self._source, self._target):
            raise AssertionError("memcpy left other bytes than it was given")

    def close(self) -> None:
        """Nothing but ordinary memory to give back."""
