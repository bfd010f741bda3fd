"""What do ranks do that hold the same tokens?

Where they can read each other's memory, each runs its experts on the tokens as it has them, and all
add up what all have made of them. Else each sends its slice of the rows, and all get all results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.abandoned_round import abandoning
from moe_ep.communication import MoEEpCommunication
from moe_ep.integrations.transformers import exchange
from moe_ep.integrations.transformers.exchange import Experts
from moe_ep.tensors import host_may_read


def run_in_place(
    communication: MoEEpCommunication,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Experts,
) -> Tensor | None:
    """Return [n, hidden_size], the weighted sums over all ranks' experts; None, with nothing done,
    where that takes more than memory of the host, or gradients, or dispatch would refuse the call.
    Collective.

    All ranks pass the same n tokens. The sums have the bits that they have where tokens travel.

    Raises on all ranks, before anything is computed: MoEEpDisagreementError where they differ in n
    or in topk_ids, else MoEEpInputError for an id of no expert. (Differences of the tokens
    themselves, or of the weights, are not looked for.)
    """
    if torch.is_grad_enabled() or not host_may_read(hidden_states):
        return None
    batch = communication._run_begin_shared_batch(topk_ids)
    if batch is None:
        return None

    given = (hidden_states, topk_ids, topk_weights, experts, batch.rows)
    run = partial(exchange.run_experts_on_host, communication, *given, zero_others=True)
    abandoning(communication, run)
    return communication._run_end_shared_batch(batch)


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
