"""What do the block-scaled formats store? MXFP8, MXFP4, NVFP4 and DeepSeek's FP8 in plain torch.

`combine` can hand out its float32 sums in the first three, for the next matrix multiplication, and
expert rows can travel in the last. This module says, in a few readable lines, which bits come out
then; the kernels give exactly the same.

A row is cut into blocks, the last one may be shorter; each block has one scale:

    format  element  block  scale          stored number
    MXFP8   e4m3     32     power of two   element * scale
    MXFP4   e2m1     32     power of two   element * scale
    NVFP4   e2m1     16     e4m3           element * scale / scalar_scale
    FP8     e4m3     128    float32        element * scale

The MX scale is the smallest power of two (2**-127 or more) with which no element of the block
overflows, as in the recipes of cuBLAS and TensorRT-LLM; the OCP specification suggests to round it
down and to saturate. The FP8 scale is the largest magnitude / 448, rounded up to 20 bits, so that
products with elements are exact; it does not go below that of 2**-100. In every format a block with
an infinity or NaN gets the scale NaN and elements zero.
"""

from __future__ import annotations

import enum
import math

import torch
from torch import Tensor

from moe_ep.errors import MoEEpConfigError
from moe_ep.params import QuantFormat, row_format

BLOCK_FORMATS = (QuantFormat.MXFP8, QuantFormat.MXFP4, QuantFormat.NVFP4)
"""What combine can hand out besides unquantised rows."""

_BLOCK_SIZE = {QuantFormat.MXFP8: 32, QuantFormat.MXFP4: 32, QuantFormat.NVFP4: 16}
_LARGEST_ELEMENT = {QuantFormat.MXFP8: 448.0, QuantFormat.MXFP4: 6.0, QuantFormat.NVFP4: 6.0}
_FP8_BLOCK_SIZE = 128
_LARGEST_FP8_SCALE = 1198368 * 2.0**96 + 2.0**119
"""Of 20 bits, with a finite product with 448."""
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The number of each e2m1 code 0..7; bit 3 is the sign."""


class ScaleLayout(enum.Enum):
    """Where the scales of a matrix lie.

    The swizzled layouts are cut into tiles of 128 or 8 rows by 4 blocks, one after another along a
    group of rows. They pad rows to whole tiles and blocks to a multiple of 4, with zero bytes.
    """

    LINEAR = "linear"
    """[row][block]"""
    SWIZZLE_128x4 = "128x4"
    """[row // 128][block // 4][row % 32][row // 32 % 4][block % 4], as cuBLAS reads it."""
    SWIZZLE_8x4 = "8x4"
    """[row // 8][block // 4][row % 8][block % 4]"""


def scale_shape(
    quant_format: QuantFormat, num_rows: int, hidden_size: int, layout: ScaleLayout
) -> tuple[int, int]:
    """Return the (rows, blocks) of the scales of `[num_rows, hidden_size]`, padding included."""
    num_blocks = _ceil_div(hidden_size, _BLOCK_SIZE[quant_format])
    match layout:
        case ScaleLayout.LINEAR:
            return num_rows, num_blocks
        case ScaleLayout.SWIZZLE_128x4:
            return _ceil_div(num_rows, 128) * 128, _ceil_div(num_blocks, 4) * 4
        case ScaleLayout.SWIZZLE_8x4:
            return _ceil_div(num_rows, 8) * 8, _ceil_div(num_blocks, 4) * 4


def quantize_rows(
    rows: Tensor,
    quant_format: QuantFormat,
    *,
    scalar_scale: float = 1.0,
    layout: ScaleLayout = ScaleLayout.LINEAR,
) -> tuple[Tensor, Tensor]:
    """Quantise float32 `rows` [num_rows, hidden_size].

    Returns (values, scales). values: [num_rows, hidden_size] float8_e4m3fn (MXFP8), or
    [num_rows, ceil(hidden_size / 2)] uint8 (MXFP4, NVFP4): two e2m1 codes a byte, the earlier one
    in the low nibble. scales: `scale_shape(...)`, float8_e8m0fnu (MX) or float8_e4m3fn (NVFP4);
    contiguous, its bytes in the order of `layout`.

    Raises TypeError if rows are not float32, MoEEpConfigError as `check_quantization`.
    """
    check_quantization(quant_format, scalar_scale)
    _require_float32_rows(rows)
    blocks = _cut_into_blocks(rows, _BLOCK_SIZE[quant_format])
    largest = blocks.abs().amax(dim=2)
    largest = torch.where(largest.isfinite(), largest, torch.nan)
    if quant_format is QuantFormat.NVFP4:
        # Tensors, not Python numbers: torch may turn a division by a number into a product.
        scalar, six = rows.new_tensor(scalar_scale), rows.new_tensor(6.0)
        scales = _to_e4m3(scalar * (largest / six))
        multiplier = torch.where(scales.float() == 0, 0.0, scalar / scales.float())
        elements = blocks * multiplier[:, :, None]
    else:
        scales = _power_of_two_scale(largest, _LARGEST_ELEMENT[quant_format])
        elements = blocks / scales.float()[:, :, None]
    elements = torch.where(elements.isnan(), 0.0, elements)

    num_rows, hidden_size = rows.shape
    elements = elements.flatten(1)[:, :hidden_size]
    values = _to_e4m3(elements) if quant_format is QuantFormat.MXFP8 else _to_packed_e2m1(elements)
    padded = torch.zeros(
        scale_shape(quant_format, num_rows, hidden_size, layout),
        dtype=torch.uint8,
        device=rows.device,
    )
    padded[:num_rows, : scales.shape[1]] = scales.view(torch.uint8)
    return values, _swizzle(padded, layout).view(scales.dtype)


def dequantize_rows(
    values: Tensor,
    scales: Tensor,
    quant_format: QuantFormat,
    hidden_size: int,
    *,
    scalar_scale: float = 1.0,
    layout: ScaleLayout = ScaleLayout.LINEAR,
) -> Tensor:
    """Return the float32 [num_rows, hidden_size] that `quantize_rows` with these arguments stored.

    values and scales are as `quantize_rows` returns them; uint8 views of them are accepted, and
    scales of any shape with the right number of elements.

    Raises MoEEpConfigError as `check_quantization`, and if a size does not match.
    """
    check_quantization(quant_format, scalar_scale)
    stored = row_format(quant_format, hidden_size, torch.float32)
    num_rows = values.shape[0]
    shape = scale_shape(quant_format, num_rows, hidden_size, layout)
    if values.shape != (num_rows, stored.value_columns) or scales.numel() != math.prod(shape):
        raise MoEEpConfigError(
            f"{quant_format.name} rows of hidden_size={hidden_size} in {layout.name} need values "
            f"[{num_rows}, {stored.value_columns}] and {math.prod(shape)} scales, got values "
            f"{list(values.shape)} and {scales.numel()} scales."
        )
    if quant_format is QuantFormat.MXFP8:
        elements = values.view(torch.float8_e4m3fn).float()
    else:
        elements = _from_packed_e2m1(values.view(torch.uint8))[:, :hidden_size]
    scales = _swizzle(scales.view(torch.uint8).reshape(shape), layout, inverse=True)
    scales = scales[:num_rows, : stored.scale_columns].contiguous().view(stored.scale_dtypes[0])
    factors = scales.float() / torch.tensor(scalar_scale, device=values.device)
    blocks = _cut_into_blocks(elements, _BLOCK_SIZE[quant_format]) * factors[:, :, None]
    return blocks.flatten(1)[:, :hidden_size]


def quantize_to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise float32 `rows` [num_rows, hidden_size] to `QuantFormat.DeepSeekFp8`.

    Returns (values, scales): [num_rows, hidden_size] float8_e4m3fn and
    [num_rows, ceil(hidden_size / 128)] float32.

    Raises TypeError if rows are not float32.
    """
    _require_float32_rows(rows)
    blocks = _cut_into_blocks(rows, _FP8_BLOCK_SIZE)
    largest = blocks.abs().amax(dim=2)
    is_finite = largest.isfinite()
    exact = torch.where(is_finite, largest, 0.0).clamp(min=2.0**-100) * rows.new_tensor(1 / 448)
    rounded_up = ((exact.view(torch.int32) + 15) & ~15).view(torch.float32)
    scales = rounded_up.clamp(max=_LARGEST_FP8_SCALE)
    # By a tensor, not a Python number: torch may compute the inverse of a number in another way.
    elements = blocks * (torch.ones_like(scales) / scales)[:, :, None]
    elements = torch.where(is_finite[:, :, None], elements, 0.0)
    values = _to_e4m3(elements.flatten(1)[:, : rows.shape[1]])
    return values, torch.where(is_finite, scales, torch.nan)


def dequantize_fp8(values: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 [num_rows, hidden_size] that `quantize_to_fp8` stored.

    A uint8 view of the values is accepted. Raises MoEEpConfigError if the number of scales does not
    match.
    """
    shape = (values.shape[0], _ceil_div(values.shape[1], _FP8_BLOCK_SIZE))
    if scales.shape != shape:
        raise MoEEpConfigError(
            f"values {list(values.shape)} need scales {list(shape)}, got {list(scales.shape)}."
        )
    elements = values.view(torch.float8_e4m3fn).float()
    blocks = _cut_into_blocks(elements, _FP8_BLOCK_SIZE) * scales[:, :, None]
    return blocks.flatten(1)[:, : values.shape[1]]


def check_quantization(
    quant_format: QuantFormat,
    scalar_scale: float,
    names: tuple[str, str] = ("quant_format", "scalar_scale"),
) -> None:
    """Raise MoEEpConfigError unless rows can be quantised to `quant_format` with `scalar_scale`.

    names: what the caller knows the two as.
    """
    if quant_format not in BLOCK_FORMATS:
        known = ", ".join(format.name for format in BLOCK_FORMATS)
        raise MoEEpConfigError(f"{names[0]} must be one of {known}, got {quant_format}.")
    if not (math.isfinite(scalar_scale) and scalar_scale > 0):
        raise MoEEpConfigError(f"{names[1]} must be finite and positive, got {scalar_scale}.")
    if quant_format is not QuantFormat.NVFP4 and scalar_scale != 1.0:
        raise MoEEpConfigError(
            f"{names[1]} must be 1.0 for {quant_format.name} (only NVFP4 has one), got "
            f"{scalar_scale}."
        )


def _require_float32_rows(rows: Tensor) -> None:
    if rows.dtype != torch.float32 or rows.dim() != 2:
        raise TypeError(
            f"rows must be float32 [num_rows, hidden_size], got {rows.dtype} {list(rows.shape)}."
        )


def _cut_into_blocks(rows: Tensor, size: int) -> Tensor:
    """[num_rows, n] -> [num_rows, ceil(n / size), size], the last block filled up with zeros."""
    num_rows, columns = rows.shape
    num_blocks = _ceil_div(columns, size)
    padded = rows.new_zeros(num_rows, num_blocks * size)
    padded[:, :columns] = rows
    return padded.view(num_rows, num_blocks, size)


def _power_of_two_scale(largest: Tensor, largest_element: float) -> Tensor:
    """The smallest ue8m0 `s` with `largest <= s * largest_element`; NaN for NaN."""
    mantissa, exponent = torch.frexp(largest)
    element_mantissa, element_exponent = math.frexp(largest_element)
    exponent = exponent - element_exponent + (mantissa > element_mantissa).int()
    exponent = torch.where(largest == 0, -127, exponent.clamp(min=-127))
    code = torch.where(largest.isnan(), 0xFF, exponent + 127)
    return code.to(torch.uint8).view(torch.float8_e8m0fnu)


def _to_e4m3(numbers: Tensor) -> Tensor:
    """Round to the nearest e4m3, ties to even, saturating (torch releases differ in that)."""
    return numbers.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def _to_packed_e2m1(numbers: Tensor) -> Tensor:
    """Round [num_rows, n] to the nearest e2m1, ties to even, saturating; two codes a byte."""
    table = numbers.new_tensor(_E2M1_MAGNITUDES)
    midpoints = (table[:-1] + table[1:]) / 2
    # Of a midpoint, the lower and the upper neighbour; else twice the nearest.
    lower = torch.bucketize(numbers.abs(), midpoints, right=False)
    upper = torch.bucketize(numbers.abs(), midpoints, right=True)
    codes = torch.where(lower % 2 == 0, lower, upper) + 8 * torch.signbit(numbers)
    pairs = _cut_into_blocks(codes, 2)
    return (pairs[:, :, 0] + 16 * pairs[:, :, 1]).to(torch.uint8)


def _from_packed_e2m1(packed: Tensor) -> Tensor:
    """[num_rows, n] bytes -> [num_rows, 2 * n] float32."""
    codes = torch.stack([packed % 16, packed // 16], dim=2).flatten(1).long()
    magnitudes = torch.tensor(_E2M1_MAGNITUDES, device=packed.device)[codes % 8]
    return torch.where(codes < 8, magnitudes, -magnitudes)


def _swizzle(scales: Tensor, layout: ScaleLayout, *, inverse: bool = False) -> Tensor:
    """Reorder padded [rows, blocks] so that its bytes lie as in `layout`, or back. Same shape."""
    if layout is ScaleLayout.LINEAR:
        return scales
    rows, blocks = scales.shape
    tile, run = (128, 32) if layout is ScaleLayout.SWIZZLE_128x4 else (8, 8)
    matrix = (rows // tile, tile // run, run, blocks // 4, 4)
    tiles = (rows // tile, blocks // 4, run, tile // run, 4)
    shape = tiles if inverse else matrix
    return scales.view(shape).permute(0, 3, 2, 1, 4).reshape(rows, blocks)


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
