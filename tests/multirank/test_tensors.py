"""Does every legal tensor travel unchanged: dtypes, widths, row formats?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ep import MoEEpCommParams, QuantFormat
from tests.backends import Backend, every_backend, on_each
from tests.bits import assert_same_bits
from tests.conftest import RunOnRanks
from tests.gpu_cases import few_on_gpus
from tests.rounds import Played, Round, check_all, play, random_round, random_rows

pytestmark = pytest.mark.multirank


def play_and_check(
    ranks: RunOnRanks,
    backend: Backend,
    device: str,
    params: MoEEpCommParams,
    rounds: Sequence[Round],
    **more: Any,
) -> list[list[Played]]:
    size = rounds[0].ep_size
    played: list[list[Played]] = ranks(
        size, play, device=device, backend=backend.name, params=params, rounds=rounds, **more
    )
    check_all(params, rounds, played)
    return played


@every_backend
def test_int64_ids_give_the_same_bits_as_int32_ids(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    params = MoEEpCommParams(10, 4, 7, 24, invalid_expert_id=77)
    narrow = random_round(params, [7, 0, 3], seed=1, id_dtype=torch.int32)
    wide = replace(narrow, topk_ids=[ids.long() for ids in narrow.topk_ids])
    for one, other in play_and_check(ranks, backend, device, params, [narrow, wide]):
        assert one.topk_ids.dtype == torch.int32
        assert_same_bits(other.topk_ids, one.topk_ids)
        assert_same_bits(other.combined, one.combined)


BYTES_PER_ROW = [1, 2, 3, 4, 6, 8, 12, 14, 16, 20, 63, 144]


@every_backend
@pytest.mark.parametrize("row_bytes", BYTES_PER_ROW)
@few_on_gpus(row_bytes=[1, 14, 16, 20, 63])
def test_rows_of_any_number_of_bytes_arrive_unchanged(
    ranks: RunOnRanks, backend: Backend, device: str, row_bytes: int
) -> None:
    params = MoEEpCommParams(5, 2, 9, row_bytes, dispatch_format=QuantFormat.FP8PerTensor)
    rounds = [random_round(params, n, seed) for seed, n in enumerate([(9, 5), (3, 8)])]
    play_and_check(ranks, backend, device, params, rounds)


@every_backend
@pytest.mark.parametrize("hidden_size", [1, 3, 7, 8, 40, 72, 2880, 2944, 7168])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@few_on_gpus(hidden_size=[1, 7, 72, 7168])
def test_every_token_dtype_and_hidden_size_combines_exactly(
    ranks: RunOnRanks, backend: Backend, device: str, dtype: torch.dtype, hidden_size: int
) -> None:
    params = MoEEpCommParams(6, 3, 5, hidden_size, dtype)
    rounds = [random_round(params, n, seed) for seed, n in enumerate([(5, 2, 1), (0, 5, 3)])]
    play_and_check(ranks, backend, device, params, rounds)


@every_backend
@pytest.mark.parametrize("hidden_size", [1, 33, 128, 200])
@pytest.mark.parametrize("dispatch_format", QuantFormat, ids=lambda format: format.name)
@few_on_gpus(hidden_size=[33, 200])
def test_every_dispatch_format_travels_with_its_scales(
    ranks: RunOnRanks,
    backend: Backend,
    device: str,
    dispatch_format: QuantFormat,
    hidden_size: int,
) -> None:
    params = MoEEpCommParams(6, 2, 5, hidden_size, dispatch_format=dispatch_format)
    rounds = [random_round(params, n, seed) for seed, n in enumerate([(5, 2), (0, 4)])]
    played = play_and_check(ranks, backend, device, params, rounds)
    has_scales = params.dispatch_scale_bytes_per_token > 0
    assert (played[0][0].hidden_states_scale is not None) == has_scales


@every_backend
@pytest.mark.parametrize("with_weights", [True, False])
def test_scales_of_the_commonest_small_step_arrive_unchanged(
    ranks: RunOnRanks, backend: Backend, device: str, with_weights: bool
) -> None:
    params = MoEEpCommParams(16, 8, 5, 2048, dispatch_format=QuantFormat.DeepSeekFp8)
    rounds = [
        random_round(params, n, seed, id_dtype=torch.int32, with_weights=with_weights)
        for seed, n in enumerate([(5, 2), (0, 4)])
    ]
    play_and_check(ranks, backend, device, params, rounds)


@every_backend
@pytest.mark.parametrize(
    "dispatch_format",
    [QuantFormat.FP8PerTensor, QuantFormat.MXFP8, QuantFormat.NVFP4, QuantFormat.MXFP4],
    ids=lambda format: format.name,
)
def test_byte_formats_may_be_given_as_uint8_and_come_back_as_uint8(
    ranks: RunOnRanks, backend: Backend, device: str, dispatch_format: QuantFormat
) -> None:
    params = MoEEpCommParams(6, 2, 5, 48, dispatch_format=dispatch_format)
    one = random_round(params, (5, 2), seed=3)
    one = replace(
        one,
        hidden_states=[rows.view(torch.uint8) for rows in one.hidden_states],
        scales=None if one.scales is None else [rows.view(torch.uint8) for rows in one.scales],
    )
    play_and_check(ranks, backend, device, params, [one])


@every_backend
def test_one_communication_alternates_between_rounds_with_and_without_weights(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    params = MoEEpCommParams(6, 2, 5, 16)
    rounds = [
        random_round(params, (5, 2), seed, with_weights=with_weights)
        for seed, with_weights in enumerate([True, False, True, False])
    ]
    played = play_and_check(ranks, backend, device, params, rounds)
    assert [one.topk_weights is None for one in played[0]] == [False, True, False, True]


@on_each(having="extra_bytes")
@pytest.mark.parametrize("extra", [0, 1, 13, 64])
@few_on_gpus(extra=[13, 64])
def test_rows_may_be_wider_by_the_extra_bytes(
    ranks: RunOnRanks, backend: Backend, device: str, extra: int
) -> None:
    params = MoEEpCommParams(6, 2, 5, 10)
    g = torch.Generator().manual_seed(5)
    one = random_round(params, (5, 2), seed=3)
    wide = [random_rows(n, 20 + extra, torch.uint8, g) for n in (5, 2)]
    one = replace(one, hidden_states=wide)
    options = {"extra_payload_bytes_per_token": 64}
    play_and_check(ranks, backend, device, params, [one], options=options)
