"""What do ranks do that hold the same tokens?

Where they can read each other's memory, each runs its experts on the tokens as it has them, and all
add up what all have made of them. Else each sends its slice of the rows, and all get all results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.communication import MoEEpCommunication
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.errors import MoEEpInputError
from moe_ep.integrations.transformers import exchange
from moe_ep.integrations.transformers.exchange import Experts, OpenRound
from moe_ep.limits import MAX_TOP_K
from moe_ep.tensors import host_may_read


def run_in_place(
    communication: MoEEpCommunication,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Experts,
    *,
    asks_host: bool,
) -> Tensor | None:
    """Return [n, hidden_size], the weighted sums over all ranks' experts; None, with nothing done,
    where that takes more than memory of the host, or gradients, or dispatch would refuse the call.
    Collective.

    All ranks pass the same n tokens. The sums have the bits that they have where tokens travel.

    Raises MoEEpInputError for an id of no expert, before anything is exchanged.
    """
    num_tokens, ep_size = hidden_states.shape[0], communication.ep_size
    if torch.is_grad_enabled() or not host_may_read(hidden_states) or ep_size > MAX_TOP_K:
        return None
    tokens_per_rank = -(-num_tokens // ep_size)
    inputs = communication._combine_inputs(tokens_per_rank)
    if inputs is None:
        return None
    _require_expert_ids(topk_ids, communication.params.num_experts)
    # A round without tokens. Once all are in it nobody reads what the ranks had made before, and
    # once all have closed it everybody may read what they make here.
    none = slice(0, 0)
    exchange.dispatch(
        communication, hidden_states[none], topk_ids[none], topk_weights[none], tokens_per_rank
    )
    everything = MoEEpDispatchResult(
        hidden_states=hidden_states,
        topk_ids=topk_ids,
        topk_weights=topk_weights.float(),
        tokens_per_rank=num_tokens,
        hidden_states_scale=None,
        eplb_gathered_stats=None,
        recv_token_counts=topk_ids.new_tensor([num_tokens], dtype=torch.int32),
    )
    one = OpenRound(communication, everything)
    partial = inputs[communication.ep_rank][:num_tokens].zero_()
    exchange.run_experts(one, experts, asks_host=asks_host, output=partial)
    exchange.combine(one, inputs[communication.ep_rank])
    sums = hidden_states.new_empty(hidden_states.shape)
    torch.ops.moe_ep.sum_tensors([rows[:num_tokens] for rows in inputs], sums)
    return sums


def _require_expert_ids(topk_ids: Tensor, num_experts: int) -> None:
    if topk_ids.numel() > 0 and (largest := int(topk_ids.max())) >= num_experts:
        raise MoEEpInputError(
            f"topk_ids must be below num_experts={num_experts}, or negative for padding, got "
            f"{largest}."
        )


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
