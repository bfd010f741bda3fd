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
    """Seconds of one forward pass, and of dispatch and combine in each of its MoE layers."""

    forward: float
    dispatches: tuple[float, ...]
    combines: tuple[float, ...]

    @property
    def dispatch(self) -> float:
        return sum(self.dispatches)

    @property
    def combine(self) -> float:
        return sum(self.combines)

    @property
    def exchange(self) -> float:
        return self.dispatch + self.combine


class ExchangeClock:
    """Times one forward pass, and inside it the phases of the implementations that `timed` makes.

    The ranks start each phase together: waiting for a rank with slower experts is not exchange.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, list[float]] = {"forward": [], "dispatch": [], "combine": []}

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Note the time in the block under `phase`. Collective."""
        self._finish_device_work()
        dist.barrier()
        start = perf_counter()
        yield
        self._finish_device_work()
        self._seconds[phase].append(perf_counter() - start)

    def time_pass(self, forward: Callable[[], object]) -> PassTimes:
        """The times of `forward()`, each on the rank where it is longest. Collective."""
        for seconds in self._seconds.values():
            seconds.clear()
        with self.measure("forward"):
            forward()
        return PassTimes(
            forward=self._longest("forward")[0],
            dispatches=self._longest("dispatch"),
            combines=self._longest("combine"),
        )

    def _longest(self, phase: str) -> tuple[float, ...]:
        seconds = torch.tensor(self._seconds[phase], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return tuple(seconds.tolist())

    def _finish_device_work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def timed(
    implementation: Callable[..., EPImplementation], clock: ExchangeClock
) -> Callable[..., EPImplementation]:
    """`implementation`, a class or what makes one's objects, with its exchange on `clock`.

    moe_ep's and transformers' `AllToAllEP` have methods of the same names for the two phases.
    """

    def on_clock(phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with clock.measure(phase):
                return method(*arguments)

        return run

    def make(*arguments: Any) -> EPImplementation:
        made: Any = implementation(*arguments)
        made._dispatch_tokens = on_clock("dispatch", made._dispatch_tokens)
        made._combine_tokens = on_clock("combine", made._combine_tokens)
        return made

    return make


def best(passes: list[PassTimes]) -> PassTimes:
    """The least of each time over the passes: other programs on the machine only ever add to it."""
    return PassTimes(
        forward=min(times.forward for times in passes),
        dispatches=tuple(map(min, zip(*(times.dispatches for times in passes), strict=True))),
        combines=tuple(map(min, zip(*(times.combines for times in passes), strict=True))),
    )
