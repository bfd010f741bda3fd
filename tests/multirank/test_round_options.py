"""Do the options of a round hold: runtime maximum, output=, the library's combine input, counts?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ep import MoEEpCommParams
from tests.backends import ALL, Backend, every_backend, on_each, on_the_cpu
from tests.conftest import RunOnRanks
from tests.gpu_cases import few_on_gpus
from tests.ranks import RankContext
from tests.rounds import Played, Round, check_all, create, play, random_round

pytestmark = pytest.mark.multirank
PARAMS = MoEEpCommParams(10, 3, 9, 24)


def play_and_check(
    ranks: RunOnRanks,
    backend: Backend,
    device: str,
    rounds: Sequence[Round],
    params: MoEEpCommParams = PARAMS,
    **more: Any,
) -> list[list[Played]]:
    played: list[list[Played]] = ranks(
        rounds[0].ep_size,
        play,
        device=device,
        backend=backend.name,
        params=params,
        rounds=rounds,
        **more,
    )
    check_all(params, rounds, played)
    return played


@every_backend
def test_the_runtime_maximum_becomes_tokens_per_rank(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    rounds = [
        random_round(PARAMS, (n, 1, 0), seed, tokens_per_rank=limit)
        for seed, (n, limit) in enumerate([(3, 3), (1, 9), (9, 9), (1, 1), (2, None), (0, 1)])
    ]
    played = play_and_check(ranks, backend, device, rounds)
    assert [len(one.topk_ids) // 3 for one in played[0]] == [3, 9, 9, 1, 9, 1]


@every_backend
def test_a_runtime_maximum_of_zero_is_a_round_without_rows(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    rounds = [
        random_round(PARAMS, (0, 0), 1, tokens_per_rank=0),
        random_round(PARAMS, (2, 3), 2),
    ]
    played = play_and_check(ranks, backend, device, rounds)
    assert played[0][0].hidden_states.shape == (0, 24)
    assert played[0][0].combined.shape == (0, 24)


@every_backend
@pytest.mark.parametrize("capacity", [1, 3, 5, 7, 13])
@few_on_gpus(capacity=[1, 7, 13])
def test_odd_capacities_leave_every_region_in_place(
    ranks: RunOnRanks, backend: Backend, device: str, capacity: int
) -> None:
    params = MoEEpCommParams(7, 3, capacity, 5, torch.float16)
    rounds = [
        random_round(params, (capacity, seed % (capacity + 1), capacity), seed) for seed in range(4)
    ]
    play_and_check(ranks, backend, device, rounds, params)


@every_backend
def test_output_is_written_and_returned(ranks: RunOnRanks, backend: Backend, device: str) -> None:
    rounds = [random_round(PARAMS, n, seed) for seed, n in enumerate([(4, 0), (9, 2)])]
    play_and_check(ranks, backend, device, rounds, give_output=True)


@every_backend
def test_the_expert_output_may_be_given_by_source(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    rounds = [random_round(PARAMS, n, seed) for seed, n in enumerate([(4, 0), (9, 2)])]
    play_and_check(ranks, backend, device, rounds, combine_input="by_source")


@on_each(having="zero_copy")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_librarys_own_combine_input_gives_the_same_bits(
    ranks: RunOnRanks, backend: Backend, device: str, dtype: torch.dtype
) -> None:
    params = MoEEpCommParams(10, 3, 9, 24, dtype)
    rounds = [
        random_round(params, n, seed, tokens_per_rank=limit)
        for seed, (n, limit) in enumerate([((4, 0), None), ((9, 2), 9), ((1, 2), 3)])
    ]
    play_and_check(ranks, backend, device, rounds, params, combine_input="buffer")


def ask_for_the_buffer(context: RankContext, backend: str) -> tuple[Any, ...]:
    """Body: what get_combine_input_buffer returns in an open round."""
    with create(context, PARAMS, backend) as communication:
        one = random_round(PARAMS, (2, 2), seed=1)
        communication.dispatch(
            one.hidden_states[context.rank].to(communication.device),
            one.topk_ids[context.rank].to(communication.device),
            runtime_max_tokens_per_rank=4,
        )
        try:
            communication.get_combine_input_buffer(torch.float32)
            refused = None
        except TypeError as raised:
            refused = str(raised)
        buffer = communication.get_combine_input_buffer(torch.bfloat16)
        if buffer is None:
            return (None, refused)
        again = communication.get_combine_input_buffer(torch.bfloat16)
        assert again is not None
        same_memory = buffer.data_ptr() == again.data_ptr()
        return (tuple(buffer.shape), buffer.dtype, buffer.is_contiguous(), same_memory, refused)


@on_each(having="zero_copy")
def test_the_combine_input_has_a_row_for_each_received_row(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    for answer in ranks(2, ask_for_the_buffer, device=device, backend=backend.name):
        assert answer[:-1] == ((8, 24), torch.bfloat16, True, True)
        assert "bfloat16" in answer[-1]


@pytest.mark.parametrize("backend", [one for one in ALL if not one.zero_copy], ids=str)
def test_a_backend_without_a_combine_input_returns_none(
    ranks: RunOnRanks, backend: Backend
) -> None:
    for answer in ranks(2, ask_for_the_buffer, backend=backend.name):
        assert answer[0] is None


@on_each(having="statistics")
@pytest.mark.parametrize("num_stats", [1, 4, 10])
@few_on_gpus(num_stats=[1, 10])
def test_statistics_of_all_ranks_are_gathered_with_the_dispatch(
    ranks: RunOnRanks, backend: Backend, device: str, num_stats: int
) -> None:
    g = torch.Generator().manual_seed(num_stats)

    def stats() -> list[torch.Tensor]:
        values = torch.randint(-(2**31), 2**31, (3, num_stats), generator=g)
        return list(values.to(torch.int32))

    with_stats = [
        replace(random_round(PARAMS, n, seed), eplb_local_stats=stats())
        for seed, n in enumerate([(4, 0, 9), (0, 0, 0), (1, 2, 3)])
    ]
    without = random_round(PARAMS, (3, 3, 3), seed=9)
    rounds = [with_stats[0], without, *with_stats[1:]]
    options = {"eplb_stats_num_experts": num_stats}
    play_and_check(ranks, backend, device, rounds, options=options)


@every_backend
def test_more_tokens_than_sixteen_bits_count(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    params = MoEEpCommParams(3, 1, 70_001, 2)
    rounds = [random_round(params, n, seed) for seed, n in enumerate([(70_001, 3), (66_000, 0)])]
    play_and_check(ranks, backend, device, rounds, params)


def play_with_threads(
    context: RankContext, backend: str, params: MoEEpCommParams, rounds: Sequence[Round]
) -> list[Played]:
    torch.set_num_threads(3)
    try:
        return play(context, backend, params, rounds)
    finally:
        torch.set_num_threads(1)


@on_the_cpu  # torch's threads have no part in a round on a GPU
def test_several_threads_give_the_same_bits_as_one(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    params = MoEEpCommParams(10, 4, 150, 700)
    rounds = [random_round(params, n, seed) for seed, n in enumerate([(150, 33), (64, 149)])]
    played = ranks(
        2,
        play_with_threads,
        device=device,
        backend=backend.name,
        params=params,
        rounds=rounds,
    )
    check_all(params, rounds, played)


@every_backend
def test_the_fields_of_a_result_tell_shape_and_dtype(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    one = random_round(PARAMS, (4, 0, 9), seed=1)
    for (got,) in play_and_check(ranks, backend, device, [one]):
        assert got.hidden_states.shape == (27, 24)
        assert got.hidden_states.dtype == torch.bfloat16
        assert got.topk_ids.shape == (27, 3)
        assert got.topk_ids.dtype == torch.int32
        assert got.topk_weights is not None
        assert got.topk_weights.shape == (27, 3)
        assert got.topk_weights.dtype == torch.float32
        assert got.recv_token_counts.shape == (3,)
        assert got.recv_token_counts.dtype == torch.int32
        assert got.tokens_per_rank == 9
        assert got.hidden_states_scale is None
        assert got.eplb_gathered_stats is None
