"""English text that every Python has, as bytes, and batches of it."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor

VOCABULARY = 256


class Batches:
    """The same batches for every number of ranks: step s has the same sequences everywhere."""

    def __init__(self, sequences: int, length: int) -> None:
        """sequences: of a whole batch; length: bytes that a sequence predicts."""
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._sequences, self._length = sequences, length

    def __call__(self, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """Return rank `rank`'s share of a batch: bytes and those that follow them, [b, length]."""
        random = torch.Generator().manual_seed(step)
        last = len(self._bytes) - self._length - 1
        starts = torch.randint(0, last, (self._sequences,), generator=random)
        mine = starts.tensor_split(ranks)[rank]
        rows = torch.stack([self._bytes[start : start + self._length + 1] for start in mine])
        return rows[:, :-1], rows[:, 1:]
