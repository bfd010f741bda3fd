"""How long does a forward pass take, and how much of it is the exchange of its MoE layers?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from transformers.distributed.expert_parallel import EPImplementation


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one forward pass: in all, and in its layers' dispatch and combine."""

    forward: float
    dispatch: float
    combine: float

    @property
    def exchange(self) -> float:
        return self.dispatch + self.combine


class ExchangeClock:
    """Times one forward pass, and inside it the phases of the implementations that `timed` makes.

    The ranks start each phase together: waiting for a rank with slower experts is not exchange.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = {"forward": 0.0, "dispatch": 0.0, "combine": 0.0}

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the time in the block to `phase`. Collective."""
        self._finish_device_work()
        dist.barrier()
        start = perf_counter()
        yield
        self._finish_device_work()
        self._seconds[phase] += perf_counter() - start

    def time_pass(self, forward: Callable[[], object]) -> PassTimes:
        """The times of `forward()` on the slowest rank. Collective."""
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        with self.measure("forward"):
            forward()
        seconds = torch.tensor(list(self._seconds.values()), dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return PassTimes(*seconds.tolist())

    def _finish_device_work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def timed(implementation: type[EPImplementation], clock: ExchangeClock) -> type[EPImplementation]:
    """`implementation` with its exchange on `clock`.

    Ours and transformers' `AllToAllEP` have methods of the same names for the two phases.
    """

    class TimedImplementation(implementation):  # type: ignore[valid-type,misc]
        def _dispatch_tokens(self, *arguments: Any) -> Any:
            with clock.measure("dispatch"):
                return super()._dispatch_tokens(*arguments)

        def _combine_tokens(self, *arguments: Any) -> Any:
            with clock.measure("combine"):
                return super()._combine_tokens(*arguments)

    return TimedImplementation


def best(passes: list[PassTimes]) -> PassTimes:
    """The least of each time: what other programs on the machine add is never negative."""
    return PassTimes(
        forward=min(times.forward for times in passes),
        dispatch=min(times.dispatch for times in passes),
        combine=min(times.combine for times in passes),
    )
