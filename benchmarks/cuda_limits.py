"""How fast can these GPUs copy? The limits that a round is held against, by the same processes."""

from __future__ import annotations

import torch
from contestants import Contestant
from places import Place, timing_events
from torch import Tensor

COPY_BYTES = 256 << 20
"""Of each rank: past what the caches hold."""

_COPIES = 4


class CudaCopy(Contestant):
    """All ranks copy at once. A sample's time is what `counted_bytes` take at that rate."""

    rounds_per_sample = _COPIES

    def __init__(
        self,
        counted_bytes: int,
        bytes_per_copy: int,
        place: Place,
        source_bytes: int = COPY_BYTES,
    ) -> None:
        """bytes_per_copy: what one copy by all ranks counts."""
        self.counted_bytes = counted_bytes
        self._scale = counted_bytes / bytes_per_copy / _COPIES
        self._line_up = place.spin.wait
        size = source_bytes // 4
        self._source = torch.empty(size, dtype=torch.int32, device=place.device).random_()
        self._target = self._new_target(place)

    def _new_target(self, place: Place) -> Tensor:
        return torch.empty_like(self._source)

    def _copy(self) -> None:
        self._target.copy_(self._source)

    def run(self, samples: int) -> list[tuple[float, ...]]:
        begin, end = timing_events()
        stamps: list[tuple[float, ...]] = []
        for _ in range(samples):
            self._line_up()
            begin.record()
            for _ in range(_COPIES):
                self._copy()
            end.record()
            end.synchronize()
            stamps.append((begin.elapsed_time(end) * 1e-3 * self._scale,))
        return stamps

    def verify(self) -> None:
        self._target.zero_()
        self.run(1)
        self.verify_last_round()

    def verify_last_round(self) -> None:
        if not torch.equal(self._arrived(), self._source):
            raise AssertionError(f"{self.name} left other bytes than it was given")

    def _arrived(self) -> Tensor:
        return self._target.to(self._source.device)

    def close(self) -> None:
        torch.cuda.synchronize()


class KernelCopy(CudaCopy):
    """A plain kernel that reads 16 bytes a thread, inverts the bits and writes them: the copy limit
    of work by kernels.
    """

    name = "copy kernel"

    def _copy(self) -> None:
        torch.bitwise_not(self._source, out=self._target)

    def _arrived(self) -> Tensor:
        return self._target.bitwise_not()


class DriverCopy(CudaCopy):
    """cudaMemcpyAsync within the GPU (torch's copy_)."""

    name = "memcpy"


class LinkCopy(CudaCopy):
    """cudaMemcpyPeerAsync to the next GPU, all GPUs at once: the limit of one direction."""

    name = "link memcpy"

    def _new_target(self, place: Place) -> Tensor:
        there = torch.device("cuda", next_gpu(place))
        return torch.empty(self._source.shape, dtype=torch.int32, device=there)


def next_gpu(place: Place) -> int:
    """Return the GPU that a rank copies to."""
    return (place.device.index + 1) % place.gpus


def cuda_limits(physical_bytes: int, link_bytes: int, place: Place) -> list[Contestant]:
    """Return the limits that these GPUs have; the first is what a round's share is of."""
    copied = 2 * COPY_BYTES * place.ranks  # read and written
    limits: list[Contestant] = [
        KernelCopy(physical_bytes, copied, place),
        DriverCopy(physical_bytes, copied, place),
    ]
    if link_bytes and torch.cuda.can_device_access_peer(place.device.index, next_gpu(place)):
        limits.append(LinkCopy(link_bytes, COPY_BYTES * place.ranks_per_gpu, place))
    return limits
