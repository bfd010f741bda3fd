"""How does a rank play its part of a round, on a real communication?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_ep import MoEEpCommParams, MoEEpCommunication, MoEEpDispatchResult, create_communication
from moe_ep.cake.kernels import active_rank_mask
from moe_ep.reference import Expert, evaluate_experts, scale_by_number
from tests.ranks import RankContext
from tests.ranks.devices import CPU, TIMEOUT_SECONDS
from tests.rounds.inputs import Round

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Played:
    """What one rank got from one round; copies."""

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor | None
    hidden_states_scale: Tensor | None
    tokens_per_rank: int
    eplb_gathered_stats: Tensor | None
    recv_token_counts: Tensor
    combined: Tensor


def create(
    context: RankContext, params: MoEEpCommParams, backend: str, **options: Any
) -> MoEEpCommunication:
    """Create a rank's communication. On a GPU it soon gives a peer up that has failed: a test then
    ends by itself, and no rank is killed in a kernel.
    """
    if context.device != CPU and backend != "torch_dist":  # NCCL waits as long as its group says
        options = {"timeout_sec": TIMEOUT_SECONDS, **options}
    return create_communication(context.bootstrap(), params, backend, **options)


def play(
    context: RankContext,
    backend: str,
    params: MoEEpCommParams,
    rounds: Sequence[Round],
    options: dict[str, Any] | None = None,
    combine_input: str = "tensor",
    give_output: bool = False,
    expert: Expert = scale_by_number,
) -> list[Played]:
    """Body: create a communication, play the rounds, destroy it, return what came.

    combine_input: "tensor", "by_source" ([R, tpr, H]) or "buffer" (the library's own).
    """
    with create(context, params, backend, **(options or {})) as communication:
        return [
            play_round(
                communication,
                one,
                combine_input=combine_input,
                give_output=give_output,
                expert=expert,
            )
            for one in rounds
        ]


def play_round(
    communication: MoEEpCommunication,
    one: Round,
    *,
    combine_input: str = "tensor",
    give_output: bool = False,
    expert: Expert = scale_by_number,
) -> Played:
    """Play this rank's part of a round."""
    rank, size, params = communication.ep_rank, communication.ep_size, communication.params

    def mine(of_each_rank: Sequence[Tensor]) -> Tensor:
        return of_each_rank[rank].to(communication.device)

    def mine_if_given(of_each_rank: Sequence[Tensor] | None) -> Tensor | None:
        return None if of_each_rank is None else mine(of_each_rank)

    mask: dict[str, Any] = {}
    if one.active_ranks is not None:
        device = communication.device if one.mask_on_device else "cpu"
        mask["active_rank_mask"] = active_rank_mask(one.active_ranks, size, device)
    result = communication.dispatch(
        mine(one.hidden_states),
        mine(one.topk_ids),
        mine_if_given(one.topk_weights),
        hidden_states_scale=mine_if_given(one.scales),
        runtime_max_tokens_per_rank=one.tokens_per_rank,
        eplb_local_stats=mine_if_given(one.eplb_local_stats),
        **mask,
    )
    received = copy_of(result)
    partial = evaluate_experts(params, size, rank, received, expert=expert)
    partial = partial.to(communication.device)
    if combine_input == "by_source":
        partial = partial.view(size, result.tokens_per_rank, params.hidden_size)
    elif combine_input == "buffer":
        buffer = communication.get_combine_input_buffer(params.token_dtype)
        assert buffer is not None
        partial = buffer.copy_(partial)
    output = None
    if give_output:
        shape = (len(one.topk_ids[rank]), params.hidden_size)
        output = torch.full(
            shape, float("nan"), dtype=params.token_dtype, device=communication.device
        )
    combined = settled(communication, communication.combine, partial, output=output, **mask)
    if give_output:
        assert combined is output
    return replace(received, combined=combined.cpu().clone())


def settled(
    communication: MoEEpCommunication,
    call: Callable[..., Result],
    /,
    *args: Any,
    **kwargs: Any,
) -> Result:
    """Return what a call of a communication returns when its work is done, or raise what it found.

    On the CPU that is the call itself. On a GPU a call returns at once, and what the device finds
    (a silent peer, ids of no expert, ranks that disagree) is raised by `check` or the next call.
    """
    result = call(*args, **kwargs)
    if communication.device.type == "cuda":
        communication.check()
    return result


def on_device_of(communication: MoEEpCommunication, value: Any) -> Any:
    """Return a CPU tensor on the communication's device; anything else, also a tensor that is
    meant to be elsewhere, as it is.
    """
    on_cpu = isinstance(value, Tensor) and value.device.type == "cpu"
    return value.to(communication.device) if on_cpu else value


def copy_of(result: MoEEpDispatchResult) -> Played:
    """Return what a dispatch brought, apart from library memory."""

    def copy(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.cpu().clone()

    return Played(
        hidden_states=result.hidden_states.cpu().clone(),
        topk_ids=result.topk_ids.cpu().clone(),
        topk_weights=copy(result.topk_weights),
        hidden_states_scale=copy(result.hidden_states_scale),
        tokens_per_rank=result.tokens_per_rank,
        eplb_gathered_stats=copy(result.eplb_gathered_stats),
        recv_token_counts=result.recv_token_counts.cpu().clone(),
        combined=torch.empty(0),
    )
