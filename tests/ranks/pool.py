"""The processes that serve a whole test session: a body costs a message, not a start.

After any failure all of them are replaced, so that no test meets what another left behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.ranks import devices, wire
from tests.ranks.fresh import FreshRun, Outcome, run_at_once
from tests.ranks.process import serve
from tests.ranks.processes import PATIENCE_SECONDS, RankFailedError, Ranks
from tools.mps import share_of_gpu

MAX_RANKS = 8
_CUDA_START_SECONDS = 60.0
# Ranks whose peer failed end by themselves, on a GPU at the latest with the time-out of their
# kernels. One that is killed in a kernel takes the MPS daemon along.
_GRACE_SECONDS = 3.0
_CUDA_GRACE_SECONDS = devices.TIMEOUT_SECONDS + 2.0


class RankPool:
    """Runs bodies on ranks that live as long as it."""

    max_size = MAX_RANKS

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._mps = devices.Mps()
        self._used_on_gpus: set[tuple[str, int]] = set()  # device, size
        # Of each body the cases that were played and not yet asked for.
        self._waited: dict[
            tuple[str, str], list[tuple[dict[str, Any], list[Outcome] | RankFailedError]]
        ] = {}

    def run(
        self,
        size: int,
        body: Callable[..., Any],
        kwargs: dict[str, Any],
        *,
        device: str = devices.CPU,
        seconds: float = PATIENCE_SECONDS,
    ) -> list[Any]:
        """Return what `body(context, **kwargs)` returned on each of `size` ranks.

        A rank has the eighth part of a GPU whatever the size: it is fixed for a process's life.
        Raises RankFailedError with the traceback of each rank that raised, the exit code of each
        that died and the stack of each that did not end in time.
        """
        used = range(MAX_RANKS - size, MAX_RANKS)
        environment: dict[str, str] = {}
        grace = _GRACE_SECONDS
        new_on_gpus = device != devices.CPU and (device, size) not in self._used_on_gpus
        if device != devices.CPU:
            environment = {**self._mps.environment(), **share_of_gpu(MAX_RANKS)}
            grace = _CUDA_GRACE_SECONDS
        if new_on_gpus:
            self._used_on_gpus.add((device, size))
            seconds += _CUDA_START_SECONDS
        call = wire.call_of(device, body, kwargs)
        ranks = self._running()
        try:
            if new_on_gpus:
                ask = wire.dumps((size, environment, device))
                self._answers(ranks, range(MAX_RANKS), ask, "making the group", seconds, grace)
            request = wire.dumps((size, environment, *call))
            return self._answers(ranks, used, request, body.__qualname__, seconds, grace)
        except RankFailedError:
            self._replace_all()
            raise
        except BaseException:  # pytest's time limit or Ctrl-C: ranks are in the middle of a body
            print(ranks.stacks(used))
            self._replace_all()
            raise

    def run_fresh(
        self,
        size: int,
        body: Callable[..., Any],
        kwargs: dict[str, Any],
        *,
        device: str = devices.CPU,
        seconds: float = PATIENCE_SECONDS,
    ) -> list[Outcome]:
        """Return how each of `size` new processes ended; see `fresh.FreshRun`."""
        outcomes: list[Outcome] = []
        try:
            how = {"mps": self._mps, "device": device, "seconds": seconds}
            outcomes = FreshRun(size, body, kwargs, **how).outcomes()
        finally:
            killed = not outcomes or any(outcome.exit_code < 0 for outcome in outcomes)
            if device != devices.CPU and killed:
                self._kill()  # the daemon is theirs, too
                self._mps.distrust()
        return outcomes

    def run_waiting(
        self,
        size: int,
        body: Callable[..., Any],
        kwargs: dict[str, Any],
        among: Sequence[dict[str, Any]],
    ) -> list[Outcome]:
        """As run_fresh on the CPU, for a body that mostly waits: the first case that asks has all
        of them played, and each takes its own.

        among: the kwargs of every case.
        """
        waited = self._waited.setdefault(wire.name_of(body), [])
        if not any(case == kwargs for case, _ in waited):
            waited[:] = zip(among, run_at_once(size, body, among, mps=self._mps), strict=True)
        place = next(i for i, (case, _) in enumerate(waited) if case == kwargs)
        _, ended = waited.pop(place)
        if isinstance(ended, RankFailedError):
            raise ended
        return ended

    def close(self) -> None:
        """End the processes."""
        self._kill()
        self._mps.close()

    def _replace_all(self) -> None:
        """End the processes, and the MPS daemon if they used it; the next call starts new ones."""
        used_cuda = bool(self._used_on_gpus)
        self._kill()
        if used_cuda:
            self._mps.distrust()

    def _kill(self) -> None:
        if self._ranks is not None:
            self._ranks.kill()
            self._ranks = None
        self._used_on_gpus.clear()

    def _answers(
        self, ranks: Ranks, asked: range, request: bytes, what: str, seconds: float, grace: float
    ) -> list[Any]:
        """Return what each rank asked returned. Raises RankFailedError unless all did."""
        for rank in asked:
            ranks.connections[rank].send_bytes(request)
        answers = ranks.collect(asked, time.monotonic() + seconds, grace)
        if all(answers.get(rank, ("", None))[0] == "value" for rank in asked):
            return [answers[rank][1] for rank in asked]
        raise RankFailedError(_report(ranks, asked, answers, what, seconds))

    def _running(self) -> Ranks:
        if self._ranks is None:
            everyone = range(MAX_RANKS)
            ranks = Ranks(
                MAX_RANKS, serve, lambda rank, port, stacks: (rank, MAX_RANKS, port, stacks)
            )
            ready = ranks.collect(everyone, time.monotonic() + PATIENCE_SECONDS)
            if any(ready.get(rank) != ("value", "ready") for rank in everyone):
                message = f"the pool did not start: {ready}\n{ranks.stacks(everyone)}"
                ranks.kill()
                raise RankFailedError(message)
            self._ranks = ranks
        return self._ranks


def _report(
    ranks: Ranks,
    used: range,
    answers: dict[int, tuple[str, Any]],
    what_failed: str,
    seconds: float,
) -> str:
    lines = [f"{what_failed} failed on {len(used)} ranks"]
    for rank, worker in enumerate(used):
        kind, what = answers.get(worker, ("silent", None))
        if kind == "error":
            lines.append(f"--- rank {rank} raised\n{what}")
        elif kind == "died":
            ranks.processes[worker].join(1)
            lines.append(f"--- rank {rank} died with exit code {ranks.processes[worker].exitcode}")
        elif kind == "silent":
            lines.append(f"--- rank {rank} did not end (limit {seconds:.0f} s)")
    silent = [worker for worker in used if worker not in answers]
    if silent:
        lines.append(ranks.stacks(used))
    return "\n".join(lines)
