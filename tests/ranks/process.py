"""What happens inside a rank: it serves the pool, or runs one body and exits.

A rank never outlives the test session: the kernel kills it when its parent dies. SIGUSR1 makes it
write the stack of every thread to its own file.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from moe_ep import BootstrapConfig
from tests.ranks import devices, wire
from tests.ranks.processes import PATIENCE_SECONDS

_PR_SET_PDEATHSIG = 1
_MANY_OBJECTS = 20_000
_GROUP_TIMEOUT = timedelta(seconds=PATIENCE_SECONDS)
NCCL_BACKENDS = "cpu:gloo,cuda:nccl"


@dataclass(frozen=True)
class RankContext:
    """What a body knows about the rank it runs on.

    rank, size: of the group that the test asked for. Where the group is a part of all processes,
        its ranks are not the global ones: a mix-up shows.
    group: its process group, Gloo; on devices.NCCL it has NCCL for CUDA tensors. None in a fresh
        process, whose environment is set as torchrun sets it.
    device: where the test wants its tensors, as torch names it: "cpu", "cuda:0".
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    device: str = "cpu"

    def bootstrap(self) -> BootstrapConfig:
        """Return the group as the library wants it."""
        return BootstrapConfig(self.size, self.rank, process_group=self.group, device=self.device)

    def barrier(self) -> None:
        """Return when all ranks of the group have entered."""
        dist.barrier(group=self.group)


def prepare(stack_file: str) -> None:
    """Tie this process to its parent, and let it tell its stack."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the request
    # Stays open: faulthandler writes to its descriptor.
    file = open(stack_file, "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    faulthandler.enable(file=file)
    torch.set_num_threads(1)
    gc.freeze()  # what was imported before the fork would take the collector seconds at the exit


class Groups:
    """A group of the last ranks for each size."""

    def __init__(self, world_size: int) -> None:
        """Make those over Gloo. Collective over all processes."""
        self._world_size = world_size
        self._gloo = {size: self._new_group(size, "gloo") for size in range(1, world_size + 1)}
        self._nccl: dict[int, dist.ProcessGroup] = {}

    def make(self, size: int, device: str) -> None:
        """Make what a body on `device` will need. Collective over all processes.

        NCCL's groups are made when first needed: they initialise CUDA, in their members. And not
        among these alone: torch 2.11 names such a group by the number of groups that a process is
        in, which here differs, and its members then wait for each other under different names.
        """
        if device == devices.NCCL and size not in self._nccl:
            self._nccl[size] = self._new_group(size, NCCL_BACKENDS)

    def of(self, size: int, device: str) -> dist.ProcessGroup:
        """Return the group for a body on `device`, which was made."""
        return (self._nccl if device == devices.NCCL else self._gloo)[size]

    def _new_group(self, size: int, backend: str) -> dist.ProcessGroup:
        members = list(range(self._world_size - size, self._world_size))
        group = dist.new_group(members, timeout=_GROUP_TIMEOUT, backend=backend)
        return cast(dist.ProcessGroup, group)  # an int where this process is no member


def serve(
    connection: Connection, worker: int, world_size: int, store_port: int, stack_file: str
) -> None:
    """Run bodies as they come, until the parent closes the connection."""
    prepare(stack_file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    store = TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=worker, world_size=world_size, timeout=_GROUP_TIMEOUT
    )
    groups = Groups(world_size)
    connection.send_bytes(wire.dumps(("value", "ready")))
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        size, environment, device, *call = wire.loads(request)
        os.environ.update(environment)
        rank = worker - (world_size - size)
        if call:
            connection.send_bytes(run(rank, size, groups, device, *call))
            spare_the_collector()
        else:
            connection.send_bytes(make_group(rank, size, groups, device))


def serve_once(
    connection: Connection,
    rank: int,
    size: int,
    store_port: int,
    stack_file: str,
    environment: dict[str, str],
    request: bytes,
) -> None:
    """Run one body in an environment like torchrun's, then leave through the interpreter's own
    exit.

    environment: what CUDA needs besides.
    """
    prepare(stack_file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store_port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the parent holds the store
        TORCHELASTIC_RESTART_COUNT="0",
        **environment,
    )
    status = 0
    try:
        connection.send_bytes(run(rank, size, None, *wire.loads(request)))
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    sys.stdout.flush()
    sys.stderr.flush()
    let_gloo_rest()
    # A forked child would skip the exit handlers and destructors that a user's process runs.
    ctypes.pythonapi.Py_Exit(status)


def let_gloo_rest(seconds: float = 5) -> None:
    """Return when no thread of a Gloo group is at work: bodies leave groups behind.

    torch's fault: such a thread may let go of a tensor after the caller's wait has returned, and
    aborts the process if Python has begun to end by then ("terminate called without an active
    exception").
    """
    deadline = time.monotonic() + seconds
    quiet = 0
    # Twice: a thread that waits for the interpreter's lock rests, too, and has it between the two.
    while quiet < 2 and time.monotonic() < deadline:
        quiet = 0 if _gloo_is_at_work() else quiet + 1
        time.sleep(1e-4)


def _gloo_is_at_work() -> bool:
    for thread in Path("/proc/self/task").iterdir():
        try:
            name, fields = (thread / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        if "gloo" in name and fields.split()[0] != "S":
            return True
    return False


def spare_the_collector() -> None:
    """Between tests: where many objects have come to stay, keep the collector from looking at them.

    Many bodies have it run, some hundreds of times, and what others have imported and compiled
    would take it tenths of a second each time.
    """
    if len(gc.get_objects()) < _MANY_OBJECTS:
        return
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # what it keeps is of the tests that are over
    gc.collect()
    gc.freeze()


def make_group(rank: int, size: int, groups: Groups, device: str) -> bytes:
    """Take part in `groups.make`; return the pickled ("value", None) or ("error", traceback).

    rank: in the group; negative where this process is none of its members.
    """
    try:
        if rank >= 0:
            devices.enter(device, rank, size)
        groups.make(size, device)
        return wire.dumps(("value", None))
    except Exception:
        return wire.dumps(("error", traceback.format_exc()))


def run(
    rank: int,
    size: int,
    groups: Groups | None,
    device: str,
    module: str,
    qualname: str,
    kwargs: dict[str, Any],
) -> bytes:
    """Return the pickled ("value", result) or ("error", traceback) of one body."""
    try:
        body = wire.find(module, qualname)
        own_device = devices.enter(device, rank, size)
        group = None if groups is None else groups.of(size, device)
        # Grad mode off, as in inference: there dispatch returns views of the workspace.
        with torch.no_grad():
            value = body(RankContext(rank, size, group, own_device), **kwargs)
        if own_device != devices.CPU:
            torch.cuda.synchronize()  # a fault of the device is this body's, and not the next one's
        return wire.dumps(("value", value))
    except Exception:
        return wire.dumps(("error", traceback.format_exc()))
