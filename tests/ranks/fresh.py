"""New processes for one body: for tests in which ranks die, are interrupted, or leave without
cleaning up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.ranks import devices, wire
from tests.ranks.process import serve_once
from tests.ranks.processes import PATIENCE_SECONDS, RankFailedError, Ranks


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


def run_fresh(
    size: int,
    body: Callable[..., Any],
    kwargs: dict[str, Any],
    *,
    mps: devices.Mps,
    device: str = devices.CPU,
    seconds: float = PATIENCE_SECONDS,
) -> list[Outcome]:
    """Return how each of `size` new processes ended that ran `body(context, **kwargs)`.

    mps: what they share a GPU by.
    Raises RankFailedError with the stacks if one did not end in time.
    """
    request = wire.dumps(wire.call_of(device, body, kwargs))
    everyone = range(size)
    daemon = {} if device == devices.CPU else mps.environment()

    def arguments(rank: int, port: int, stacks: str) -> tuple[Any, ...]:
        share = devices.share_of(device, rank, size, torch.cuda.device_count())
        return rank, size, port, stacks, {**daemon, **share}, request

    deadline = time.monotonic() + seconds
    ranks = Ranks(size, serve_once, arguments)
    try:
        answers = ranks.collect(everyone, deadline)
        answered = time.monotonic()
        ended: dict[int, float] = {}
        while len(ended) < size and time.monotonic() < deadline:
            for rank in everyone:
                if rank not in ended and not ranks.processes[rank].is_alive():
                    ended[rank] = time.monotonic() - answered
            time.sleep(0.01)
        if len(ended) < size:
            late = [rank for rank in everyone if rank not in ended]
            raise RankFailedError(
                f"{body.__qualname__}: ranks {late} did not exit in {seconds:.0f} s\n"
                + ranks.stacks(everyone)
            )
        return [
            _outcome(ranks.processes[rank].exitcode, answers[rank], ended[rank])
            for rank in everyone
        ]
    finally:
        ranks.kill()


def _outcome(exit_code: int | None, answer: tuple[str, Any], seconds: float) -> Outcome:
    assert exit_code is not None
    kind, what = answer
    return Outcome(
        exit_code, what if kind == "value" else None, what if kind == "error" else None, seconds
    )
