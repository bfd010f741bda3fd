"""Do tokens go where their experts are, and come back summed? Small rounds that one can check by
hand: expert e multiplies by e + 1, and every column of a row is equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import MoEEpCommParams, expert_partition
from tests.backends import Backend, every_backend, every_backend_spread_too, on_shared_gpus
from tests.conftest import RunOnRanks
from tests.gpu_cases import few_on_gpus
from tests.ranks import RankContext
from tests.rounds import (
    Played,
    Round,
    check_all,
    count_matrix,
    create,
    first_column,
    ids_of,
    play,
    random_round,
    rows_of,
)

pytestmark = pytest.mark.multirank
HIDDEN = 64


def params_of(num_experts: int, top_k: int, max_tokens: int = 16, **more: Any) -> MoEEpCommParams:
    return MoEEpCommParams(num_experts, top_k, max_tokens, HIDDEN, **more)


def round_of(
    top_k: int,
    ids: Sequence[Sequence[Sequence[int]]],
    x: Sequence[Sequence[float]],
    w: Sequence[Sequence[float]],
) -> Round:
    """A round from lists: ids[rank][token][slot], x[rank][token], w[rank] = a token's weights."""
    return Round(
        hidden_states=[rows_of(values, HIDDEN) for values in x],
        topk_ids=[ids_of(one, top_k) for one in ids],
        topk_weights=[
            torch.tensor(weights).repeat(len(values), 1)
            for weights, values in zip(w, x, strict=True)
        ],
    )


def play_and_check(
    ranks: RunOnRanks,
    backend: Backend,
    device: str,
    params: MoEEpCommParams,
    rounds: Sequence[Round],
) -> list[list[Played]]:
    """Play the rounds, compare all of them with the oracle; return them by round, then by rank."""
    by_rank = ranks(
        rounds[0].ep_size,
        play,
        device=device,
        backend=backend.name,
        params=params,
        rounds=rounds,
    )
    check_all(params, rounds, by_rank)
    return [list(played) for played in zip(*by_rank, strict=True)]


def combined(played: Sequence[Played]) -> list[list[float]]:
    return first_column([one.combined for one in played])


@every_backend_spread_too
def test_a_rank_without_tokens_takes_part(ranks: RunOnRanks, backend: Backend, device: str) -> None:
    one = round_of(2, [[[0, 2], [1, 3], [2, 3]], []], [[1, 2, 3], []], [[0.5, 0.5]] * 2)
    (played,) = play_and_check(ranks, backend, device, params_of(4, 2), [one])
    assert count_matrix(played) == [[2, 0], [3, 0]]
    assert combined(played) == [[2, 6, 10.5], []]
    assert played[1].combined.shape == (0, HIDDEN)
    assert played[1].combined.dtype == torch.bfloat16


@every_backend
def test_the_first_rank_may_be_the_one_without_tokens(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    one = round_of(2, [[], [[0, 2], [1, 3], [2, 3]]], [[], [1, 2, 3]], [[0.5, 0.5]] * 2)
    (played,) = play_and_check(ranks, backend, device, params_of(4, 2), [one])
    assert count_matrix(played) == [[0, 2], [0, 3]]
    assert combined(played) == [[], [2, 6, 10.5]]


@every_backend_spread_too
def test_rounds_without_any_token_return_and_leave_the_next_ones_exact(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    params = params_of(4, 2)
    counts = [(0, 0)] * 50 + [(1, 1), (0, 1)]
    rounds = [random_round(params, n, seed) for seed, n in enumerate(counts)]
    played = play_and_check(ranks, backend, device, params, rounds)
    assert all(count_matrix(one) == [[0, 0], [0, 0]] for one in played[:50])


@every_backend_spread_too
def test_all_tokens_may_go_to_one_rank(ranks: RunOnRanks, backend: Backend, device: str) -> None:
    x = [float(t % 4 + 1) for t in range(16)]
    one = round_of(2, [[[6, 7]] * 16] * 4, [x] * 4, [[0.5, 0.25]] * 4)
    (played,) = play_and_check(ranks, backend, device, params_of(8, 2), [one])
    assert count_matrix(played) == [[0] * 4] * 3 + [[16] * 4]
    assert combined(played) == [[5.5 * value for value in x]] * 4


@on_shared_gpus
@pytest.mark.parametrize("target", range(8))
@few_on_gpus(target=[0, 3, 7])
def test_all_tokens_of_eight_ranks_may_go_to_any_one_of_them(
    ranks: RunOnRanks, backend: Backend, device: str, target: int
) -> None:
    """Eight ranks are little to watch for a CPU; on a GPU they are the usual size of a group."""
    x = [float(t % 4 + 1) for t in range(16)]
    one = round_of(2, [[[2 * target, 2 * target + 1]] * 16] * 8, [x] * 8, [[0.5, 0.25]] * 8)
    (played,) = play_and_check(ranks, backend, device, params_of(16, 2), [one])
    assert count_matrix(played) == [[16 if rank == target else 0] * 8 for rank in range(8)]
    factor = 0.5 * (2 * target + 1) + 0.25 * (2 * target + 2)
    assert combined(played) == [[factor * value for value in x]] * 8


@on_shared_gpus
@pytest.mark.parametrize("top_k", [1, 2, 8, 9, 32])
@few_on_gpus(top_k=[1, 8, 32])
def test_eight_ranks_route_whatever_they_are_given(
    ranks: RunOnRanks, backend: Backend, device: str, top_k: int
) -> None:
    params = params_of(37, top_k, max_tokens=16)
    counts = [[16] * 8, [0] * 8, [3, 0, 16, 1, 0, 0, 7, 2], [0] * 7 + [16], [1] * 8]
    rounds = [random_round(params, n, seed, padding=0.2) for seed, n in enumerate(counts)]
    play_and_check(ranks, backend, device, params, rounds)


@every_backend
@pytest.mark.parametrize("padding", [-1, -7, -(2**31)])
def test_padding_sends_nothing_and_a_token_of_it_alone_is_plus_zero(
    ranks: RunOnRanks, backend: Backend, device: str, padding: int
) -> None:
    ids = [[[0, padding], [padding, padding], [padding, 3]], [[3, padding]]]
    one = round_of(2, ids, [[1, 2, 3], [4]], [[0.5, 0.5], [0.25, 0.75]])
    (played,) = play_and_check(ranks, backend, device, params_of(4, 2), [one])
    assert count_matrix(played) == [[1, 0], [1, 1]]
    assert combined(played) == [[0.5, 0, 6], [4]]
    assert not played[0].combined[1].view(torch.int16).any()


@every_backend_spread_too
def test_slots_with_one_owner_travel_once(ranks: RunOnRanks, backend: Backend, device: str) -> None:
    one = round_of(3, [[[2, 3, 0]], [[0, 1, 2]]], [[4], [2]], [[0.5, 0.25, 0.25]] * 2)
    (played,) = play_and_check(ranks, backend, device, params_of(4, 3), [one])
    assert count_matrix(played) == [[1, 1], [1, 1]]
    assert combined(played) == [[11], [3.5]]


@every_backend
@pytest.mark.parametrize("invalid_id", [-1, 4, 1000])
def test_rows_without_a_token_hold_the_invalid_id_after_a_fuller_round(
    ranks: RunOnRanks, backend: Backend, device: str, invalid_id: int
) -> None:
    params = params_of(4, 2, max_tokens=8, invalid_expert_id=invalid_id)
    rounds = [
        round_of(2, [[[2, 3]] * n for n in counts], [[1.0] * n for n in counts], [[0.5, 0.5]] * 2)
        for counts in ([8, 8], [5, 2])
    ]
    _, second = play_and_check(ranks, backend, device, params, rounds)
    assert count_matrix(second) == [[0, 0], [5, 2]]
    assert (second[0].topk_ids == invalid_id).all()
    wanted = [[2, 3]] * 5 + [[invalid_id] * 2] * 3 + [[2, 3]] * 2 + [[invalid_id] * 2] * 6
    assert second[1].topk_ids.tolist() == wanted


@every_backend
def test_an_id_repeated_in_a_row_travels_once_and_counts_twice(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    one = round_of(2, [[[2, 2]], []], [[4], []], [[0.5, 0.25]] * 2)
    (played,) = play_and_check(ranks, backend, device, params_of(4, 2), [one])
    assert count_matrix(played) == [[0, 0], [1, 0]]
    assert combined(played) == [[9], []]


@every_backend
def test_all_slots_of_a_row_may_be_one_expert(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    one = round_of(8, [[[3] * 8], [[3] * 8]], [[1], [2]], [[0.5] * 8] * 2)
    (played,) = play_and_check(ranks, backend, device, params_of(8, 8), [one])
    assert count_matrix(played) == [[1, 1], [0, 0]]
    assert combined(played) == [[16], [32]]


TOP_K_SUMS = {
    8: [12, 24, 36, 48],
    9: [13, 28, 39, 56],
    16: [24, 48, 72, 96],
    22: [33, 66, 99, 132],
    32: [48, 96, 144, 192],
}


def alternating_expert(expert: int, rows: Tensor) -> Tensor:
    return (expert % 2 + 1) * rows


@every_backend
@pytest.mark.parametrize("top_k", [*range(1, 17), 22, 32])
@few_on_gpus(top_k=[1, 3, 8, 9, 16, 22, 32])
def test_every_top_k_up_to_the_limit(
    ranks: RunOnRanks, backend: Backend, device: str, top_k: int
) -> None:
    ids = [[(7 * k + t) % 64 for k in range(top_k)] for t in range(4)]
    one = round_of(top_k, [ids] * 2, [[1, 2, 3, 4]] * 2, [[1.0] * top_k] * 2)
    params = params_of(64, top_k)
    by_rank = ranks(
        2,
        play,
        device=device,
        backend=backend.name,
        params=params,
        rounds=[one],
        expert=alternating_expert,
    )
    check_all(params, [one], by_rank, alternating_expert)
    if top_k in TOP_K_SUMS:
        assert combined([played[0] for played in by_rank]) == [TOP_K_SUMS[top_k]] * 2


@every_backend
def test_experts_that_ranks_cannot_share_evenly(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    ids = [[[0, 3, 6, 8]], [[2, 5, 7, 9]], [[1, 4, 7, 9]], [[0, 1, 2, 9]]]
    one = round_of(4, ids, [[1], [2], [1], [4]], [[0.5, 0.25, 0.125, 0.125]] * 4)
    (played,) = play_and_check(ranks, backend, device, params_of(10, 4), [one])
    assert combined(played) == [[3.5], [10.5], [4.5], [10.5]]


@every_backend_spread_too
@pytest.mark.parametrize(("num_experts", "ep_size"), [(1, 4), (2, 4), (3, 8), (7, 5)])
@few_on_gpus(ep_size=[4, 8], num_experts=[2, 3])
def test_there_may_be_fewer_experts_than_ranks(
    ranks: RunOnRanks, backend: Backend, device: str, num_experts: int, ep_size: int
) -> None:
    params = params_of(num_experts, 1)
    rounds = [random_round(params, range(1, ep_size + 1), seed) for seed in range(3)]
    play_and_check(ranks, backend, device, params, rounds)


def owned_experts(
    context: RankContext, backend: str, params: MoEEpCommParams
) -> tuple[int, int, int, int]:
    with create(context, params, backend) as communication:
        return (
            communication.ep_rank,
            communication.ep_size,
            communication.first_local_expert,
            communication.num_local_experts,
        )


@every_backend
@pytest.mark.parametrize(
    ("num_experts", "shares"),
    [(256, [86, 85, 85]), (30, [4] * 6 + [3] * 2), (2, [1, 1, 0, 0]), (10, [3, 3, 2, 2])],
)
def test_a_communication_tells_its_ranks_share_of_the_experts(
    ranks: RunOnRanks, backend: Backend, device: str, num_experts: int, shares: list[int]
) -> None:
    size = len(shares)
    got = ranks(
        size, owned_experts, device=device, backend=backend.name, params=params_of(num_experts, 1)
    )
    wanted = [(rank, size, sum(shares[:rank]), share) for rank, share in enumerate(shares)]
    assert got == wanted
    assert [expert_partition(num_experts, size, rank) for rank in range(size)] == [
        (first, count) for _, _, first, count in wanted
    ]
