"""How fast can rows go through FIFOs in a GPU's own memory, if nobody had to wait for anybody?

What nvlink_two_sided does, without its flags, lists and peers: a row is read once and written to
FIFOs and to a tensor, and what comes out of the FIFOs is written to tensors; on the way back it is
summed. The FIFOs are small enough for the L2 cache. Every byte crosses it twice more than in a
copy, which is what bounds such a round where ranks share a GPU.
"""

from __future__ import annotations

from pathlib import Path

import torch
from cuda_limits import CudaCopy
from places import Place
from torch import Tensor

_SOURCE = Path(__file__).with_name("fifo_copy.cu")
_ROW_BYTES = 64 << 20  # of each rank: with its targets, past what the caches hold
_THREADS = 256
_CTAS_PER_MULTIPROCESSOR = 3
_WORDS_PER_RECORD = 512  # as fifo_copy.cu has it
_SLOTS = 2


class FifoCopy(CudaCopy):
    """Each rank sends rows to as many destinations as a token can have, itself among them, and
    sums what comes back.
    """

    name = "fifo kernels"

    def __init__(self, counted_bytes: int, destinations: int, place: Place) -> None:
        """counted_bytes: of a round, both ways."""
        moved = 2 * (1 + destinations) * _ROW_BYTES * place.ranks
        super().__init__(counted_bytes, moved, place, _ROW_BYTES)
        shape = (destinations, self._source.numel())
        self._rows = torch.empty(shape, dtype=torch.int32, device=place.device)
        self._records = self._source.numel() // _WORDS_PER_RECORD
        properties = torch.cuda.get_device_properties(place.device)
        self._ctas = _CTAS_PER_MULTIPROCESSOR * properties.multi_processor_count
        fifos = self._ctas * (_THREADS // 32) * max(destinations - 1, 1)
        self._slots = torch.empty(
            fifos * _SLOTS * _WORDS_PER_RECORD, dtype=torch.int32, device=place.device
        )
        source = _SOURCE.read_text()
        self._send = torch.cuda._compile_kernel(source, "send")
        self._sum = torch.cuda._compile_kernel(source, "sum")

    def _copy(self) -> None:
        shape = {"grid": (self._ctas, 1, 1), "block": (_THREADS, 1, 1)}
        sizes = [self._records, self._rows.shape[0]]
        self._send(**shape, args=[self._source, self._rows, self._slots, *sizes])
        self._sum(**shape, args=[self._rows, self._target, self._slots, *sizes])

    def _arrived(self) -> Tensor:
        destinations = self._rows.shape[0]
        if not torch.equal(self._rows, self._source.expand_as(self._rows)):
            raise AssertionError(f"{self.name} left other rows than were sent")
        # Whole numbers: what was summed can be told apart again but for the bits that ran over.
        if not torch.equal(self._target, self._source * destinations):
            raise AssertionError(f"{self.name} left other sums than those of the rows")
        return self._source
