"""Does the device's judge agree with moe_ep.reference, and does it find a fault? Needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_ep import MoEEpCommParams
from moe_ep.reference import (
    ReferenceDispatch,
    evaluate_experts,
    reference_combine,
    reference_dispatch,
)
from tests.bits import assert_same_bits
from tests.gpu.device_rounds import Tokens, Verdict, expected_sums, partial_rows, tokens_of

CPU = torch.device("cpu")
PARAMS = MoEEpCommParams(11, 4, 9, 40)
COUNTS = (9, 0, 5)


def round_of(stamp: int, with_weights: bool) -> tuple[list[Tokens], list[ReferenceDispatch]]:
    sent = [
        tokens_of(PARAMS, stamp, rank, n, CPU, valid=4 if rank == 2 else None)
        for rank, n in enumerate(COUNTS)
    ]
    received = reference_dispatch(
        PARAMS,
        len(sent),
        [tokens.hidden_states for tokens in sent],
        [tokens.topk_ids for tokens in sent],
        [tokens.topk_weights for tokens in sent] if with_weights else None,
    )
    return sent, received


def judged(rank: int, sent: list[Tokens], received: ReferenceDispatch) -> Verdict:
    verdict = Verdict(PARAMS, len(sent), rank, 1, CPU)
    verdict.judge_dispatch(0, received, sent)
    return verdict


@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("low_precision", [True, False])
@pytest.mark.parametrize("stamp", range(5))
def test_it_says_what_the_reference_says(
    stamp: int, low_precision: bool, with_weights: bool
) -> None:
    sent, received = round_of(stamp, with_weights)
    size = len(sent)
    partial = [evaluate_experts(PARAMS, size, rank, received[rank]) for rank in range(size)]
    for rank in range(size):
        judged(rank, sent, received[rank]).require()
        assert_same_bits(partial_rows(PARAMS, size, rank, received[rank]), partial[rank], rank=rank)
    sums = reference_combine(
        PARAMS,
        size,
        [tokens.topk_ids for tokens in sent],
        partial,
        tokens_per_rank=PARAMS.max_tokens_per_rank,
        use_low_precision_combine=low_precision,
    )
    for rank, tokens in enumerate(sent):
        wanted = expected_sums(
            PARAMS, size, tokens, with_weights=with_weights, low_precision=low_precision
        )
        assert_same_bits(sums[rank], wanted, rank=rank)


@pytest.mark.parametrize("active_ranks", [[0, 1, 2], [0, 2], [1, 2], [2]])
def test_it_says_what_the_reference_says_of_masked_ranks(active_ranks: list[int]) -> None:
    size = len(COUNTS)
    sent = [tokens_of(PARAMS, 7, rank, n, CPU) for rank, n in enumerate(COUNTS)]
    ids = [tokens.topk_ids for tokens in sent]
    received = reference_dispatch(
        PARAMS,
        size,
        [tokens.hidden_states for tokens in sent],
        ids,
        [tokens.topk_weights for tokens in sent],
        active_ranks=active_ranks,
    )
    partial = [evaluate_experts(PARAMS, size, rank, received[rank]) for rank in range(size)]
    most = PARAMS.max_tokens_per_rank
    sums = reference_combine(
        PARAMS, size, ids, partial, tokens_per_rank=most, active_ranks=active_ranks
    )
    as_if_sent = [
        tokens_of(PARAMS, 7, rank, n, CPU, valid=None if rank in active_ranks else 0)
        for rank, n in enumerate(COUNTS)
    ]
    for rank in active_ranks:
        judged(rank, as_if_sent, received[rank]).require()
        wanted = expected_sums(PARAMS, size, sent[rank], active_ranks=active_ranks)
        assert_same_bits(sums[rank], wanted, rank=rank)


@pytest.mark.parametrize(
    ("field", "what"),
    [
        ("hidden_states", "'rows': 1,"),
        ("topk_ids", "'ids': 1,"),
        ("topk_weights", "'weights': 1,"),
        ("recv_token_counts", "'counts': 1,"),
    ],
)
def test_it_finds_one_wrong_element(field: str, what: str) -> None:
    sent, received = round_of(1, with_weights=True)
    values = getattr(received[0], field).clone()
    values.flatten()[0] += 1
    verdict = judged(0, sent, replace(received[0], **{field: values}))
    with pytest.raises(AssertionError, match=f"rank 0: 1 rounds of 1 .*{what}"):
        verdict.require()


def test_it_finds_an_id_in_a_row_without_a_token() -> None:
    sent, received = round_of(1, with_weights=True)
    ids = received[0].topk_ids.clone()
    ids[PARAMS.max_tokens_per_rank] = 0  # rank 1 sends nothing
    with pytest.raises(AssertionError, match="'ids': 4,"):
        judged(0, sent, replace(received[0], topk_ids=ids)).require()


def test_it_finds_a_zero_of_the_wrong_sign_in_a_sum() -> None:
    verdict = Verdict(PARAMS, 3, 0, 2, CPU)
    zeros = torch.zeros(2, 3, dtype=torch.bfloat16)
    verdict.judge_sums(0, zeros, zeros)
    verdict.require()
    verdict.judge_sums(1, -zeros, zeros)
    with pytest.raises(AssertionError, match=r"round 1, .*'sums': 6"):
        verdict.require()


def test_every_stamp_and_rank_has_tokens_of_its_own() -> None:
    rows = [tokens_of(PARAMS, stamp, rank, 9, CPU) for stamp in range(20) for rank in range(8)]
    rows_seen = {bytes(one.hidden_states.view(torch.uint8).flatten().tolist()) for one in rows}
    assert len(rows_seen) == len(rows)
    ids = torch.stack([one.topk_ids for one in rows])
    assert set(ids.flatten().tolist()) == {-1, *range(PARAMS.num_experts)}
