"""How do a layer's tokens get to their experts and back, whatever transformers calls it through?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from moe_ep.communication import MoEEpCommunication
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.expert_major import ExpertMajorRows, unpermute_from_experts
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


def run_experts(
    one: OpenRound, experts: Experts, *, asks_host: bool, output: Tensor | None = None
) -> Tensor:
    """Return [R * tpr, hidden_size]: for each received row the weighted sum over its local experts.

    Each row is given to the experts once for each pick, with a weight of one: their weighted sum is
    in float32 and rounded once, as the contract has it, whatever the experts are.

    asks_host: whether the experts wait for the device themselves, as transformers' loops do; some
        of these do not skip rows.
    output: as of `unpermute`.
    """
    is_counted = asks_host or host_may_read(one.received.topk_ids)
    permuted = permute(one, is_counted=is_counted)
    expert = permuted.expert_of_row.long()
    expert = expert.where(expert >= 0, 0 if is_counted else one.communication.num_local_experts)
    rows = permuted.hidden_states
    made = experts(rows, expert.view(-1, 1), rows.new_ones((rows.shape[0], 1)))
    return unpermute(one, made, permuted, output)


def permute(one: OpenRound, *, is_counted: bool) -> ExpertMajorRows:
    """Return a row for each pick of a local expert.

    is_counted: whether the host waits until it knows how many there are. No row is without a pick
        then, but where there is no pick at all: one row of zeros is there for the first expert,
        since the experts take part in backward on every rank, as FSDP wants.
    """
    max_rows = max(1, _count_local_picks(one)) if is_counted else None
    return one.communication.permute_to_experts(one.received, max_rows=max_rows)


def unpermute(
    one: OpenRound, made: Tensor, permuted: ExpertMajorRows, output: Tensor | None = None
) -> Tensor:
    """Return the weighted sums of the rows that the experts made.

    output: to write to, without gradients, where the host may read; a row without a local pick
        stays as it is. None: where combine takes them from, if that may be, else a new tensor.
    """
    made = made.to(permuted.hidden_states.dtype)  # under autocast experts may make another one
    if output is None and host_may_read(made) and not made.requires_grad:
        output = one.communication.get_combine_input_buffer(made.dtype)
    return unpermute_from_experts(made, permuted, output=output)


def combine(one: OpenRound, partial: Tensor) -> Tensor:
    """Return [n, hidden_size]: the ranks' partial sums, added up at their sources. Collective."""
    return one.communication.combine(partial)


def _count_local_picks(one: OpenRound) -> int:
    local = one.received.topk_ids - one.communication.first_local_expert
    return int(((local >= 0) & (local < one.communication.num_local_experts)).sum())
