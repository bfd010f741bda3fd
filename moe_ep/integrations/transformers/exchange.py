"""How do a layer's tokens get to their experts and back, whatever transformers calls it through?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's own name for it)

from moe_ep.communication import MoEEpCommunication
from moe_ep.dispatch_result import MoEEpDispatchResult

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From rows [M, hidden_size], local expert ids [M, 1] int64 and weights [M, 1] to [M, hidden_size].
It skips a row whose id is the number of local experts."""


@dataclass(frozen=True)
class OpenRound:
    """A round between dispatch and combine."""

    communication: MoEEpCommunication
    received: MoEEpDispatchResult


def dispatch(
    communication: MoEEpCommunication,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    tokens_per_rank: int | None,
) -> OpenRound:
    """Send the tokens to their experts' ranks. Collective.

    hidden_states: [n, hidden_size]. topk_ids: [n, top_k] global ids. topk_weights: [n, top_k].
    tokens_per_rank: the largest n of all ranks, None: what the communication has room for.
    """
    received = communication.dispatch(
        hidden_states,
        topk_ids,
        topk_weights.float(),
        runtime_max_tokens_per_rank=tokens_per_rank,
    )
    return OpenRound(communication, received)


def run_experts(one: OpenRound, experts: Experts, *, asks_host: bool) -> Tensor:
    """Return [R * tpr, hidden_size]: for each received row the weighted sum over its local experts.

    Each row is given to the experts once for each pick, with a weight of one: their weighted sum is
    in float32 and rounded once, as the contract has it, whatever the experts are.

    asks_host: whether the experts wait for the device themselves, as transformers' loops do; some
        of these do not skip rows.
    """
    if _counts_are_free(one.received.topk_ids):
        return _over_picks(one, experts)
    communication = one.communication
    permuted = communication.permute_to_experts(one.received)
    rows, expert = permuted.hidden_states, permuted.expert_of_row.long()
    if asks_host:
        filled = max(1, int(permuted.expert_offsets[-1]))
        rows, expert = rows[:filled], expert[:filled].clamp(min=0)
    expert = torch.where(expert < 0, communication.num_local_experts, expert)
    made = experts(rows, expert.view(-1, 1), _ones(rows))
    if asks_host:
        made = F.pad(made, (0, 0, 0, permuted.hidden_states.shape[0] - made.shape[0]))
    return communication.unpermute_from_experts(made, permuted)


def combine(one: OpenRound, partial: Tensor) -> Tensor:
    """Return [n, hidden_size]: the ranks' partial sums, added up at their sources. Collective."""
    return one.communication.combine(partial)


def _counts_are_free(topk_ids: Tensor) -> bool:
    """Whether the host can count the picks without a wait for the device."""
    return topk_ids.device.type == "cpu" and not torch.compiler.is_compiling()


def _over_picks(one: OpenRound, experts: Experts) -> Tensor:
    """Run the experts on as many rows as there are picks of them, which only the host can tell.

    On the CPU that costs nothing, while rows that are skipped do.
    """
    received, communication = one.received, one.communication
    local = received.topk_ids.long() - communication.first_local_expert
    row, slot = ((local >= 0) & (local < communication.num_local_experts)).nonzero(as_tuple=True)
    rows, expert = received.hidden_states[row], local[row, slot]
    if row.shape[0] == 0:
        # The experts take part in backward on every rank, as FSDP wants.
        rows, expert = rows.new_zeros((1, rows.shape[1])), expert.new_zeros(1)
    made = experts(rows, expert.view(-1, 1), _ones(rows))[: row.shape[0]]
    assert received.topk_weights is not None  # weights were sent
    weighted = made.float() * received.topk_weights[row, slot].view(-1, 1)
    total = weighted.new_zeros(received.hidden_states.shape)
    # On the CPU one after the other: a row's picks in their order.
    return total.index_add(0, row, weighted).to(received.hidden_states.dtype)


def _ones(rows: Tensor) -> Tensor:
    return rows.new_ones((rows.shape[0], 1))
