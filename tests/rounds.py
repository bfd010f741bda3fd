"""Rounds of dispatch, experts and combine: their inputs, how ranks play them, and the check against
the oracle.

A test states a round for all ranks at once. Each rank plays its part on a real communication and
returns what it got; the test compares everything with `moe_ep.reference`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_ep import MoEEpCommParams, MoEEpCommunication, MoEEpDispatchResult, create_communication
from moe_ep.cake.kernels import active_rank_mask
from moe_ep.reference import (
    Expert,
    evaluate_experts,
    reference_combine,
    reference_dispatch,
    scale_by_number,
)
from tests.bits import assert_same_bits
from tests.ranks import RankContext
from tests.ranks.devices import CPU, TIMEOUT_SECONDS

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Round:
    """What every rank gives to one round; a sequence has one entry for each rank.

    tokens_per_rank: runtime_max_tokens_per_rank.
    active_ranks: the ranks that are not masked off; None: no mask is given.
    mask_on_device: give the mask in the communication's memory; else in the CPU's.
    """

    hidden_states: Sequence[Tensor]
    topk_ids: Sequence[Tensor]
    topk_weights: Sequence[Tensor] | None = None
    scales: Sequence[Tensor] | None = None
    tokens_per_rank: int | None = None
    eplb_local_stats: Sequence[Tensor] | None = None
    active_ranks: Sequence[int] | None = None
    mask_on_device: bool = False

    @property
    def ep_size(self) -> int:
        return len(self.topk_ids)


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
    if context.device != CPU and backend == "cake":  # NCCL waits as long as its group says
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


def check(
    params: MoEEpCommParams,
    one: Round,
    played: Sequence[Played | None],
    expert: Expert = scale_by_number,
) -> None:
    """Compare what every rank got from a round with the oracle, bit for bit.

    played: by rank; None for a rank that is masked off.
    """
    size = one.ep_size
    wanted = reference_dispatch(
        params,
        size,
        one.hidden_states,
        one.topk_ids,
        one.topk_weights,
        hidden_states_scale=one.scales,
        tokens_per_rank=one.tokens_per_rank,
        active_ranks=one.active_ranks,
        eplb_local_stats=one.eplb_local_stats,
    )
    partial = [
        evaluate_experts(params, size, rank, wanted[rank], expert=expert) for rank in range(size)
    ]
    combined = reference_combine(
        params,
        size,
        one.topk_ids,
        partial,
        tokens_per_rank=wanted[0].tokens_per_rank,
        active_ranks=one.active_ranks,
    )
    for rank, got in enumerate(played):
        if got is None:
            continue
        want = wanted[rank]
        assert got.tokens_per_rank == want.tokens_per_rank
        counts = want.recv_token_counts
        with_token = torch.arange(want.tokens_per_rank) < counts[:, None]
        for name in ("recv_token_counts", "topk_ids", "eplb_gathered_stats"):
            _compare(got, want, name, rank, None)
        for name in ("hidden_states", "hidden_states_scale", "topk_weights"):
            _compare(got, want, name, rank, with_token.flatten())
        assert_same_bits(got.combined, combined[rank], rank=rank, what="combined")


def _compare(got: Any, want: Any, name: str, rank: int, rows: Tensor | None) -> None:
    ours, theirs = getattr(got, name), getattr(want, name)
    assert (ours is None) == (theirs is None), f"{name} on rank {rank}: got {ours}, wanted {theirs}"
    if theirs is not None:
        assert_same_bits(ours, theirs, rank=rank, what=name, rows=rows)


def check_all(
    params: MoEEpCommParams,
    rounds: Sequence[Round],
    played_by_rank: Sequence[Sequence[Played]],
    expert: Expert = scale_by_number,
) -> None:
    """Compare every round on every rank with the oracle."""
    assert len(played_by_rank) == rounds[0].ep_size
    assert {len(played) for played in played_by_rank} == {len(rounds)}
    for index, one in enumerate(rounds):
        check(params, one, [played[index] for played in played_by_rank], expert)


def rows_of(values: Sequence[float], width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return [len(values), width]: one number describes a row."""
    return torch.tensor(values, dtype=torch.float32).view(-1, 1).repeat(1, width).to(dtype)


def ids_of(ids: Sequence[Sequence[int]], top_k: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return [n, top_k], also where n is 0."""
    return torch.tensor(ids, dtype=torch.int64).view(-1, top_k).to(dtype)


def random_rows(count: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return [count, width] of random bytes or, for the wider dtypes, of random finite numbers.

    Among them are zeros of both signs and tiny and huge numbers.
    """
    if dtype.itemsize == 1:
        content = torch.randint(0, 256, (count, width), dtype=torch.uint8, generator=generator)
        return content.view(dtype)
    values = torch.randn(count, width, generator=generator)
    magnitude = torch.randint(-6, 7, (count, width), generator=generator)
    values = torch.where(magnitude == 6, -0.0, torch.ldexp(values, magnitude))
    return values.to(dtype)


def random_round(
    params: MoEEpCommParams,
    num_tokens: Sequence[int],
    seed: int,
    *,
    id_dtype: torch.dtype = torch.int32,
    with_weights: bool = True,
    tokens_per_rank: int | None = None,
    padding: float = 0.1,
    local_share: float = 0.0,
) -> Round:
    """Return a round of random tokens for ranks with these numbers of them.

    padding: share of slots that are padding, in its several forms.
    local_share: share of slots that pick from the first two experts, so that ids repeat.
    """
    g = torch.Generator().manual_seed(seed)
    row, top_k = params.row_format, params.top_k
    paddings = torch.tensor([-1, -7, -(2**31), params.invalid_expert_id])
    ids = []
    for n in num_tokens:
        picks = torch.randint(0, params.num_experts, (n, top_k), generator=g)
        picks = torch.where(torch.rand(n, top_k, generator=g) < local_share, picks % 2, picks)
        picks = picks.clamp(max=params.num_experts - 1)
        empty = paddings[torch.randint(0, len(paddings), (n, top_k), generator=g)]
        picks = torch.where(torch.rand(n, top_k, generator=g) < padding, empty, picks)
        ids.append(picks.to(id_dtype))
    return Round(
        hidden_states=[
            random_rows(n, row.value_columns, row.value_dtypes[0], g) for n in num_tokens
        ],
        topk_ids=ids,
        topk_weights=(
            [torch.randn(n, top_k, generator=g) for n in num_tokens] if with_weights else None
        ),
        scales=(
            [random_rows(n, row.scale_columns, row.scale_dtypes[0], g) for n in num_tokens]
            if row.scale_columns
            else None
        ),
        tokens_per_rank=tokens_per_rank,
    )


def count_matrix(played: Sequence[Played]) -> list[list[int]]:
    """Return recv[d][s]: the rows on rank d from rank s."""
    return [one.recv_token_counts.tolist() for one in played]


def first_column(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Return each tensor's rows as one number, after checking that every column holds it."""
    for rank, tensor in enumerate(tensors):
        assert_same_bits(
            tensor, tensor[:, :1].repeat(1, tensor.shape[1]), rank=rank, what="columns"
        )
    return [list(itertools.chain(*tensor[:, :1].float().tolist())) for tensor in tensors]
