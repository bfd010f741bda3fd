"""Do the parameters validate themselves, and do their sizes say what the contract's table says?"""

import dataclasses

import pytest
import torch

from moe_ep import MoEEpCommParams, MoEEpConfigError, QuantFormat, expert_partition
from moe_ep._native import MAX_TOP_K, expert_owner


def params(**changes):
    given = {"num_experts": 10, "top_k": 4, "max_tokens_per_rank": 8, "hidden_size": 64}
    return MoEEpCommParams(**{**given, **changes})


def test_fields_have_the_contract_s_positional_order():
    made = MoEEpCommParams(10, 4, 8, 64, torch.float16, QuantFormat.MXFP8, 99)
    assert dataclasses.astuple(made) == (10, 4, 8, 64, torch.float16, QuantFormat.MXFP8, 99)


def test_defaults_are_bfloat16_rows_and_minus_one():
    made = params()
    assert (made.dtype, made.token_dtype) == (None, torch.bfloat16)
    assert (made.dispatch_format, made.invalid_expert_id) == (None, -1)


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        params().top_k = 1


@pytest.mark.parametrize("name", ["num_experts", "top_k", "max_tokens_per_rank", "hidden_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_positive(name, value):
    with pytest.raises(MoEEpConfigError, match=rf"{name} must be .*got {value}\."):
        params(**{name: value})


@pytest.mark.parametrize("name", ["num_experts", "top_k", "hidden_size", "invalid_expert_id"])
@pytest.mark.parametrize("value", [1.0, "1", True, None])
def test_sizes_and_ids_are_ints(name, value):
    with pytest.raises(TypeError, match=f"{name} must be an int"):
        params(**{name: value})


@pytest.mark.parametrize("top_k", [0, -1, 33])
def test_top_k_outside_its_limit_names_value_and_limit(top_k):
    with pytest.raises(ValueError, match=rf"top_k must be 1..{MAX_TOP_K}, got {top_k}\."):
        params(num_experts=64, top_k=top_k)


def test_top_k_may_reach_its_limit():
    assert params(num_experts=64, top_k=32).top_k == 32


def test_top_k_must_not_exceed_num_experts():
    with pytest.raises(MoEEpConfigError, match="top_k must not exceed num_experts=3, got 4"):
        params(num_experts=3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.int32, "bfloat16"])
def test_dtype_is_a_floating_token_dtype(dtype):
    with pytest.raises(TypeError, match=r"dtype must be one of .*torch\.float32"):
        params(dtype=dtype)


@pytest.mark.parametrize("quant_format", ["mxfp8", torch.float8_e4m3fn, 1])
def test_dispatch_format_is_a_quant_format(quant_format):
    with pytest.raises(TypeError, match="dispatch_format must be a QuantFormat"):
        params(dispatch_format=quant_format)


@pytest.mark.parametrize("invalid", [0, 9])
def test_invalid_expert_id_is_no_expert(invalid):
    with pytest.raises(MoEEpConfigError, match=rf"outside \[0, 10\).*got {invalid}"):
        params(invalid_expert_id=invalid)


@pytest.mark.parametrize("invalid", [-(2**31), -7, 10, 1000, 2**31 - 1])
def test_invalid_expert_id_may_be_any_other_int32(invalid):
    assert params(invalid_expert_id=invalid).invalid_expert_id == invalid


@pytest.mark.parametrize("invalid", [2**31, -(2**31) - 1])
def test_invalid_expert_id_fits_in_int32(invalid):
    with pytest.raises(MoEEpConfigError, match=f"fit in int32, got {invalid}"):
        params(invalid_expert_id=invalid)


@pytest.mark.parametrize(
    ("quant_format", "hidden_size", "values", "scales"),
    [
        (QuantFormat.BF16, 100, 200, 0),
        (QuantFormat.FP16, 100, 200, 0),
        (QuantFormat.FP8PerTensor, 100, 100, 0),
        (QuantFormat.DeepSeekFp8, 128, 128, 4),
        (QuantFormat.DeepSeekFp8, 129, 129, 8),
        (QuantFormat.MXFP8, 64, 64, 2),
        (QuantFormat.MXFP8, 65, 65, 3),
        (QuantFormat.NVFP4, 64, 32, 4),
        (QuantFormat.NVFP4, 65, 33, 5),
        (QuantFormat.MXFP4, 64, 32, 2),
        (QuantFormat.MXFP4, 1, 1, 1),
    ],
)
def test_bytes_of_a_quantised_row(quant_format, hidden_size, values, scales):
    made = params(hidden_size=hidden_size, dispatch_format=quant_format)
    assert made.dispatch_value_bytes_per_token == values
    assert made.dispatch_scale_bytes_per_token == scales
    assert made.dispatch_bytes_per_token == values + scales
    assert made.combine_bytes_per_token == 2 * hidden_size


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 4), (torch.float16, 2), (torch.bfloat16, 2), (None, 2)]
)
def test_bytes_of_an_unquantised_row(dtype, size):
    made = params(hidden_size=7, dtype=dtype)
    assert made.dispatch_bytes_per_token == made.combine_bytes_per_token == 7 * size


@pytest.mark.parametrize(
    ("num_experts", "ep_size", "shares"),
    [
        (10, 4, [3, 3, 2, 2]),
        (256, 3, [86, 85, 85]),
        (30, 8, [4] * 6 + [3] * 2),
        (2, 4, [1, 1, 0, 0]),
        (8, 1, [8]),
    ],
)
def test_experts_are_owned_in_contiguous_blocks(num_experts, ep_size, shares):
    blocks = [expert_partition(num_experts, ep_size, rank) for rank in range(ep_size)]
    assert blocks == [(sum(shares[:rank]), share) for rank, share in enumerate(shares)]


@pytest.mark.parametrize("ep_rank", [-1, 4])
def test_expert_partition_refuses_a_rank_outside_the_group(ep_rank):
    with pytest.raises(MoEEpConfigError, match=rf"ep_rank must be 0..3 .*got {ep_rank}"):
        expert_partition(8, 4, ep_rank)


@pytest.mark.parametrize("ep_size", [1, 2, 3, 4, 7, 8, 256])
def test_every_expert_lies_in_the_block_of_its_owner(ep_size):
    for num_experts in (1, 2, 3, 7, 10, 30, 255, 256, 257, 1000):
        owners = [
            rank
            for rank in range(ep_size)
            for _ in range(expert_partition(num_experts, ep_size, rank)[1])
        ]
        assert owners == [expert_owner(num_experts, ep_size, e) for e in range(num_experts)]
