"""How do the ranks of a group come to share one range of memory?

The collective part only: who has failed, what all do then. Which ranks can share is
`moe_ep.sharing`, the memory itself `csrc/memory`. Every step is gathered over the group, so that
all ranks go on or all let go of everything and raise.
"""

from __future__ import annotations

import contextlib
import secrets
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from typing_extensions import Self

from moe_ep import _native
from moe_ep.collectives import CommBackend, agree, attempt
from moe_ep.construction import HostIdentity
from moe_ep.errors import MoEEpConfigError, MoEEpPlatformError, MoEEpStateError
from moe_ep.sharing import Probe, check_probes, forms_to_try, mapping_error, memory_kind, place_of

# Ranks enter the exchange together. One that fails in it tells the others, one that dies does not.
_EXCHANGE_TIMEOUT_SEC = 60.0

_NONCE_BYTES = 16


@dataclass(frozen=True)
class _Offer:
    """How peers get at a rank's memory: through its channel, or by its FABRIC handle.

    Neither in a group of one, where nobody needs to.
    """

    channel: str = ""
    fabric: bytes = b""


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
        hosts, GPUs without peer access), MoEEpConfigError if they disagree on the size or type of
        device. On CUDA devices, ranks may sit on the same or on different GPUs.
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

        Behind each row lie addresses without memory (on the CPU they can be read), so that an
        overrun faults instead of writing into a peer. The same tensor each time; it holds the
        memory. Raises MoEEpStateError while the memory is not mapped.
        """
        if self.state != "mapped":
            raise MoEEpStateError(f"workspace needs memory that is mapped, got {self.state}.")
        if self._workspace is None:
            self._workspace = from_dlpack(self._open_memory("workspace").to_dlpack())
            _keep_address(self._workspace)
        return self._workspace

    @property
    def mapped_bytes(self) -> int:
        """Bytes of this rank's own memory: its segment in whole pages (2 MiB on a GPU)."""
        return self._open_memory("mapped_bytes").mapped_bytes

    @property
    def state(self) -> str:
        """Return "mapped"; "released" between release and restore; "broken" after a restore that
        failed; "closed"."""
        return "closed" if self._memory is None else self._memory.state

    def release(self) -> None:
        """Give the physical memory back and keep the addresses; touching them then faults.

        Idempotent. Waits for the device. Not collective, but a segment is free only when all ranks
        have released it. The contents are lost.
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

    def break_off(self) -> None:
        """Release for good, where some ranks have gone another way; only close is left. Raises
        nothing."""
        if self._memory is not None:
            # What the driver says does not matter: it is broken all the same.
            with contextlib.suppress(RuntimeError, OSError):
                self._memory.break_off()

    def close(self) -> None:
        """Let go of the memory. Idempotent.

        It is unmapped with the last tensor over it, which waits for the device.
        """
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
        check_probes(probes)
        if probes[self.ep_rank].state == "mapped":
            return
        try:
            self._share(comm, probes, forms_to_try(probes))
        except BaseException:
            self.break_off()
            raise

    def _share(
        self, comm: CommBackend, probes: Sequence[Probe], forms: Sequence[_native.HandleForm]
    ) -> None:
        """Make and map the memory by the first of these forms of handle that works on all ranks."""
        form, *others = forms
        self._round += 1
        try:
            backed = attempt(lambda: self._back_own_segment(form, probes[0].nonce))
            offers = agree(comm, backed, what="allocating shared memory")
            mapped = attempt(lambda: self._map_peers(probes, offers))
            agree(comm, mapped, what="mapping shared memory")
        except MoEEpPlatformError:
            if not others:
                raise
        else:
            return
        finally:
            self._channel = self._handle = None
        # The same text each time: Python shows it once in a process.
        warnings.warn(
            "the GPUs of the group promised FABRIC handles, but sharing memory by them failed: "
            "file descriptors are used instead.",
            RuntimeWarning,
            stacklevel=1,
        )
        self._share(comm, probes, others)

    def _probe(self, comm: CommBackend) -> Probe:
        if (comm.get_rank(), comm.get_size()) != (self.ep_rank, self.ep_size):
            raise MoEEpConfigError(
                f"comm must be rank {self.ep_rank} of {self.ep_size} as in allocate, "
                f"got rank {comm.get_rank()} of {comm.get_size()}"
            )
        if self._memory is None:
            self._memory = _native.SegmentedMemory(
                memory_kind(self.device), self.ep_rank, self.ep_size, self.bytes_per_rank
            )
        return Probe(
            host=HostIdentity.of_this_process(),
            place=place_of(self.device),
            state=self._memory.state,
            segment_bytes=self.bytes_per_rank,
            mapped_bytes=self._memory.mapped_bytes,
            nonce=secrets.token_bytes(_NONCE_BYTES),
        )

    def _back_own_segment(self, form: _native.HandleForm, nonce: bytes) -> _Offer:
        """Make the own memory; return how peers get at it."""
        memory = self._open_memory("allocate")
        memory.release()  # what a form that failed has left
        memory.back_own_segment(form)
        if self.ep_size == 1:
            return _Offer()
        self._handle = memory.share_own_segment()
        if self._handle.fabric is not None:
            return _Offer(fabric=self._handle.fabric)
        self._channel = _native.FdChannel(self.ep_rank, nonce)
        return _Offer(channel=self._channel.name)

    def _map_peers(self, probes: Sequence[Probe], offers: Sequence[_Offer]) -> None:
        if self._handle is None:
            return
        memory = self._open_memory("map")
        for rank, handle in enumerate(self._handles_of_peers(offers, self._handle)):
            if handle is None:
                continue
            try:
                memory.map_peer_segment(rank, handle)
            except (RuntimeError, OSError) as error:
                own, peer = probes[self.ep_rank].place, probes[rank].place
                if not own.gpu:
                    raise
                raise mapping_error(own, rank, peer, self.device, error) from error

    def _handles_of_peers(
        self, offers: Sequence[_Offer], own: _native.ShareableHandle
    ) -> list[_native.ShareableHandle | None]:
        """Return the peers' handles by rank, None at the own place."""
        if self._channel is None:
            return [
                None if rank == self.ep_rank else _native.ShareableHandle(offer.fabric, own.bytes)
                for rank, offer in enumerate(offers)
            ]
        names = [offer.channel for offer in offers]
        return self._channel.exchange(self.ep_rank, names, self._round, own, _EXCHANGE_TIMEOUT_SEC)


def _keep_address(workspace: Tensor) -> None:
    """Promise torch.compile that the memory stays where it is. Inductor makes CUDA graphs only of
    ops that write to such inputs.

    As torch._dynamo.mark_static_address does, whose import takes seconds.
    """
    workspace._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
