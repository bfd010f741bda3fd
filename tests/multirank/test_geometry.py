"""Does the contract hold for geometries that nobody thought of? And do all backends agree?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_ep import MoEEpCommParams, QuantFormat
from tests.backends import (
    ALL,
    SHARED_GPUS,
    Backend,
    every_backend_spread_too,
    on_each,
    on_shared_gpus,
    on_the_cpu,
)
from tests.bits import assert_same_bits
from tests.conftest import RunOnRanks
from tests.gpu_cases import GPUS, few_on_gpus
from tests.ranks.devices import ONE_GPU
from tests.rounds import Played, Round, check_all, play, random_round

pytestmark = pytest.mark.multirank
TOKEN_COUNTS = [0, 1, 2, 3, 5, 31, 33, 127]


@every_backend_spread_too
@pytest.mark.parametrize("size", range(1, 9))
@few_on_gpus(size=[1, 2, 3, 5, 8])
def test_any_number_of_ranks_with_any_numbers_of_tokens(
    ranks: RunOnRanks, backend: Backend, device: str, size: int
) -> None:
    params = MoEEpCommParams(24, 4, 127, 16)
    rounds = [
        random_round(params, [TOKEN_COUNTS[(r + shift) % 8] for r in range(size)], seed=shift)
        for shift in range(0, 8, 2)
    ]
    played = ranks(size, play, device=device, backend=backend.name, params=params, rounds=rounds)
    check_all(params, rounds, played)


@st.composite
def geometries(
    draw: st.DrawFn, max_size: int, *, statistics: bool
) -> tuple[int, MoEEpCommParams, list[Round]]:
    """Return the number of ranks, params, and a few rounds of different kinds.

    statistics: whether some of them may gather statistics.
    """
    size = draw(st.integers(1, max_size))
    num_experts = draw(st.integers(1, 70))
    params = MoEEpCommParams(
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(32, num_experts))),
        max_tokens_per_rank=draw(st.integers(1, 20)),
        hidden_size=draw(st.integers(1, 300)),
        dtype=draw(st.sampled_from([None, torch.bfloat16, torch.float16, torch.float32])),
        dispatch_format=draw(st.sampled_from([None, None, *QuantFormat])),
        invalid_expert_id=draw(st.sampled_from([-1, -5, num_experts, 2**31 - 1, -(2**31)])),
    )
    return size, params, [draw(rounds_of(params, size, statistics=statistics)) for _ in range(3)]


@st.composite
def rounds_of(draw: st.DrawFn, params: MoEEpCommParams, size: int, *, statistics: bool) -> Round:
    limit = draw(st.one_of(st.none(), st.integers(1, params.max_tokens_per_rank)))
    most = params.max_tokens_per_rank if limit is None else limit
    seed = draw(st.integers(0, 2**31))
    one = random_round(
        params,
        draw(st.lists(st.integers(0, most), min_size=size, max_size=size)),
        seed,
        id_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        with_weights=draw(st.booleans()),
        tokens_per_rank=limit,
        padding=draw(st.sampled_from([0.0, 0.2, 1.0])),
        local_share=draw(st.sampled_from([0.0, 0.7])),
    )
    if statistics and draw(st.booleans()):
        generator = torch.Generator().manual_seed(seed)
        stats = torch.randint(0, 2**31, (size, 1), generator=generator)
        one = replace(one, eplb_local_stats=list(stats.to(torch.int32)))
    return one


def examples(number: int) -> settings:
    return settings(
        max_examples=number,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
        print_blob=True,
    )


@on_the_cpu
@examples(40)
@given(data=st.data())
def test_any_geometry_is_exact(
    ranks: RunOnRanks, backend: Backend, device: str, data: st.DataObject
) -> None:
    play_any_geometry(ranks, backend, device, data)


@on_each(devices=GPUS)
@examples(15)
@given(data=st.data())
def test_any_geometry_is_exact_on_gpus(
    ranks: RunOnRanks, backend: Backend, device: str, data: st.DataObject
) -> None:
    play_any_geometry(ranks, backend, device, data)


def play_any_geometry(
    ranks: RunOnRanks, backend: Backend, device: str, data: st.DataObject
) -> None:
    size, params, rounds = data.draw(
        geometries(max_size=ranks.max_size_on(device), statistics=backend.statistics)
    )
    low_precision = backend.low_precision and data.draw(st.booleans())
    zero_copy = backend.takes_rows_in_place(
        params.token_dtype, one_gpu=device == ONE_GPU, low_precision=low_precision
    )
    statistics = {"eplb_stats_num_experts": 1} if backend.statistics else {}
    precision = {"use_low_precision_combine": True} if low_precision else {}
    how: dict[str, Any] = {
        "combine_input": data.draw(
            st.sampled_from(["tensor", "by_source", *(["buffer"] if zero_copy else [])])
        ),
        "give_output": data.draw(st.booleans()),
    }
    played = ranks(
        size,
        play,
        device=device,
        backend=backend.name,
        params=params,
        rounds=rounds,
        options={**statistics, **precision},
        **how,
    )
    check_all(params, rounds, played, low_precision=low_precision)


@on_shared_gpus
@pytest.mark.parametrize(
    ("size", "hidden_size", "most"), [(2, 7168, 1024), (4, 2880, 1024), (8, 7168, 128)]
)
def test_large_steps_between_small_ones_are_exact(
    ranks: RunOnRanks, backend: Backend, device: str, size: int, hidden_size: int, most: int
) -> None:
    """Sizes at which kernels take other ways than for few tokens; in the CPU's time, too long."""
    play_large_steps(ranks, backend, device, size, hidden_size, most)


@on_each(having="low_precision", devices=SHARED_GPUS)
@pytest.mark.parametrize(
    ("size", "hidden_size", "most"), [(2, 7168, 1024), (4, 2880, 512), (2, 17001, 256)]
)
def test_large_steps_in_low_precision_are_exact(
    ranks: RunOnRanks, backend: Backend, device: str, size: int, hidden_size: int, most: int
) -> None:
    play_large_steps(ranks, backend, device, size, hidden_size, most, low_precision=True)


@on_each(named="cake", devices=(ONE_GPU,))
@pytest.mark.parametrize(
    ("size", "hidden_size", "most"), [(2, 7168, 1024), (4, 2880, 512), (2, 17001, 256)]
)
def test_large_steps_in_low_precision_with_experts_in_place_are_exact(
    ranks: RunOnRanks, backend: Backend, device: str, size: int, hidden_size: int, most: int
) -> None:
    how: dict[str, Any] = {"low_precision": True, "combine_input": "buffer"}
    play_large_steps(ranks, backend, device, size, hidden_size, most, **how)


def play_large_steps(
    ranks: RunOnRanks,
    backend: Backend,
    device: str,
    size: int,
    hidden_size: int,
    most: int,
    *,
    low_precision: bool = False,
    combine_input: str = "tensor",
) -> None:
    params = MoEEpCommParams(32, 8, most, hidden_size)
    rounds = [
        random_round(
            params, [n - rank % 2 for rank in range(size)], seed, tokens_per_rank=n, padding=0.05
        )
        for seed, n in enumerate([1, most // 8, 3, most, 8])
    ]
    played = ranks(
        size,
        play,
        device=device,
        backend=backend.name,
        params=params,
        rounds=rounds,
        options={"use_low_precision_combine": True} if low_precision else {},
        combine_input=combine_input,
    )
    check_all(params, rounds, played, low_precision=low_precision)


@pytest.mark.parametrize("other", ALL[1:], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_all_backends_give_the_same_bits(ranks: RunOnRanks, other: Backend, size: int) -> None:
    params = MoEEpCommParams(10, 4, 33, 100, dispatch_format=QuantFormat.MXFP8)
    rounds = [random_round(params, range(size, 33, 33 // size)[:size], seed) for seed in range(3)]
    by_backend: list[list[list[Played]]] = [
        ranks(size, play, backend=name, params=params, rounds=rounds)
        for name in (ALL[0].name, other.name)
    ]
    for rank, (ones, others) in enumerate(zip(*by_backend, strict=True)):
        for one, two in zip(ones, others, strict=True):
            filled = torch.arange(33) < one.recv_token_counts[:, None]
            for name in ("recv_token_counts", "topk_ids", "combined"):
                assert_same_bits(getattr(two, name), getattr(one, name), rank=rank, what=name)
            for name in ("hidden_states", "hidden_states_scale", "topk_weights"):
                assert_same_bits(
                    getattr(two, name),
                    getattr(one, name),
                    rank=rank,
                    what=name,
                    rows=filled.flatten(),
                )
