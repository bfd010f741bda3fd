"""Which rank is this process, on which device, and how does it meet the others?"""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

_SLOT_BYTES = 64  # a cache line for each rank
_PATIENCE_SECONDS = 120.0


class SpinBarrier:
    """Lines up the ranks to within a microsecond or two, without a system call.

    What a barrier over sockets leaves between the ranks is tens of microseconds, which would be
    counted into the first of the timed rounds. Not for more ranks than cores.
    """

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        """path: a file of `file_bytes(ranks)` zero bytes, the same for all ranks."""
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self.file_bytes(ranks))
        self._slots = memoryview(self._memory).cast("q")
        self._own = rank * _SLOT_BYTES // 8
        self._all = [r * _SLOT_BYTES // 8 for r in range(ranks)]
        self._epoch = 0

    @staticmethod
    def file_bytes(ranks: int) -> int:
        """Return how large the file must be."""
        return ranks * _SLOT_BYTES

    def wait(self) -> None:
        """Return when all ranks have entered. Raises TimeoutError when one does not."""
        self._epoch += 1
        slots, epoch = self._slots, self._epoch
        slots[self._own] = epoch
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for rank, slot in enumerate(self._all):
            tries = 0
            while slots[slot] < epoch:
                tries += 1
                if tries % 1024 == 0:
                    time.sleep(0)
                    if time.monotonic() > deadline:
                        raise TimeoutError(
                            f"rank {rank} did not come to a barrier in {_PATIENCE_SECONDS:.0f} s"
                        )

    def __enter__(self) -> SpinBarrier:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._slots.release()
        self._memory.close()


@dataclass(frozen=True)
class Place:
    """Where one rank runs.

    gpus: that the ranks share; 0 on the CPU.
    """

    rank: int
    ranks: int
    device: torch.device
    gpus: int
    spin: SpinBarrier

    @property
    def ranks_per_gpu(self) -> int:
        return self.ranks // max(self.gpus, 1)

    def barrier(self) -> None:
        """Return when all ranks have entered, with nothing left to do on the device; sleeps."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        # dist.barrier would take NCCL where the group has it.
        dist.all_reduce(torch.zeros(1))


def timing_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Return two events between which the device's time is taken."""
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
