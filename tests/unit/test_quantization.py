"""Do csrc/core and moe_ep.quantization give the same bits, and those that the formats promise?"""

from __future__ import annotations

import ctypes
import enum
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_ep import _native
from moe_ep.errors import MoEEpConfigError
from moe_ep.params import QuantFormat, row_format
from moe_ep.quantization import (
    BLOCK_FORMATS,
    ScaleLayout,
    dequantize_fp8,
    dequantize_rows,
    quantize_rows,
    quantize_to_fp8,
    scale_shape,
)

ROOT = Path(__file__).resolve().parents[2]
MXFP8, MXFP4, NVFP4 = QuantFormat.MXFP8, QuantFormat.MXFP4, QuantFormat.NVFP4
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
every_format = pytest.mark.parametrize("quant_format", BLOCK_FORMATS)
every_layout = pytest.mark.parametrize("layout", ScaleLayout)


class Native:
    """The functions of tests/native/quantization.cpp on tensors."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.scale_bytes_of.restype = ctypes.c_int64
        self.library.scale_offset_of.restype = ctypes.c_int64

    def convert(self, function: str, numbers: Tensor, out_dtype: torch.dtype) -> Tensor:
        out = torch.empty(numbers.shape, dtype=out_dtype)
        getattr(self.library, function)(
            _address(numbers), ctypes.c_int64(numbers.numel()), _address(out)
        )
        return out

    def quantize(
        self, rows: Tensor, quant_format: QuantFormat, layout: ScaleLayout, scalar_scale: float
    ) -> tuple[Tensor, Tensor]:
        num_rows, hidden_size = rows.shape
        columns = row_format(quant_format, hidden_size, torch.float32).value_columns
        values = torch.full((num_rows, columns), 0xA5, dtype=torch.uint8)
        shape = scale_shape(quant_format, num_rows, hidden_size, layout)
        scales = torch.full(shape, 0xA5, dtype=torch.uint8)
        self.library.quantize(
            _address(rows),
            ctypes.c_int64(num_rows),
            ctypes.c_int64(hidden_size),
            _number(_native.QuantFormat, quant_format),
            _number(_native.ScaleLayout, layout),
            ctypes.c_float(scalar_scale),
            _address(values),
            _address(scales),
        )
        return values, scales

    def quantize_to_fp8(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of [num_rows, 128]."""
        num_rows, _ = rows.shape
        values = torch.full(rows.shape, 0xA5, dtype=torch.uint8)
        scales = torch.full((num_rows, 1), math.nan)
        self.library.quantize_fp8_blocks(
            _address(rows), ctypes.c_int64(num_rows), _address(values), _address(scales)
        )
        return values, scales

    def scale_bytes(self, layout: ScaleLayout, num_rows: int, num_blocks: int) -> int:
        sizes = [ctypes.c_int64(size) for size in (num_rows, num_blocks)]
        return int(self.library.scale_bytes_of(_number(_native.ScaleLayout, layout), *sizes))

    def scale_offset(self, layout: ScaleLayout, row: int, block: int, num_blocks: int) -> int:
        sizes = [ctypes.c_int64(size) for size in (row, block, num_blocks)]
        return int(self.library.scale_offset_of(_number(_native.ScaleLayout, layout), *sizes))


# The second compilation may use wide vectors and fused multiply-add: neither may change a bit.
@pytest.fixture(scope="module", params=["-O2", "-O3 -march=native"])
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Native:
    library = tmp_path_factory.mktemp("native") / "quantization.so"
    command = [*os.environ.get("CXX", "c++").split(), "-std=c++20", *request.param.split()]
    command += ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I", str(ROOT / "csrc")]
    subprocess.run(
        [*command, str(ROOT / "tests/native/quantization.cpp"), "-o", str(library)], check=True
    )
    return Native(library)


def _number(native_enum: Any, member: enum.Enum) -> int:
    """The number by which C++ knows a member."""
    return int(native_enum.__members__[member.name])


def _address(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def bits_of(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int32)


def floats_with_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def assert_same_bits(got: Tensor, wanted: Tensor, what: str = "") -> None:
    if got.dtype == torch.float32:
        got, wanted = bits_of(got), bits_of(wanted)
    elif got.element_size() == 1:
        got, wanted = got.view(torch.uint8), wanted.view(torch.uint8)
    assert got.shape == wanted.shape, what
    if not torch.equal(got, wanted):
        at = (got != wanted).nonzero()[0].tolist()
        raise AssertionError(
            f"{what} at {at}: got {got[tuple(at)]:#x}, wanted {wanted[tuple(at)]:#x}"
        )


def difficult_floats() -> Tensor:
    """Random bit patterns, and all numbers of each format and all midpoints between, +-1 ulp."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (200_000,), generator=generator)
    codes = torch.arange(2**15, dtype=torch.int16)
    grids = [codes.view(torch.float16), codes.view(torch.bfloat16)]
    grids.append(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn))
    patterns = [random]
    for grid in [grid.double() for grid in grids] + [torch.tensor(E2M1, dtype=torch.float64)]:
        finite = grid[grid.isfinite()]
        beyond = finite[-1] + (finite[-1] - finite[-2]) * torch.tensor([0.5, 1.0])
        points = torch.cat([finite, (finite[1:] + finite[:-1]) / 2, beyond]).float()
        patterns += [bits_of(sign * points).long() + ulp for sign in (1, -1) for ulp in (-1, 0, 1)]
    patterns.append(bits_of(torch.tensor([math.inf, -math.inf, math.nan, -0.0, 0.0])).long())
    patterns.append(torch.tensor([0x7F800001, -0x7FFFFF, -1, 1, 0x7FFFFF, 0x7F7FFFFF]))
    return floats_with_bits(torch.cat(patterns).clamp(-(2**31), 2**31 - 1))


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "ue8m0"])
def test_every_code_decodes_as_torch_says(native: Native, name: str) -> None:
    dtype = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "e4m3": torch.float8_e4m3fn,
        "ue8m0": torch.float8_e8m0fnu,
    }[name]
    unsigned = torch.uint16 if dtype.itemsize == 2 else torch.uint8
    codes = torch.arange(256**dtype.itemsize, dtype=torch.int32).to(unsigned)
    wanted = codes.view(dtype).float()
    got = native.convert(f"{name}_to_floats", codes, torch.float32)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert_same_bits(got[~got.isnan()], wanted[~got.isnan()], name)


def test_every_e2m1_code_decodes(native: Native) -> None:
    got = native.convert("e2m1_to_floats", torch.arange(16, dtype=torch.uint8), torch.float32)
    assert_same_bits(got, torch.tensor([sign * number for sign in (1, -1) for number in E2M1]))


@pytest.mark.parametrize(
    ("name", "dtype", "nan"),
    [
        ("bf16", torch.bfloat16, 0x7FC0),
        ("fp16", torch.float16, 0x7E00),
        ("e4m3", torch.float8_e4m3fn, 0x7F),
    ],
)
def test_floats_encode_as_torch_rounds_them_and_nan_has_one_code(
    native: Native, name: str, dtype: torch.dtype, nan: int
) -> None:
    numbers = difficult_floats()
    integer = torch.int16 if dtype.itemsize == 2 else torch.uint8
    saturated = numbers.clamp(-448, 448) if dtype == torch.float8_e4m3fn else numbers
    wanted = saturated.to(dtype).view(integer)
    wanted[numbers.isnan()] = nan
    assert_same_bits(native.convert(f"floats_to_{name}", numbers, integer), wanted, name)


def test_floats_encode_to_the_nearest_e2m1_ties_to_even(native: Native) -> None:
    numbers = difficult_floats()
    size = numbers.abs()
    # A midpoint belongs to the neighbour with the even code.
    wanted = sum(
        (size > midpoint if lower % 2 == 0 else size >= midpoint).int()
        for lower, midpoint in enumerate([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    )
    wanted = torch.where(numbers.isnan(), 0, wanted + 8 * torch.signbit(numbers)).to(torch.uint8)
    assert_same_bits(native.convert("floats_to_e2m1", numbers, torch.uint8), wanted)


def random_rows(kind: str, num_rows: int, hidden_size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, hidden_size)
    if kind == "any bits":
        return floats_with_bits(torch.randint(-(2**31), 2**31, shape, generator=generator))
    if kind == "ties":
        return torch.randint(-60, 60, shape, generator=generator) / 8
    rows = torch.randn(shape, generator=generator)
    if kind == "sparse":
        return rows * (torch.rand(shape, generator=generator) < 0.05)
    if kind == "any magnitude":
        return rows * torch.exp2(torch.randint(-150, 128, (num_rows, 1), generator=generator))
    return rows


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["any bits", "ties", "sparse", "any magnitude", "plain"]),
    num_rows=st.sampled_from([0, 1, 3, 8, 9, 130]),
    hidden_size=st.integers(1, 200),
    seed=st.integers(0, 2**31),
    scalar_scale=st.floats(2.0**-20, 2.0**20, width=32),
)
def test_the_kernels_quantise_as_the_python_definition(
    native: Native, kind: str, num_rows: int, hidden_size: int, seed: int, scalar_scale: float
) -> None:
    rows = random_rows(kind, num_rows, hidden_size, seed)
    for quant_format in BLOCK_FORMATS:
        scalar = scalar_scale if quant_format is NVFP4 else 1.0
        for layout in ScaleLayout:
            what = f"{quant_format.name} {layout.name}"
            got = native.quantize(rows, quant_format, layout, scalar)
            wanted = quantize_rows(rows, quant_format, scalar_scale=scalar, layout=layout)
            assert_same_bits(got[0], wanted[0], f"{what} values")
            assert_same_bits(got[1], wanted[1], f"{what} scales")


@every_layout
def test_a_scale_lies_where_the_layout_says(native: Native, layout: ScaleLayout) -> None:
    num_rows, num_blocks = 140, 7
    rows = torch.zeros(num_rows, 32 * num_blocks)
    number = torch.arange(num_rows * num_blocks).view(num_rows, num_blocks)
    rows[:, ::32] = torch.exp2(number % 251 - 126)  # each scale tells its place, modulo a prime
    scales = quantize_rows(rows, MXFP4, layout=layout)[1].view(torch.uint8).flatten()
    assert scales.numel() == native.scale_bytes(layout, num_rows, num_blocks)
    plain = quantize_rows(rows, MXFP4)[1].view(torch.uint8)
    for row in range(num_rows):
        for block in range(num_blocks):
            offset = native.scale_offset(layout, row, block, num_blocks)
            assert scales[offset] == plain[row, block], (row, block)
            scales[offset] = 0
    assert not scales.any(), "padding is zero"


def test_scale_offsets_worked_by_hand(native: Native) -> None:
    # Row 161 = 128 + 32 + 1, block 6 of 9 (12 with padding).
    assert native.scale_offset(ScaleLayout.LINEAR, 161, 6, 9) == 161 * 9 + 6
    assert native.scale_offset(ScaleLayout.SWIZZLE_128x4, 161, 6, 9) == 128 * 12 + 512 + 16 + 4 + 2
    assert native.scale_offset(ScaleLayout.SWIZZLE_8x4, 161, 6, 9) == 160 * 12 + 32 + 4 + 2
    assert native.scale_bytes(ScaleLayout.SWIZZLE_128x4, 161, 9) == 256 * 12
    assert native.scale_bytes(ScaleLayout.SWIZZLE_8x4, 161, 9) == 168 * 12


def quantize_one(
    numbers: list[float], quant_format: QuantFormat, scalar_scale: float = 1.0
) -> list[str]:
    """[values, scales] of one row, in hexadecimal."""
    stored = quantize_rows(torch.tensor([numbers]), quant_format, scalar_scale=scalar_scale)
    return [bytes(part.view(torch.uint8).flatten().tolist()).hex(" ") for part in stored]


@pytest.mark.parametrize(
    ("numbers", "quant_format", "values", "scales"),
    [
        ([448.0, 1.0], MXFP8, "7e 38", "7f"),
        ([448.5, 1.0], MXFP8, "76 30", "80"),  # scale 2: 224.25 -> 224
        ([-0.0, 0.0], MXFP8, "80 00", "00"),
        ([6.0, 1.0, -2.0], MXFP4, "27 0c", "7f"),  # low nibble first, then a zero nibble
        ([6.25, 1.0], MXFP4, "15", "80"),  # scale 2: 3.125 -> 3
        ([2.0**-149], MXFP8, "00", "00"),
        ([2.0**-130], MXFP8, "20", "00"),  # 2**-3 in units of 2**-127
        ([6.0, 1.0], NVFP4, "27", "38"),
        ([3.0, 0.5], NVFP4, "27", "30"),
        ([0.001, -0.001], NVFP4, "80", "00"),  # the scale rounds to zero
        ([6000.0, 448.0], NVFP4, "27", "7e"),  # the scale saturates, then the element
    ],
)
def test_blocks_worked_by_hand(
    numbers: list[float], quant_format: QuantFormat, values: str, scales: str
) -> None:
    assert quantize_one(numbers, quant_format) == [values, scales]


def test_the_scalar_scale_multiplies_the_scales_and_leaves_the_elements() -> None:
    assert quantize_one([3.0, 0.5], NVFP4, scalar_scale=16.0) == ["27", "50"]


@every_format
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_infinity_and_nan_poison_their_block_and_no_other(
    native: Native, quant_format: QuantFormat, bad: float
) -> None:
    rows = torch.ones(1, 96)
    rows[0, 40] = bad
    values, scales = native.quantize(rows, quant_format, ScaleLayout.LINEAR, 1.0)
    poisoned = slice(32, 48) if quant_format is NVFP4 else slice(32, 64)
    got = dequantize_rows(values, scales, quant_format, 96)
    wanted = torch.ones(1, 96)
    wanted[0, poisoned] = math.nan
    torch.testing.assert_close(got, wanted, rtol=0.1, atol=0, equal_nan=True)
    per_byte = 1 if quant_format is MXFP8 else 2
    assert not values[0, poisoned.start // per_byte : poisoned.stop // per_byte].any()


@pytest.mark.parametrize("quant_format", [MXFP8, MXFP4])
def test_an_mx_scale_is_the_smallest_with_which_nothing_overflows(
    quant_format: QuantFormat,
) -> None:
    rows = random_rows("any magnitude", 200, 64, seed=1)
    rows = rows[rows.isfinite().all(1)]
    scales = quantize_rows(rows, quant_format)[1].double()
    largest = rows.view(-1, 2, 32).abs().amax(2).double()
    limit = 448.0 if quant_format is MXFP8 else 6.0
    assert (largest <= scales * limit).all()
    assert ((largest > scales / 2 * limit) | (scales == 2.0**-127)).all()


@every_format
@every_layout
def test_numbers_that_the_format_has_come_back_unchanged(
    quant_format: QuantFormat, layout: ScaleLayout
) -> None:
    rows = torch.tensor(E2M1)[torch.arange(37 * 45).remainder(8)].view(37, 45) * -4
    values, scales = quantize_rows(rows, quant_format, layout=layout)
    assert_same_bits(dequantize_rows(values, scales, quant_format, 45, layout=layout), rows)
    as_bytes = values.view(torch.uint8), scales.view(torch.uint8).flatten()
    assert_same_bits(dequantize_rows(*as_bytes, quant_format, 45, layout=layout), rows)


@every_format
@pytest.mark.parametrize("hidden_size", [1, 2, 15, 16, 17, 31, 32, 33, 7168])
def test_quantised_rows_have_the_row_format_that_dispatch_takes(
    quant_format: QuantFormat, hidden_size: int
) -> None:
    values, scales = quantize_rows(torch.ones(3, hidden_size), quant_format)
    stored = row_format(quant_format, hidden_size, torch.float32)
    assert values.shape == (3, stored.value_columns)
    assert values.dtype == stored.value_dtypes[0]
    assert scales.shape == (3, stored.scale_columns)
    assert scales.dtype == stored.scale_dtypes[0]


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["any bits", "ties", "sparse", "any magnitude", "plain"]),
    num_rows=st.sampled_from([0, 1, 300]),
    hidden_size=st.integers(1, 300),
    seed=st.integers(0, 2**31),
)
def test_fp8_rows_are_those_of_the_python_definition(
    native: Native, kind: str, num_rows: int, hidden_size: int, seed: int
) -> None:
    rows = random_rows(kind, num_rows, hidden_size, seed)
    num_blocks = -(-hidden_size // 128)
    blocks = torch.zeros(num_rows, num_blocks * 128)
    blocks[:, :hidden_size] = rows
    got_values, got_scales = native.quantize_to_fp8(blocks.view(-1, 128))
    values, scales = quantize_to_fp8(rows)
    assert_same_bits(got_values.view(num_rows, num_blocks * 128)[:, :hidden_size], values, "values")
    assert_same_bits(got_scales.view(num_rows, num_blocks), scales, "scales")


@pytest.mark.parametrize(
    ("numbers", "values", "scale"),
    [
        ([448.0, 1.0, -2.0], "7e 38 c0", 1 + 2.0**-19),  # 448 * (1 / 448) rounds to above 1
        ([0.0, -0.0], "00 80", 2.0**-100 / 448),
        ([2.0**-100, -(2.0**-109)], "7e b6", 2.0**-100 / 448),  # -0.875
        ([3.4028234663852886e38, 1.0], "7e 00", 3.4028234663852886e38 / 448),
    ],
)
def test_fp8_blocks_worked_by_hand(numbers: list[float], values: str, scale: float) -> None:
    got_values, got_scale = quantize_to_fp8(torch.tensor([numbers]))
    assert bytes(got_values.view(torch.uint8).flatten().tolist()).hex(" ") == values
    assert got_scale.item() == pytest.approx(scale, rel=2.0**-18)


def test_an_fp8_number_is_an_exact_product_near_the_given_one() -> None:
    rows = random_rows("any magnitude", 2000, 128, seed=1)
    rows = rows[rows.isfinite().all(1)]
    values, scales = quantize_to_fp8(rows)
    numbers = dequantize_fp8(values, scales)
    assert torch.equal(numbers.double(), values.double() * scales.double())
    error = (numbers.double() - rows.double()).abs()
    largest = rows.abs().amax(1, keepdim=True).clamp(min=2.0**-100)
    assert ((error <= rows.abs() / 16) | (error <= largest * 2.0**-18)).all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_infinity_and_nan_poison_their_fp8_block_and_no_other(native: Native, bad: float) -> None:
    rows = torch.ones(1, 300)
    rows[0, 130] = bad
    values, scales = quantize_to_fp8(rows)
    assert scales.isnan().tolist() == [[False, True, False]]
    assert not values.view(torch.uint8)[0, 128:256].any()
    assert dequantize_fp8(values, scales).isnan().nonzero()[:, 1].tolist() == list(range(128, 256))
    got_values, got_scales = native.quantize_to_fp8(rows[:, 128:256].contiguous())
    assert_same_bits(got_values, values[:, 128:256].contiguous())
    assert_same_bits(got_scales, scales[:, 1:2].contiguous())


@pytest.mark.parametrize("hidden_size", [1, 127, 128, 129, 7168])
def test_fp8_rows_have_the_row_format_that_dispatch_takes(hidden_size: int) -> None:
    values, scales = quantize_to_fp8(torch.ones(3, hidden_size))
    stored = row_format(QuantFormat.DeepSeekFp8, hidden_size, torch.float32)
    assert values.shape == (3, stored.value_columns)
    assert values.dtype == stored.value_dtypes[0]
    assert scales.shape == (3, stored.scale_columns)
    assert scales.dtype == stored.scale_dtypes[0]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"rows must be float32 .* got torch\.float16 \[1, 1\]"):
        quantize_to_fp8(torch.ones(1, 1, dtype=torch.float16))
    with pytest.raises(MoEEpConfigError, match="quant_format must be one of MXFP8, MXFP4, NVFP4"):
        quantize_rows(torch.ones(1, 1), QuantFormat.DeepSeekFp8)
    with pytest.raises(TypeError, match=r"rows must be float32 .* got torch\.bfloat16 \[1, 1\]"):
        quantize_rows(torch.ones(1, 1, dtype=torch.bfloat16), MXFP8)
    for scalar_scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(MoEEpConfigError, match="scalar_scale must be finite and positive"):
            quantize_rows(torch.ones(1, 1), NVFP4, scalar_scale=scalar_scale)
    with pytest.raises(MoEEpConfigError, match=r"scalar_scale must be 1.0 for MXFP4 .* got 2\.0"):
        quantize_rows(torch.ones(1, 1), MXFP4, scalar_scale=2.0)
    with pytest.raises(
        MoEEpConfigError, match=r"values \[2, 32\] and 2 scales, got values \[2, 32\]"
    ):
        dequantize_rows(torch.ones(2, 32, dtype=torch.uint8), torch.ones(3), MXFP8, 32)


def test_fp8_values_may_be_bytes_and_scales_must_be_of_their_blocks() -> None:
    values, scales = quantize_to_fp8(torch.randn(3, 300))
    numbers = dequantize_fp8(values, scales)
    assert dequantize_fp8(values.view(torch.uint8), scales).equal(numbers)
    for wrong in (scales[:, :1], scales[:, :2], scales[:2]):
        with pytest.raises(MoEEpConfigError, match=r"need scales \[3, 3\]"):
            dequantize_fp8(values, wrong)
