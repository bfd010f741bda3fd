"""How do the ranks of a group come to share one range of memory?

The collective part only: which ranks can share, who has failed, what all do then. The memory
itself is `csrc/memory`. Every step is gathered over the group, so that all ranks go on or all let
go of everything and raise.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from typing_extensions import Self

from moe_ep import _native
from moe_ep.collectives import CommBackend, agree, attempt, by_rank
from moe_ep.construction import HostIdentity
from moe_ep.errors import MoEEpConfigError, MoEEpPlatformError, MoEEpStateError

# Ranks enter the exchange together. One that fails in it tells the others, one that dies does not.
_EXCHANGE_TIMEOUT_SEC = 60.0

_NONCE_BYTES = 16


@dataclass(frozen=True)
class _Probe:
    """What a rank tells the others before any memory is made."""

    host: HostIdentity
    device: str
    state: str
    segment_bytes: int
    mapped_bytes: int
    available_bytes: int
    available_scope: int
    nonce: bytes


class SymmetricMemory:
    """One segment of memory on each rank of a group, all of them mapped in every process.

    Made by `allocate`. A view of `workspace` keeps the memory mapped, whatever happens to this
    object. Nothing has a name outside the processes: when they end, in whatever way, nothing is
    left.
    """

    def __init__(
        self, ep_rank: int, ep_size: int, segment_bytes: int, device: torch.device
    ) -> None:
        """No memory yet: `allocate` is the way to make one."""
        self.ep_rank = ep_rank
        self.ep_size = ep_size
        self.bytes_per_rank = segment_bytes
        self.device = device
        self._memory: _native.SegmentedMemory | None = None
        # While joining: where peers reach this rank, and what they get.
        self._channel: _native.FdChannel | None = None
        self._handle: _native.ShareableHandle | None = None
        self._workspace: Tensor | None = None
        self._round = 0

    @classmethod
    def allocate(cls, comm: CommBackend, segment_bytes: int, device: torch.device) -> Self:
        """Allocate zero-filled memory, `segment_bytes` on each rank. Collective over `comm`.

        Raises on all ranks together, with every rank's reason, and then leaves nothing behind:
        MoEEpPlatformError if a rank cannot allocate or the ranks cannot share memory (several
        hosts), MoEEpConfigError if they disagree on the size or kind of device.
        """
        memory = cls(comm.get_rank(), comm.get_size(), segment_bytes, device)
        try:
            memory._join(comm)
        except BaseException:
            memory.close()
            raise
        return memory

    @property
    def workspace(self) -> Tensor:
        """uint8 [ep_size, segment_bytes], strides (rank_stride, 1); row r is rank r's memory.

        Behind each row lie addresses that only read, so that an overrun faults instead of writing
        into a peer. The same tensor each time; it holds the memory. Raises MoEEpStateError while
        the memory is not mapped.
        """
        if self.state != "mapped":
            raise MoEEpStateError(f"workspace needs memory that is mapped, got {self.state}.")
        if self._workspace is None:
            self._workspace = from_dlpack(self._open_memory("workspace").to_dlpack())
        return self._workspace

    @property
    def mapped_bytes(self) -> int:
        """Bytes of this rank's own memory: its segment in whole pages."""
        return self._open_memory("mapped_bytes").mapped_bytes

    @property
    def state(self) -> str:
        """Return "mapped"; "released" between release and restore; "broken" after a restore that
        failed; "closed"."""
        return "closed" if self._memory is None else self._memory.state

    def release(self) -> None:
        """Give the physical memory back and keep the addresses; touching them then faults.

        Idempotent. Not collective, but a segment is free only when all ranks have released it. The
        contents are lost.
        """
        self._open_memory("release").release()

    def restore(self, comm: CommBackend) -> None:
        """Put new, zero-filled memory behind the addresses that `release` kept.

        Collective over `comm`: the group of `allocate`, or another one with the same ranks.
        Idempotent. Raises on all ranks together; if that was after the first step, the memory is
        broken for good, and the ranks must close it and allocate anew.
        """
        self._open_memory("restore")
        self._join(comm)

    def close(self) -> None:
        """Let go of the memory; it is unmapped with the last tensor over it. Idempotent."""
        self._workspace = None
        self._memory = None

    def _open_memory(self, step: str) -> _native.SegmentedMemory:
        if self._memory is None:
            raise MoEEpStateError(f"{step} after close: allocate a new SymmetricMemory.")
        return self._memory

    def _join(self, comm: CommBackend) -> None:
        """Bring all ranks from addresses without memory to the same memory on all of them."""
        outcome = attempt(lambda: self._probe(comm))
        probes = agree(comm, outcome, what="reserving shared memory")
        _check_probes(probes)
        if probes[self.ep_rank].state == "mapped":
            return
        self._round += 1
        try:
            backed = attempt(lambda: self._back_own_segment(probes[0].nonce))
            names = agree(comm, backed, what="allocating shared memory")
            mapped = attempt(lambda: self._map_peers(names))
            agree(comm, mapped, what="mapping shared memory")
        except BaseException:
            self._open_memory("restore").break_off()
            raise
        finally:
            self._channel = self._handle = None

    def _probe(self, comm: CommBackend) -> _Probe:
        if (comm.get_rank(), comm.get_size()) != (self.ep_rank, self.ep_size):
            raise MoEEpConfigError(
                f"comm must be rank {self.ep_rank} of {self.ep_size} as in allocate, "
                f"got rank {comm.get_rank()} of {comm.get_size()}"
            )
        if self.device.type != "cpu":
            raise MoEEpPlatformError(f"device must be a CPU to share memory, got {self.device}")
        if self._memory is None:
            self._memory = _native.SegmentedMemory(
                _native.host_memory(), self.ep_rank, self.ep_size, self.bytes_per_rank
            )
        available_bytes, available_scope = _native.available_memory()
        return _Probe(
            host=HostIdentity.of_this_process(),
            device=self.device.type,
            state=self._memory.state,
            segment_bytes=self.bytes_per_rank,
            mapped_bytes=self._memory.mapped_bytes,
            available_bytes=available_bytes,
            available_scope=available_scope,
            nonce=secrets.token_bytes(_NONCE_BYTES),
        )

    def _back_own_segment(self, nonce: bytes) -> str:
        """Make the own memory; return where peers reach this rank ("": alone, nobody needs to)."""
        memory = self._open_memory("allocate")
        memory.back_own_segment()
        if self.ep_size == 1:
            return ""
        self._channel = _native.FdChannel(self.ep_rank, nonce)
        self._handle = memory.share_own_segment()
        return self._channel.name

    def _map_peers(self, names: Sequence[str]) -> None:
        if self._channel is None or self._handle is None:
            return
        memory = self._open_memory("map")
        handles = self._channel.exchange(
            self.ep_rank, names, self._round, self._handle, _EXCHANGE_TIMEOUT_SEC
        )
        for rank, handle in enumerate(handles):
            if handle is not None:
                memory.map_peer_segment(rank, handle)


def _check_probes(probes: Sequence[_Probe]) -> None:
    """Raise the same on all ranks: all see the same probes."""
    _require_equal("segment_bytes", [p.segment_bytes for p in probes])
    _require_equal("device", [p.device for p in probes])
    states = {p.state for p in probes}
    if states - {"released"} and states != {"mapped"}:
        table = by_rank({rank: p.state for rank, p in enumerate(probes)})
        raise MoEEpStateError(f"restore needs all ranks to have released the memory, got {table}.")
    if len({p.host.boot_id for p in probes}) > 1:
        hosts = by_rank({rank: p.host for rank, p in enumerate(probes)})
        raise MoEEpPlatformError(
            f"shared memory needs all ranks of the group on one host, got {hosts}. "
            "Across hosts, use the backend torch_dist."
        )
    if len({p.host.network for p in probes}) > 1:
        networks = by_rank({rank: p.host.network for rank, p in enumerate(probes)})
        raise MoEEpPlatformError(
            f"shared memory needs all ranks of the group in one network namespace, got {networks}. "
            "Let the containers share it, or use the backend torch_dist."
        )
    if states == {"released"}:
        _check_available(probes)


def _require_equal(name: str, values: Sequence[object]) -> None:
    if len(set(values)) > 1:
        table = by_rank(dict(enumerate(values)))
        raise MoEEpConfigError(f"{name} must be the same on all ranks, got {table}.")


def _check_available(probes: Sequence[_Probe]) -> None:
    """All segments must fit together: a rank alone only knows about its own."""
    for scope in sorted({p.available_scope for p in probes}):
        ranks = [p for p in probes if p.available_scope == scope]
        needed = sum(p.mapped_bytes for p in ranks)
        available = min(p.available_bytes for p in ranks)
        if needed > available:
            raise MoEEpPlatformError(
                f"{len(ranks)} segments of {ranks[0].mapped_bytes} bytes need {needed} bytes of "
                f"memory together, {available} are available. Lower max_tokens_per_rank or the "
                "number of ranks on this host."
            )
