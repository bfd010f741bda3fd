"""How does the group agree? By the control plane's collectives and errors that all ranks raise.

Nothing here carries tokens: it serves construction, memory set-up and checkpointing.
"""

from __future__ import annotations

import pickle
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
import torch.distributed as dist

from moe_ep.errors import (
    MoEEpConfigError,
    MoEEpError,
    MoEEpPlatformError,
    MoEEpTimeoutError,
)
from moe_ep.limits import DEFAULT_TIMEOUT_SEC
from moe_ep.peer_exchange import Deadline, PeerSilentError, exchange, has_gloo

T = TypeVar("T")

_CONTROL_TAG = 0x6D6F65  # apart from the tag 0 that a user's own sends have by default


@runtime_checkable
class CommBackend(Protocol):
    """The collectives that set-up needs. All ranks of the group call them in the same order."""

    def get_rank(self) -> int:
        """Return this process's rank in the group."""
        ...

    def get_size(self) -> int:
        """Return the number of ranks in the group."""
        ...

    def allgather(self, obj: Any, /) -> list[Any]:
        """Return every rank's picklable object, in rank order."""
        ...

    def barrier(self) -> None:
        """Return when all ranks have entered."""
        ...


class SingleRankComm:
    """The group of one: nothing to communicate."""

    def get_rank(self) -> int:
        """Return 0."""
        return 0

    def get_size(self) -> int:
        """Return 1."""
        return 1

    def allgather(self, obj: Any, /) -> list[Any]:
        """Return [obj]."""
        return [obj]

    def barrier(self) -> None:
        """Return at once."""


class TorchDistributedComm:
    """The collectives over a torch.distributed process group.

    Over Gloo each wait is bounded by `timeout_sec` and names the peer that did not answer
    (MoEEpTimeoutError). Over a group that has only NCCL, the group's own timeout holds.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, timeout_sec: float = DEFAULT_TIMEOUT_SEC
    ) -> None:
        self.group = group
        self._timeout_sec = timeout_sec

    def get_rank(self) -> int:
        """Return this process's rank in the group (not its global rank)."""
        return dist.get_rank(self.group)

    def get_size(self) -> int:
        """Return the number of ranks in the group."""
        return dist.get_world_size(self.group)

    def allgather(self, obj: Any, /) -> list[Any]:
        """Return every rank's picklable object, in rank order."""
        if has_gloo(self.group):
            return self._allgather_bounded(obj)
        objects: list[Any] = [None] * self.get_size()
        dist.all_gather_object(objects, obj, group=self.group)
        return objects

    def barrier(self) -> None:
        """Return when all ranks have entered."""
        self.allgather(None)

    def _allgather_bounded(self, obj: Any) -> list[Any]:
        rank, size = self.get_rank(), self.get_size()
        # On the host, and the others as it, whatever torch's default device is.
        mine = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        deadline = Deadline(self._timeout_sec)
        lengths = [mine.new_zeros(1, dtype=torch.int64) for _ in range(size)]
        try:
            my_length = mine.new_tensor([mine.numel()], dtype=torch.int64)
            exchange(self.group, [my_length] * size, lengths, _CONTROL_TAG, deadline)
            pickles = [mine.new_empty(int(n)) for n in lengths]
            exchange(self.group, [mine] * size, pickles, _CONTROL_TAG, deadline)
        except PeerSilentError as silent:
            raise MoEEpTimeoutError(
                f"rank {rank} waited {silent.seconds:.1f} s for rank {silent.peer} to make the "
                f"same call ({silent.reason}). Rank {silent.peer} may be dead, slow, or making "
                "other calls: all ranks create, prepare, restore and reinitialize together."
            ) from None
        return [obj if r == rank else pickle.loads(bytes(p.numpy())) for r, p in enumerate(pickles)]


class _Mpi4pyComm:
    """An mpi4py communicator under this library's names."""

    def __init__(self, communicator: Any) -> None:
        self.communicator = communicator

    def get_rank(self) -> int:
        return int(self.communicator.Get_rank())

    def get_size(self) -> int:
        return int(self.communicator.Get_size())

    def allgather(self, obj: Any, /) -> list[Any]:
        return list(self.communicator.allgather(obj))

    def barrier(self) -> None:
        self.communicator.Barrier()


def as_comm_backend(candidate: Any, *, timeout_sec: float = DEFAULT_TIMEOUT_SEC) -> CommBackend:
    """Return `candidate` as a CommBackend; a ProcessGroup and an mpi4py communicator are wrapped.

    timeout_sec: of a ProcessGroup, see TorchDistributedComm.
    Raises TypeError for anything else.
    """

    def has(*names: str) -> bool:
        return all(callable(getattr(candidate, name, None)) for name in names)

    if isinstance(candidate, dist.ProcessGroup):
        return TorchDistributedComm(candidate, timeout_sec=timeout_sec)
    if has("get_rank", "get_size", "allgather", "barrier"):
        return cast(CommBackend, candidate)
    if has("Get_rank", "Get_size", "allgather", "Barrier"):
        return _Mpi4pyComm(candidate)
    raise TypeError(
        "comm_backend must have get_rank, get_size, allgather and barrier (or be a ProcessGroup or "
        f"an mpi4py communicator), got {type(candidate).__name__}."
    )


def group_behind(comm: CommBackend) -> object:
    """Return what two CommBackends over the same group have in common, to be compared by identity:
    the process group, the mpi4py communicator, else the CommBackend itself."""
    if isinstance(comm, TorchDistributedComm):
        return comm.group
    return comm.communicator if isinstance(comm, _Mpi4pyComm) else comm


@dataclass(frozen=True)
class _Outcome:
    step: str
    host: str
    value: Any
    failed_as: str | None
    reason: str


def attempt(step: Callable[[], T]) -> T | Exception:
    """Return what the step returns or raises, as `agree` wants it."""
    try:
        return step()
    except Exception as error:
        # Frames hold memory and descriptors, those of its causes, too: they go now, not when the
        # user drops the error.
        reason: BaseException | None = error
        while reason is not None:
            traceback.clear_frames(reason.__traceback__)
            reason = reason.__cause__
        return error


def agree(comm: CommBackend, outcome: T | Exception, *, what: str) -> list[T]:
    """Gather every rank's outcome; return the values in rank order if no rank failed. Collective.

    outcome: what this rank's part came to: a picklable value, or the exception that stopped it.
    what: the step's name in the message; equal on all ranks.

    If any rank failed, all ranks raise the same, with every rank's reason: the failures' class
    where all have one and it is the library's, TypeError or KeyError, else MoEEpPlatformError. On a
    rank that failed, its own exception is the cause. A group of one raises that exception itself
    where it need not change the class. Raises MoEEpConfigError on all ranks if they are in
    different steps, and MoEEpTimeoutError where a rank does not come, if `comm` notices.
    """
    failure = outcome if isinstance(outcome, Exception) else None
    # The class travels by name: a third party's exception may not unpickle elsewhere.
    mine = _Outcome(
        step=what,
        host=socket.gethostname(),
        value=outcome if failure is None else None,
        failed_as=None if failure is None else type(failure).__name__,
        reason="fine" if failure is None else _reason(failure),
    )
    try:
        answers: list[_Outcome] = comm.allgather(mine)
    except MoEEpTimeoutError as missed:
        raise MoEEpTimeoutError(f"{what}: {missed}") from None
    hosts = [answer.host for answer in answers]
    classes = {answer.failed_as for answer in answers if answer.failed_as is not None}
    if classes:
        kept = _KEPT_BY_NAME.get(classes.pop()) if len(classes) == 1 else None
        if kept is not None and failure is not None and len(answers) == 1:
            raise failure
        reasons = {rank: answer.reason for rank, answer in enumerate(answers)}
        message = f"{what} failed: {by_rank(reasons, hosts)}."
        raise (kept or MoEEpPlatformError)(message) from failure
    steps = {rank: answer.step for rank, answer in enumerate(answers)}
    if len(set(steps.values())) > 1:
        raise MoEEpConfigError(
            f"the ranks are in different steps: {by_rank(steps, hosts)}. Make the same calls with "
            "equal arguments on all ranks."
        )
    return [answer.value for answer in answers]


def by_rank(values: Mapping[int, object], hosts: list[str] | None = None) -> str:
    """Write values by rank, equal ones together: "ranks 0, 1: 8; rank 2 (host b): 16".

    hosts: each rank's host name, shown where the group is on more than one.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    show_hosts = hosts is not None and len(set(hosts)) > 1
    for rank, value in values.items():
        host = f" (host {hosts[rank]})" if hosts is not None and show_hosts else ""
        groups.setdefault((str(value), host), []).append(rank)
    return "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}{host}: {value}"
        for (value, host), ranks in groups.items()
    )


# The library's own errors, and what else a wrong argument raises.
_KEPT: tuple[type[Exception], ...] = (TypeError, KeyError, *MoEEpError.__subclasses__())
_KEPT_BY_NAME = {cls.__name__: cls for cls in _KEPT}


def _reason(failure: Exception) -> str:
    # str() of a KeyError is its argument's repr.
    text = str(failure.args[0] if isinstance(failure, KeyError) else failure).rstrip(".")
    return text if isinstance(failure, _KEPT) else f"{type(failure).__name__}: {text}"
