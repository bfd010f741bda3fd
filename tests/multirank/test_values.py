"""Are the sums exact, whatever the values: NaN of every kind, both zeros, infinities, ties?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import MoEEpCommParams
from moe_ep.reference import reference_combine
from tests.backends import (
    Backend,
    every_backend,
    every_backend_spread_too,
    on_each,
    on_shared_gpus,
)
from tests.bits import assert_same_bits
from tests.conftest import RunOnRanks
from tests.gpu_cases import few_on_gpus
from tests.ranks import RankContext
from tests.rounds import Round, check_all, create, ids_of, play, rows_of

pytestmark = pytest.mark.multirank
QUIET_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000}
SIGNALLING_NAN = {torch.bfloat16: 0x7F81, torch.float16: 0x7C01, torch.float32: 0x7F800001}
INTEGER = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
token_dtypes = pytest.mark.parametrize("dtype", list(QUIET_NAN), ids=str)


def combine_given_rows(
    context: RankContext,
    backend: str,
    params: MoEEpCommParams,
    topk_ids: Sequence[Tensor],
    expert_outputs: Sequence[Tensor],
    options: dict[str, Any],
) -> Tensor:
    """Body: one round whose expert outputs are given."""
    with create(context, params, backend, **options) as communication:
        ids = topk_ids[context.rank].to(communication.device)
        rows = torch.zeros(len(ids), params.hidden_size, dtype=params.token_dtype)
        communication.dispatch(rows.to(communication.device), ids)
        partial = expert_outputs[context.rank].to(communication.device)
        return communication.combine(partial).cpu().clone()


def combined_of(
    ranks: RunOnRanks,
    backend: Backend,
    device: str,
    params: MoEEpCommParams,
    topk_ids: Sequence[Tensor],
    expert_outputs: Sequence[Tensor],
    **options: Any,
) -> list[Tensor]:
    """Return each rank's sums, after comparing them with the oracle.

    options: settings that backend and oracle have.
    """
    size = len(topk_ids)
    got: list[Tensor] = ranks(
        size,
        combine_given_rows,
        device=device,
        backend=backend.name,
        params=params,
        topk_ids=topk_ids,
        expert_outputs=expert_outputs,
        options=options,
    )
    wanted = reference_combine(
        params,
        size,
        topk_ids,
        expert_outputs,
        tokens_per_rank=params.max_tokens_per_rank,
        **options,
    )
    for rank in range(size):
        assert_same_bits(got[rank], wanted[rank], rank=rank, what="combined")
    return got


def sum_of_partials(
    ranks: RunOnRanks, backend: Backend, device: str, partials: Sequence[float], dtype: torch.dtype
) -> float:
    """Return what rank 0's only token becomes when owner r hands over `partials[r]`."""
    size = len(partials)
    params = MoEEpCommParams(size, size, 1, 3, dtype)
    everywhere = [ids_of([list(range(size))], size)] + [ids_of([], size)] * (size - 1)
    outputs = [rows_of([value] + [0] * (size - 1), 3, dtype) for value in partials]
    (first, *_) = combined_of(ranks, backend, device, params, everywhere, outputs)
    return float(first[0, 0])


@every_backend
def test_the_sum_is_kept_in_float32(ranks: RunOnRanks, backend: Backend, device: str) -> None:
    # In bfloat16 each 256 + 1 would round back to 256.
    got = sum_of_partials(ranks, backend, device, [256, 1, 1, 1], torch.bfloat16)
    assert got == 260


@every_backend_spread_too
def test_partials_are_added_in_ascending_order_of_the_owner(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    big = float(2**24)  # from here on float32 has no odd numbers
    assert sum_of_partials(ranks, backend, device, [1, 1, big], torch.float32) == big + 2
    assert sum_of_partials(ranks, backend, device, [big, 1, 1], torch.float32) == big
    assert sum_of_partials(ranks, backend, device, [-big, 1, big], torch.float32) == 1
    assert sum_of_partials(ranks, backend, device, [1, -big, big], torch.float32) == 1


@every_backend
def test_a_sum_beyond_the_largest_number_is_infinite(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    assert sum_of_partials(ranks, backend, device, [65504, 65504], torch.float16) == float("inf")
    assert sum_of_partials(ranks, backend, device, [65504, -65504], torch.float16) == 0
    largest = 3.3895313892515355e38
    assert sum_of_partials(ranks, backend, device, [largest] * 2, torch.bfloat16) == float("inf")


@every_backend
@token_dtypes
def test_minus_zero_alone_comes_out_as_plus_zero(
    ranks: RunOnRanks, backend: Backend, device: str, dtype: torch.dtype
) -> None:
    params = MoEEpCommParams(2, 2, 2, 5, dtype)
    ids = [ids_of([[0, 1], [0, -1]], 2), ids_of([[1, -1]], 2)]
    outputs = [torch.full((4, 5), -0.0, dtype=dtype)] * 2
    for combined in combined_of(ranks, backend, device, params, ids, outputs):
        assert not combined.view(INTEGER[dtype]).any()


@every_backend
@token_dtypes
def test_every_nan_comes_out_as_the_one_quiet_nan(
    ranks: RunOnRanks, backend: Backend, device: str, dtype: torch.dtype
) -> None:
    quiet, signalling = QUIET_NAN[dtype], SIGNALLING_NAN[dtype]
    sign = -(2 ** (8 * dtype.itemsize - 1))
    patterns = [quiet, quiet + 1, sign + quiet, signalling, sign + signalling, -1]
    nans = torch.tensor(patterns).to(INTEGER[dtype]).view(dtype)
    assert nans.isnan().all()
    params = MoEEpCommParams(2, 2, 1, len(patterns), dtype)
    ids = [ids_of([[0, 1]], 2), ids_of([[1, -1]], 2)]
    outputs = [torch.zeros(2, len(patterns), dtype=dtype), nans.repeat(2, 1)]
    for combined in combined_of(ranks, backend, device, params, ids, outputs):
        assert combined.view(INTEGER[dtype]).tolist() == [[quiet] * len(patterns)]


def combine_random_bit_patterns(
    ranks: RunOnRanks,
    backend: Backend,
    device: str,
    dtype: torch.dtype,
    size: int,
    **options: Any,
) -> None:
    """Among 16-bit patterns every one occurs: all numbers, both zeros, subnormals, all NaNs."""
    g = torch.Generator().manual_seed(size)
    tokens, hidden_size = 8, 8192
    params = MoEEpCommParams(size, size, tokens, hidden_size, dtype)
    ids = [ids_of([list(range(size))] * tokens, size)] * size
    bits = 8 * dtype.itemsize
    outputs = []
    for _ in range(size):
        if bits == 16:
            order = torch.stack([torch.randperm(2**16, generator=g) for _ in range(size)])
        else:
            order = torch.randint(0, 2**bits, (size, 2**16), generator=g)
        patterns = (order - 2 ** (bits - 1)).to(INTEGER[dtype])
        outputs.append(patterns.view(dtype).view(size * tokens, hidden_size))
    combined_of(ranks, backend, device, params, ids, outputs, **options)


@every_backend
@token_dtypes
@pytest.mark.parametrize("size", [1, 2, 4])
def test_sums_of_random_bit_patterns_are_exact(
    ranks: RunOnRanks, backend: Backend, device: str, dtype: torch.dtype, size: int
) -> None:
    combine_random_bit_patterns(ranks, backend, device, dtype, size)


@on_shared_gpus
@token_dtypes
def test_sums_of_eight_random_bit_patterns_are_exact(
    ranks: RunOnRanks, backend: Backend, device: str, dtype: torch.dtype
) -> None:
    combine_random_bit_patterns(ranks, backend, device, dtype, 8)


@on_shared_gpus
def test_eight_partials_are_added_in_float32_in_ascending_order_of_the_owner(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    big = float(2**24)  # from here on float32 has no odd numbers
    total = [1, 1, 1, 1, 1, 1, 1, big]
    assert sum_of_partials(ranks, backend, device, total, torch.float32) == big + 8
    assert sum_of_partials(ranks, backend, device, total[::-1], torch.float32) == big
    got = sum_of_partials(ranks, backend, device, [256, *[1] * 7], torch.bfloat16)
    assert got == 264  # 263 lies between 262 and 264, nearer to even 264


@on_each(having="low_precision")
@token_dtypes
@pytest.mark.parametrize("size", [1, 4])
@few_on_gpus(size=[4])
def test_low_precision_sums_of_random_bit_patterns_are_exact(
    ranks: RunOnRanks, backend: Backend, device: str, dtype: torch.dtype, size: int
) -> None:
    """With infinities and NaNs in half of the blocks, with float16 in nearly all."""
    precision = {"use_low_precision_combine": True}
    combine_random_bit_patterns(ranks, backend, device, dtype, size, **precision)


def combine_near_ties(
    ranks: RunOnRanks, backend: Backend, device: str, dtype: torch.dtype, **options: Any
) -> None:
    """Partials a few units in the last place apart make many sums that lie between two numbers."""
    g = torch.Generator().manual_seed(3)
    params = MoEEpCommParams(4, 4, 8, 4096, dtype)
    ids = [ids_of([[0, 1, 2, 3]] * 8, 4)] * 4
    outputs = []
    for owner in range(4):
        digits = torch.randint(-255, 256, (32, 4096), generator=g).float()
        outputs.append(torch.ldexp(digits, torch.tensor(-2 * owner)).to(dtype))
    combined_of(ranks, backend, device, params, ids, outputs, **options)


@every_backend
@token_dtypes
def test_ties_round_to_even(
    ranks: RunOnRanks, backend: Backend, device: str, dtype: torch.dtype
) -> None:
    combine_near_ties(ranks, backend, device, dtype)


@on_each(having="low_precision")
@token_dtypes
def test_low_precision_sums_of_finite_rows_are_exact(
    ranks: RunOnRanks, backend: Backend, device: str, dtype: torch.dtype
) -> None:
    combine_near_ties(ranks, backend, device, dtype, use_low_precision_combine=True)


@every_backend_spread_too
def test_nan_in_rows_without_a_token_reaches_no_sum(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    params = MoEEpCommParams(4, 2, 4, 8)
    ids = [ids_of([[0, 1]], 2), ids_of([[3, -1], [-1, -1], [0, 2]], 2)]
    outputs = [torch.full((8, 8), float("nan"), dtype=torch.bfloat16) for _ in range(2)]
    outputs[0][[0, 4]] = 1  # rank 0 holds rank 0's token and rank 1's third
    outputs[1][[4, 5]] = 2  # rank 1 holds rank 1's first and third
    got = combined_of(ranks, backend, device, params, ids, outputs)
    assert got[0][:, 0].tolist() == [1]
    assert got[1][:, 0].tolist() == [2, 0, 3]


@every_backend_spread_too
def test_every_bit_pattern_of_a_payload_arrives_unchanged(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    """Also those that look like flags: -0.0, NaNs, all ones, all zeros."""
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(8, 8192)
    params = MoEEpCommParams(2, 1, 8, 8192)
    one = Round(
        hidden_states=[patterns, patterns.flip(0)],
        topk_ids=[ids_of([[1]] * 8, 1), ids_of([[0]] * 8, 1)],
        topk_weights=[
            torch.tensor([0, -(2**31), -1, 0x7FC00000, 0x7F800001, 1, 2, 3])
            .to(torch.int32)
            .view(torch.float32)
            .view(8, 1)
        ]
        * 2,
    )
    rounds = [one, one]
    played = ranks(2, play, device=device, backend=backend.name, params=params, rounds=rounds)
    check_all(params, rounds, played)


@every_backend
def test_the_same_rows_give_the_same_bits_whatever_batch_is_around_them(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    g = torch.Generator().manual_seed(9)
    few = MoEEpCommParams(4, 4, 1, 1000)
    many = MoEEpCommParams(4, 4, 50, 1000)
    partials = [torch.randn(1, 1000, generator=g).to(torch.bfloat16) for _ in range(4)]
    none, one, all_four = ids_of([], 4), ids_of([[0, 1, 2, 3]], 4), [[0, 1, 2, 3]]
    alone_outputs = [partials[r].repeat(4, 1) for r in range(4)]
    (alone, *_) = combined_of(ranks, backend, device, few, [one, none, none, none], alone_outputs)
    outputs = [torch.randn(200, 1000, generator=g).to(torch.bfloat16) for _ in range(4)]
    for r in range(4):
        outputs[r][37] = partials[r][0]
    crowd = [ids_of(all_four * 50, 4)] * 4
    (among, *_) = combined_of(ranks, backend, device, many, crowd, outputs)
    assert_same_bits(among[37:38], alone)
