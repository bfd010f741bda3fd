"""New processes for one body: for tests in which ranks die, are interrupted, or leave without
cleaning up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.ranks import devices, wire
from tests.ranks.process import serve_once
from tests.ranks.processes import PATIENCE_SECONDS, RankFailedError, Ranks

_TO_BE_HEARD_S = 5
_AT_ONCE = 4  # few enough that no rank is late because of the others


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    exit_code: as the shell's, negative for a signal.
    value: what the body returned, None if it did not.
    error: the traceback if it raised.
    seconds: from when all had returned, raised or died to the end of this one.
    """

    exit_code: int
    value: Any
    error: str | None
    seconds: float


class FreshRun:
    """New processes that run `body(context, **kwargs)` from now on."""

    def __init__(
        self,
        size: int,
        body: Callable[..., Any],
        kwargs: dict[str, Any],
        *,
        mps: devices.Mps,
        device: str = devices.CPU,
        seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Start them.

        mps: what they share a GPU by.
        seconds: how long they may take.
        """
        request = wire.dumps(wire.call_of(device, body, kwargs))
        daemon = {} if device == devices.CPU else mps.environment()

        def arguments(rank: int, port: int, stacks: str) -> tuple[Any, ...]:
            share = devices.share_of(device, rank, size, torch.cuda.device_count())
            return rank, size, port, stacks, {**daemon, **share}, request

        self._what, self._seconds = body.__qualname__, seconds
        self._deadline = time.monotonic() + seconds
        self._everyone = range(size)
        self._ranks = Ranks(size, serve_once, arguments)

    def outcomes(self) -> list[Outcome]:
        """Return how each ended, when all have.

        Raises RankFailedError with the stacks if one did not end in time.
        """
        ranks, everyone = self._ranks, self._everyone
        # Another run that was waited for first may have taken what this one had left.
        deadline = max(self._deadline, time.monotonic() + _TO_BE_HEARD_S)
        try:
            answers = ranks.collect(everyone, deadline)
            answered = time.monotonic()
            ended: dict[int, float] = {}
            while len(ended) < len(everyone) and time.monotonic() < deadline:
                for rank in everyone:
                    if rank not in ended and not ranks.processes[rank].is_alive():
                        ended[rank] = time.monotonic() - answered
                time.sleep(0.01)
            if len(ended) < len(everyone):
                late = [rank for rank in everyone if rank not in ended]
                raise RankFailedError(
                    f"{self._what}: ranks {late} did not exit in {self._seconds:.0f} s\n"
                    + ranks.stacks(everyone)
                )
            return [
                _outcome(ranks.processes[rank].exitcode, answers[rank], ended[rank])
                for rank in everyone
            ]
        finally:
            self.kill()

    def kill(self) -> None:
        """End what still runs."""
        self._ranks.kill()


def run_at_once(
    size: int, body: Callable[..., Any], cases: Sequence[dict[str, Any]], *, mps: devices.Mps
) -> list[list[Outcome] | RankFailedError]:
    """Return what FreshRun's outcomes are for each of the kwargs, on the CPU, with a few runs at a
    time. Their `seconds` mean nothing: nobody looks while another run is waited for.
    """
    ended: list[list[Outcome] | RankFailedError] = []
    for first in range(0, len(cases), _AT_ONCE):
        runs: list[FreshRun] = []
        try:
            for kwargs in cases[first : first + _AT_ONCE]:
                runs.append(FreshRun(size, body, kwargs, mps=mps))
            for run in runs:
                try:
                    ended.append(run.outcomes())
                except RankFailedError as failed:
                    ended.append(failed)
        finally:
            for run in runs:
                run.kill()
    return ended


def _outcome(exit_code: int | None, answer: tuple[str, Any], seconds: float) -> Outcome:
    assert exit_code is not None
    kind, what = answer
    return Outcome(
        exit_code, what if kind == "value" else None, what if kind == "error" else None, seconds
    )
