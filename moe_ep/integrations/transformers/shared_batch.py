"""How do ranks that hold the same tokens send each of them once? Each takes its slice of the rows,
and all get all results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Slices:
    """Equal slices of n rows, the last ones shorter or empty.

    group: the ranks that hold the same n rows.
    """

    group: dist.ProcessGroup
    num_rows: int

    @property
    def rows_per_rank(self) -> int:
        """Rows of each slice but the last ones."""
        return -(-self.num_rows // dist.get_world_size(self.group))

    def own(self, rows: Tensor) -> Tensor:
        """Return this rank's rows of [n, *]; in backward all ranks get all gradients."""
        sliced: Tensor = _OwnSlice.apply(rows, self)
        return sliced

    def all(self, own: Tensor) -> Tensor:
        """Return [n, *] of the ranks' own rows. Collective, in forward and in `own`'s backward."""
        gathered: Tensor = _AllSlices.apply(own, self)
        return gathered

    def _cut(self, rows: Tensor) -> Tensor:
        first = dist.get_rank(self.group) * self.rows_per_rank
        return rows[first : first + self.rows_per_rank]

    def _gather(self, own: Tensor) -> Tensor:
        per_rank, width = self.rows_per_rank, own.shape[1:]
        padded = own.new_zeros((per_rank, *width))
        padded[: own.shape[0]] = own
        everyone = own.new_empty((per_rank * dist.get_world_size(self.group), *width))
        dist.all_gather_into_tensor(everyone, padded, group=self.group)
        return everyone[: self.num_rows]


class _OwnSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slices: Slices) -> Tensor:
        ctx.slices = slices
        return slices._cut(rows).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.slices._gather(grads[0]), None


class _AllSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, slices: Slices) -> Tensor:
        ctx.slices = slices
        return slices._gather(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.slices._cut(grads[0]).contiguous(), None
