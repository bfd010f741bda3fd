"""Is the oracle itself right? Against a second statement of the contract, one element at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moe_ep import MoEEpCommParams, expert_partition
from moe_ep.reference import (
    evaluate_experts,
    expert_owners,
    input_errors,
    reference_combine,
    reference_dispatch,
    round_once,
)
from tests.bits import as_bits, assert_same_bits
from tests.rounds import ids_of, random_round, rows_of


@pytest.mark.parametrize("ep_size", [1, 2, 3, 4, 7, 8, 300])
@pytest.mark.parametrize("num_experts", [1, 2, 5, 8, 30, 256])
def test_owners_are_those_of_the_partition(num_experts: int, ep_size: int) -> None:
    owners = expert_owners(num_experts, ep_size).tolist()
    assert len(owners) == num_experts
    for rank in range(ep_size):
        first, count = expert_partition(num_experts, ep_size, rank)
        assert [e for e in range(num_experts) if owners[e] == rank] == list(
            range(first, first + count)
        )


def token_by_token(
    params: MoEEpCommParams, ids: list[list[list[int]]], owners: list[int], size: int
) -> dict[tuple[int, int], list[int]]:
    """The tokens that go from each source to each destination, by the letter of the contract."""
    sent: dict[tuple[int, int], list[int]] = {
        (source, rank): [] for source in range(size) for rank in range(size)
    }
    for source, of_source in enumerate(ids):
        for token, slots in enumerate(of_source):
            destinations = {owners[e] for e in slots if 0 <= e < params.num_experts}
            for rank in destinations:
                sent[source, rank].append(token)
    return sent


@pytest.mark.parametrize("seed", range(5))
def test_it_agrees_with_a_token_by_token_account(seed: int) -> None:
    size, params = 3, MoEEpCommParams(7, 3, 6, 2, torch.float32, invalid_expert_id=50)
    one = random_round(params, [6, 2, 4], seed, padding=0.3)
    owners = expert_owners(7, size).tolist()
    sent = token_by_token(params, [ids.tolist() for ids in one.topk_ids], owners, size)
    received = reference_dispatch(params, size, one.hidden_states, one.topk_ids, one.topk_weights)
    assert one.topk_weights is not None
    for (source, rank), tokens in sent.items():
        got = received[rank]
        assert got.recv_token_counts[source] == len(tokens)
        for place in range(6):
            row = source * 6 + place
            if place >= len(tokens):
                assert got.topk_ids[row].tolist() == [50] * 3
                continue
            token = tokens[place]
            given = one.topk_ids[source][token].tolist()
            assert got.topk_ids[row].tolist() == [e if 0 <= e < 7 else 50 for e in given]
            assert_same_bits(got.hidden_states[row], one.hidden_states[source][token])
            assert got.topk_weights is not None
            assert_same_bits(got.topk_weights[row], one.topk_weights[source][token])
    partial = [evaluate_experts(params, size, rank, received[rank]) for rank in range(size)]
    sums = reference_combine(params, size, one.topk_ids, partial, tokens_per_rank=6)
    for source in range(size):
        for token in range(len(one.topk_ids[source])):
            total = torch.zeros(2)
            for rank in range(size):
                if token in sent[source, rank]:
                    place = sent[source, rank].index(token)
                    total = total + partial[rank][source * 6 + place]
            assert_same_bits(sums[source][token], total)


def test_the_whole_exchange_by_hand() -> None:
    params = MoEEpCommParams(4, 2, 2, 3)
    ids = [ids_of([[0, -1], [-1, 3]], 2), ids_of([[3, 1]], 2)]
    weights = [torch.full((2, 2), 0.5), torch.tensor([[0.25, 0.75]])]
    hidden_states = [rows_of([1, 3], 3), rows_of([4], 3)]
    received = reference_dispatch(params, 2, hidden_states, ids, weights)
    assert [one.recv_token_counts.tolist() for one in received] == [[1, 1], [1, 1]]
    assert received[0].topk_ids.tolist() == [[0, -1], [-1, -1], [3, 1], [-1, -1]]
    assert received[1].hidden_states[:, 0].tolist() == [3, 0, 4, 0]
    partial = [evaluate_experts(params, 2, rank, received[rank]) for rank in range(2)]
    assert partial[0][[0, 2], 0].tolist() == [0.5, 6]
    assert partial[1][[0, 2], 0].tolist() == [6, 4]
    assert partial[0].isnan().all(dim=1).tolist() == [False, True, False, True]
    first, second = reference_combine(params, 2, ids, partial, tokens_per_rank=2)
    assert first[:, 0].tolist() == [0.5, 6]
    assert second[:, 0].tolist() == [10]


def test_rows_that_travel_in_low_precision_by_hand() -> None:
    """On their own rank, too. The scale of a block with 448 is a little more than 1, so 17 becomes
    16 of its units, not 18. Infinity makes NaNs of its block, and of no other."""
    params = MoEEpCommParams(1, 1, 1, 130)
    row = torch.zeros(1, 130, dtype=torch.bfloat16)
    row[0, :3] = torch.tensor([448.0, 17.0, -1.0])
    row[0, 129] = torch.inf
    how = {"tokens_per_rank": 1, "use_low_precision_combine": True}
    (combined,) = reference_combine(params, 1, [ids_of([[0]], 1)], [row], **how)
    assert combined[0, :4].tolist() == [448, 16, -1, 0]
    assert combined[0].isnan().nonzero().flatten().tolist() == [128, 129]


def test_a_rank_that_is_masked_off_sends_and_receives_nothing() -> None:
    params = MoEEpCommParams(3, 3, 1, 2)
    ids = [ids_of([[0, 1, 2]], 3)] * 3
    hidden_states = [rows_of([rank + 1], 2) for rank in range(3)]
    received = reference_dispatch(params, 3, hidden_states, ids, active_ranks=[0, 2])
    assert [one.recv_token_counts.tolist() for one in received] == [[1, 0, 1], [0, 0, 0], [1, 0, 1]]
    assert received[0].topk_ids.tolist() == [[0, 1, 2], [-1] * 3, [0, 1, 2]]
    partial = [evaluate_experts(params, 3, rank, received[rank]) for rank in range(3)]
    sums = reference_combine(params, 3, ids, partial, tokens_per_rank=1, active_ranks=[0, 2])
    assert sums[0][:, 0].tolist() == [1 + 3]
    assert sums[2][:, 0].tolist() == [3 + 9]


def test_input_errors_are_the_ids_that_are_neither_experts_nor_padding() -> None:
    params = MoEEpCommParams(4, 2, 3, 2, invalid_expert_id=9)
    ids = ids_of([[0, 9], [4, -5], [3, 2**40]], 2, torch.int64)
    assert input_errors(params, ids) == [(1, 0, 4), (2, 1, 2**40)]


QUIET_NAN: list[tuple[Any, int]] = [
    (torch.bfloat16, 0x7FC0),
    (torch.float16, 0x7E00),
    (torch.float32, 0x7FC00000),
]


@pytest.mark.parametrize(("dtype", "bits"), QUIET_NAN, ids=str)
def test_rounding_gives_one_nan_and_keeps_infinities(dtype: torch.dtype, bits: int) -> None:
    nans = torch.tensor([0x7FC00000, 0x7F800001, -1, -(2**22)], dtype=torch.int32)
    assert as_bits(round_once(nans.view(torch.float32), dtype)).tolist() == [bits] * 4
    infinite = round_once(torch.tensor([math.inf, -math.inf, 3.4e38]), dtype)
    assert infinite[:2].tolist() == [math.inf, -math.inf]
    assert infinite[2] == torch.tensor(3.4e38).to(dtype)
