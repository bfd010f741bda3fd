"""How do a layer's tokens get to their experts and back, whatever transformers calls it through?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moe_ep.abandoned_round import abandoning
from moe_ep.communication import MoEEpCommunication
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.expert_major import ExpertMajorRows, check_rows_of_experts, unpermute_from_experts
from moe_ep.pick_groups import rows_of_picks
from moe_ep.pick_sums import sum_of_picks
from moe_ep.tensors import host_may_read

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
    Where the experts raise, the round is abandoned.

    Each row is given to the experts once for each pick, with a weight of one: their weighted sum is
    in float32 and rounded once, as the contract has it, whatever the experts are.

    asks_host: whether the experts wait for the device themselves, as transformers' loops do; some
        of these do not skip rows.
    """
    return abandoning(one.communication, partial(_run_experts, one, experts, asks_host=asks_host))


def _run_experts(one: OpenRound, experts: Experts, *, asks_host: bool) -> Tensor:
    communication, received = one.communication, one.received
    if host_may_read(received.topk_ids) and not torch.is_grad_enabled():
        given = (received.hidden_states, received.topk_ids, received.topk_weights)
        output = communication.get_combine_input_buffer(received.hidden_states.dtype)
        return run_experts_on_host(communication, *given, experts, output)
    is_counted = asks_host or host_may_read(received.topk_ids)
    permuted = permute(one, is_counted=is_counted)
    expert = permuted.expert_of_row.long()
    expert = expert.where(expert >= 0, 0 if is_counted else communication.num_local_experts)
    rows = permuted.hidden_states
    made = experts(rows, expert.view(-1, 1), rows.new_ones((rows.shape[0], 1)))
    return unpermute(one, made, permuted)


def run_experts_on_host(
    communication: MoEEpCommunication,
    rows: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    experts: Experts,
    output: Tensor | None,
    *,
    zero_others: bool = False,
) -> Tensor:
    """Return [N, hidden_size]: for each of the rows the weighted sum over its local experts. Where
    the host may read, and without gradients.

    output: to write to; a row without a local pick stays as it is, or with zero_others becomes
        zeros. None: a new tensor.
    """
    first, count = communication.first_local_expert, communication.num_local_experts
    picked, expert, row_of_pick = rows_of_picks(rows, topk_ids, first, count)
    made = experts(picked, expert, picked.new_ones((picked.shape[0], 1)))
    made = made.to(rows.dtype)  # under autocast experts may make another one
    check_rows_of_experts(made, picked.shape[0], output)
    return sum_of_picks(made, topk_weights, row_of_pick, output, zero_others=zero_others)


def permute(one: OpenRound, *, is_counted: bool) -> ExpertMajorRows:
    """Return a row for each pick of a local expert.

    is_counted: whether the host waits until it knows how many there are. No row is without a pick
        then, but where there is no pick at all: one row of zeros is there for the first expert,
        since the experts take part in backward on every rank, as FSDP wants.
    """
    max_rows = max(1, _count_local_picks(one)) if is_counted else None
    return one.communication.permute_to_experts(one.received, max_rows=max_rows)


def unpermute(one: OpenRound, made: Tensor, permuted: ExpertMajorRows) -> Tensor:
    """Return the weighted sums of the rows that the experts made; where combine takes them from, if
    that may be."""
    made, output = made.to(permuted.hidden_states.dtype), None  # autocast may make another one
    if host_may_read(made) and not made.requires_grad:
        output = one.communication.get_combine_input_buffer(made.dtype)
    return unpermute_from_experts(made, permuted, output=output)


def combine(one: OpenRound, sums: Tensor) -> Tensor:
    """Return [n, hidden_size]: the ranks' partial sums, added up at their sources. Collective."""
    of = one.communication
    return abandoning(of, partial(of.combine, sums))  # where it refuses them


def _count_local_picks(one: OpenRound) -> int:
    local = one.received.topk_ids - one.communication.first_local_expert
    return int(((local >= 0) & (local < one.communication.num_local_experts)).sum())
