"""How do CPU tensors reach every peer, with waits that end and name the peer that is silent?

Gloo's collectives run on a thread of the process group and hold it, and the exit of the process,
until the group's own timeout. Its point-to-point operations need no thread and wait as long as the
caller says.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor


class PeerSilentError(Exception):
    """A peer did not answer. The group's connections are unusable afterwards: Gloo closes them."""

    def __init__(self, peer: int, seconds: float, reason: str) -> None:
        super().__init__(f"rank {peer} did not answer in {seconds:.1f} s: {reason}")
        self.peer = peer
        self.seconds = seconds
        self.reason = reason


class Deadline:
    """A budget of wall-clock seconds that starts now."""

    def __init__(self, seconds: float) -> None:
        self._start = time.monotonic()
        self._seconds = seconds

    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._start

    def remaining(self) -> float:
        """Return the seconds left, at least one millisecond (0 would mean forever to Gloo)."""
        return max(self._seconds - self.elapsed(), 1e-3)

    def expired(self) -> bool:
        """Return whether the budget is spent."""
        return self.elapsed() >= self._seconds


def has_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether the group can exchange CPU tensors over Gloo."""
    return "gloo" in dist.get_backend_config(group)


def exchange(
    group: dist.ProcessGroup,
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor],
    tag: int,
    deadline: Deadline,
) -> None:
    """Send `outgoing[p]` to group rank p, receive `incoming[p]` from it, for all p. Collective.

    Contiguous CPU tensors, one per rank; a peer's incoming is as long as what it sends. Empty ones
    are not sent, and this rank's own entry is copied. All ranks of the group exchange with the same
    tag in the same order. Raises PeerSilentError for the first peer, by rank, that did not answer.
    """
    rank, size = dist.get_rank(group), len(outgoing)
    incoming[rank].copy_(outgoing[rank])
    pending: list[tuple[int, dist.Work]] = []
    peer = rank
    try:
        for step in range(1, size):  # from one's neighbour on, so that no rank is everyone's first
            peer = (rank + step) % size
            if incoming[peer].numel():
                work = dist.irecv(incoming[peer], group=group, group_src=peer, tag=tag)
                pending.append((peer, _posted(work)))
            if outgoing[peer].numel():
                work = dist.isend(outgoing[peer], group=group, group_dst=peer, tag=tag)
                pending.append((peer, _posted(work)))
        for owner, work in sorted(pending, key=lambda entry: entry[0]):
            peer = owner
            work.wait(timedelta(seconds=deadline.remaining()))
    except RuntimeError as exc:
        reason = "no answer" if deadline.expired() else f"connection lost: {_first_sentence(exc)}"
        raise PeerSilentError(peer, deadline.elapsed(), reason) from exc


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None  # torch returns None only to a process outside the group
    return work


def _first_sentence(exc: RuntimeError) -> str:
    """Return what Gloo says happened, without its source line and its advice."""
    sentence = str(exc).partition("\n")[0].partition(". ")[0].rstrip(".")
    return re.sub(r"^\[\S+:\d+\] ", "", sentence)
