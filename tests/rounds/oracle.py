"""Is what every rank got from a round what `moe_ep.reference` says, bit for bit?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ep import MoEEpCommParams
from moe_ep.reference import (
    Expert,
    evaluate_experts,
    reference_combine,
    reference_dispatch,
    scale_by_number,
)
from tests.bits import assert_same_bits
from tests.rounds.inputs import Round
from tests.rounds.playing import Played


def check(
    params: MoEEpCommParams,
    one: Round,
    played: Sequence[Played | None],
    expert: Expert = scale_by_number,
    *,
    low_precision: bool = False,
) -> None:
    """Compare what every rank got from a round with the oracle, bit for bit.

    played: by rank; None for a rank that is masked off.
    low_precision: played with use_low_precision_combine.
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
        use_low_precision_combine=low_precision,
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
    *,
    low_precision: bool = False,
) -> None:
    """Compare every round on every rank with the oracle."""
    assert len(played_by_rank) == rounds[0].ep_size
    assert {len(played) for played in played_by_rank} == {len(rounds)}
    for index, one in enumerate(rounds):
        of_ranks = [played[index] for played in played_by_rank]
        check(params, one, of_ranks, expert, low_precision=low_precision)


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
