"""The processes that torchrun (or mpirun) started are the ranks: every one runs the same tests, and
all see all results.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import devices, wire
from tests.ranks.fresh import FreshRun, Outcome
from tests.ranks.process import Groups, let_gloo_rest, run
from tests.ranks.processes import PATIENCE_SECONDS, RankFailedError
from tools.mps import share_of_gpu

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def world_size_problem(environment: Mapping[str, str]) -> str | None:
    """Return what is wrong with a distributed run, which would otherwise pass in groups of one;
    else None.
    """
    ranks = [name for name in _RANK_VARIABLES if name in environment]
    if ranks and not environment.get("WORLD_SIZE"):
        return (
            f"{ranks[0]}={environment[ranks[0]]} is set, but WORLD_SIZE is not: each process would "
            "test alone. Start with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        )
    if int(environment.get("WORLD_SIZE") or 1) > 1 and "RANK" not in environment:
        return (
            f"WORLD_SIZE={environment['WORLD_SIZE']} is set, but RANK is not. Start with torchrun."
        )
    return None


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether this process is one of several that a launcher started."""
    return int(environment.get("WORLD_SIZE") or 1) > 1


def take_share_of_gpu(environment: MutableMapping[str, str]) -> None:
    """Set this process's share of a GPU, unless the launcher did. Before CUDA is initialised."""
    for name, value in share_of_gpu(int(environment["WORLD_SIZE"])).items():
        environment.setdefault(name, value)


class LaunchedRanks:
    """Runs bodies in this process and its peers; all issue the same calls in the same order."""

    def __init__(self, stderr: int) -> None:
        """stderr: a descriptor of the true one, which pytest does not capture."""
        self._stderr = stderr
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._groups = Groups(self._world_size)
        self._mps = devices.Mps()
        self.max_size = self._world_size

    def run(
        self,
        size: int,
        body: Callable[..., Any],
        kwargs: dict[str, Any],
        *,
        device: str = devices.CPU,
        seconds: float = PATIENCE_SECONDS,
    ) -> list[Any]:
        """Return what `body` returned on each of the last `size` processes, on every process.

        Raises RankFailedError on all. A body that does not end in time ends this process, with its
        stack on stderr.
        """
        self._skip_unless(size)
        rank = self._rank - (self._world_size - size)
        mine = wire.dumps(("value", None))
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stderr)
        try:
            self._groups.make(size, device)
            if rank >= 0:
                copied = wire.loads(wire.dumps(kwargs))
                call = wire.call_of(device, body, copied)
                mine = run(rank, size, self._groups, *call)
            answers = self._gather(mine)[-size:]
        finally:
            faulthandler.cancel_dump_traceback_later()
        errors = [
            f"--- rank {rank} raised\n{what}"
            for rank, (kind, what) in enumerate(answers)
            if kind == "error"
        ]
        if errors:
            raise RankFailedError("\n".join([f"{body.__qualname__} failed", *errors]))
        return [what for _, what in answers]

    def run_fresh(
        self,
        size: int,
        body: Callable[..., Any],
        kwargs: dict[str, Any],
        *,
        device: str = devices.CPU,
        seconds: float = PATIENCE_SECONDS,
    ) -> list[Outcome]:
        """Start fresh ranks once, from the first process, and return their outcomes on every
        process.
        """
        mine = wire.dumps(("value", None))
        if self._rank == 0:
            try:
                how = {"mps": self._mps, "device": device, "seconds": seconds}
                mine = wire.dumps(("value", FreshRun(size, body, kwargs, **how).outcomes()))
            except RankFailedError as failed:
                mine = wire.dumps(("error", str(failed)))
        kind, what = self._gather(mine)[0]
        if kind == "error":
            raise RankFailedError(what)
        return what  # type: ignore[no-any-return]

    def run_waiting(
        self, size: int, body: Callable[..., Any], kwargs: dict[str, Any], among: object
    ) -> list[Outcome]:
        """As run_fresh: on all processes, a test at a time."""
        return self.run_fresh(size, body, kwargs)

    def close(self) -> None:
        """Leave the default group."""
        self._mps.close()
        dist.destroy_process_group()
        let_gloo_rest()

    def _skip_unless(self, size: int) -> None:
        if size > self._world_size:
            pytest.skip(f"needs {size} ranks, the launcher started {self._world_size}")

    def _gather(self, mine: bytes) -> list[tuple[str, Any]]:
        everyone: list[Any] = [None] * self._world_size
        dist.all_gather_object(everyone, mine)
        return [wire.loads(answer) for answer in everyone]
