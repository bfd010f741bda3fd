"""How are ranks started, watched and ended? Forked from one server that has imported torch
already.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from tests.ranks import wire
from tools import mps

_FORK = multiprocessing.get_context("forkserver")
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# What bodies and test modules import, paid for once. (torch_dist loads dynamo when constructed.)
_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "pytest",
    "hypothesis",
    "moe_ep",
    "tests.ranks.process",
)


PATIENCE_SECONDS = 200.0
"""How long a body may take. Only for one that hangs: within the limit that pytest has for a test,
and far above what the longest takes on a machine with other work.
"""

_STACK_SECONDS = 10.0


class RankFailedError(AssertionError):
    """A body failed on a rank, or a rank died or did not end. The message has every rank's part."""


def start_server() -> None:
    """Start the process that ranks are forked from. Once; they inherit what it has imported, and
    its environment.
    """
    _FORK.set_forkserver_preload(list(_PRELOADED))
    own_environment = dict(os.environ)
    # Those that share a GPU are told their daemon by devices.Mps.
    os.environ.clear()
    os.environ.update(mps.without_daemon(own_environment))
    for name in _LAUNCHER_VARIABLES:  # a launcher that started us did not start them
        os.environ.pop(name, None)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # no name lookup, no firewall
    os.environ["OMP_NUM_THREADS"] = "1"
    forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(own_environment)


class Ranks:
    """Some processes, and the connection to each."""

    def __init__(
        self,
        count: int,
        target: Callable[..., None],
        arguments: Callable[[int, int, str], tuple[Any, ...]],
    ) -> None:
        """Start them.

        arguments: what `target` gets after its connection, from the rank, the port of the ranks'
            store, and the path of the rank's stack file.
        """
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        # Held here, so that no rank's death takes it away from the others.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.connections: list[Connection] = []
        self.processes: list[ForkServerProcess] = []
        for rank in range(count):
            ours, theirs = _FORK.Pipe()
            process = _FORK.Process(
                target=target,
                args=(theirs, *arguments(rank, self._store.port, self.stack_file(rank))),
                daemon=True,
                name=f"rank {rank}",
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def stack_file(self, rank: int) -> str:
        """Return where a rank writes its stack."""
        return str(Path(self._directory.name) / f"{rank}.txt")

    def collect(
        self, ranks: range, deadline: float, grace: float | None = None
    ) -> dict[int, tuple[str, Any]]:
        """Return what each rank sent, until all have, or died, or the deadline passed.

        grace: seconds that the others still get once one has failed or died; None: until the
            deadline.
        """
        answers: dict[int, tuple[str, Any]] = {}
        by_connection = {self.connections[rank]: rank for rank in ranks}
        while by_connection and time.monotonic() < deadline:
            for ready in wait(list(by_connection), timeout=deadline - time.monotonic()):
                assert isinstance(ready, Connection)
                rank = by_connection.pop(ready)
                try:
                    answers[rank] = wire.loads(ready.recv_bytes())
                except EOFError:
                    answers[rank] = ("died", None)
                if grace is not None and answers[rank][0] != "value":
                    deadline = min(deadline, time.monotonic() + grace)
        return answers

    def stacks(self, ranks: range) -> str:
        """Return the Python stack of each rank that still runs, for a message."""
        alive = [rank for rank in ranks if self.processes[rank].is_alive()]
        for rank in alive:
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)
        texts: dict[int, str] = {}
        before: dict[int, str] | None = None
        deadline = time.monotonic() + _STACK_SECONDS
        # Nobody tells when a handler has written all of it: when there is something, and no more.
        while (texts != before or not all(texts.values())) and time.monotonic() < deadline:
            before = texts
            time.sleep(0.3)
            texts = {rank: Path(self.stack_file(rank)).read_text() for rank in alive}
        return "\n".join(
            f"--- stack of rank {rank - ranks.start}\n{text}" for rank, text in texts.items()
        )

    def kill(self) -> None:
        """End what still runs, and clean up."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join()
            connection.close()
        self._directory.cleanup()
