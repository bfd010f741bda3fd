"""What does one communication carry? Sizes, row formats, and which rank owns which expert."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from moe_ep._native import expert_range
from moe_ep.errors import MoEEpConfigError
from moe_ep.limits import MAX_TOP_K

TOKEN_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of an unquantised row."""


class QuantFormat(enum.Enum):
    """How the rows given to dispatch are encoded. Values and scales travel as two tensors."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP8PerTensor = "fp8_per_tensor"
    DeepSeekFp8 = "deepseek_fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"


@dataclass(frozen=True)
class RowFormat:
    """Shape and dtypes of one token's row on the wire.

    A packed or one-byte format is also accepted as torch.uint8, its bytes unchanged: the first
    dtype of each tuple is the format's own, the others are other views of the same bytes.
    """

    value_dtypes: tuple[torch.dtype, ...]
    value_columns: int
    """Elements of the value row in `value_dtypes[0]`."""
    scale_dtypes: tuple[torch.dtype, ...] = ()
    scale_columns: int = 0
    """Elements of the scale row in `scale_dtypes[0]`; 0: no scale travels."""

    @property
    def value_bytes(self) -> int:
        """Bytes of one value row."""
        return self.value_columns * self.value_dtypes[0].itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of one scale row, 0 without one."""
        return self.scale_columns * self.scale_dtypes[0].itemsize if self.scale_dtypes else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of both rows together."""
        return self.value_bytes + self.scale_bytes


_E4M3 = (torch.float8_e4m3fn, torch.uint8)
_UE8M0 = (torch.float8_e8m0fnu, torch.uint8)
_PACKED_E2M1 = (torch.uint8, torch.float4_e2m1fn_x2)


def row_format(
    quant_format: QuantFormat | None, hidden_size: int, token_dtype: torch.dtype
) -> RowFormat:
    """Return how one row of `hidden_size` values travels.

    token_dtype: dtype of the row where `quant_format` is None; else unused.
    """
    h = hidden_size
    match quant_format:
        case None:
            return RowFormat((token_dtype,), h)
        case QuantFormat.BF16:
            return RowFormat((torch.bfloat16,), h)
        case QuantFormat.FP16:
            return RowFormat((torch.float16,), h)
        case QuantFormat.FP8PerTensor:
            return RowFormat(_E4M3, h)
        case QuantFormat.DeepSeekFp8:
            return RowFormat(_E4M3, h, (torch.float32,), _ceil_div(h, 128))
        case QuantFormat.MXFP8:
            return RowFormat(_E4M3, h, _UE8M0, _ceil_div(h, 32))
        case QuantFormat.NVFP4:
            return RowFormat(_PACKED_E2M1, _ceil_div(h, 2), _E4M3, _ceil_div(h, 16))
        case QuantFormat.MXFP4:
            return RowFormat(_PACKED_E2M1, _ceil_div(h, 2), _UE8M0, _ceil_div(h, 32))


@dataclass(frozen=True)
class MoEEpCommParams:
    """Sizes of one communication; equal on every rank of the group. Validates itself.

    num_experts: experts over all ranks, >= 1; may be smaller than the number of ranks.
    top_k: experts per token, 1..32, <= num_experts.
    max_tokens_per_rank: most tokens that one rank dispatches in one round, >= 1.
    hidden_size: elements of an unquantised row, >= 1; also of the rows that combine receives and
        returns.
    dtype: of an unquantised row: float16, bfloat16 or float32; None is bfloat16.
    dispatch_format: how the rows given to dispatch are encoded; None: unquantised, in
        `token_dtype`.
    invalid_expert_id: int32 outside `[0, num_experts)`; fills the ids of received rows without a
        token.

    Raises MoEEpConfigError for a value out of range and TypeError for a wrong type.
    """

    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    hidden_size: int
    dtype: torch.dtype | None = None
    dispatch_format: QuantFormat | None = None
    invalid_expert_id: int = -1

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "max_tokens_per_rank", "hidden_size"):
            _require_positive_int(name, getattr(self, name))
        if self.top_k > MAX_TOP_K:
            raise MoEEpConfigError(f"top_k must be 1..{MAX_TOP_K}, got {self.top_k}.")
        if self.top_k > self.num_experts:
            raise MoEEpConfigError(
                f"top_k must not exceed num_experts={self.num_experts}, got {self.top_k}."
            )
        if self.dtype is not None and self.dtype not in TOKEN_DTYPES:
            raise TypeError(
                f"dtype must be one of {_names(TOKEN_DTYPES)} or None, got {self.dtype}. "
                "Describe quantised rows with dispatch_format."
            )
        if self.dispatch_format is not None and not isinstance(self.dispatch_format, QuantFormat):
            raise TypeError(
                f"dispatch_format must be a QuantFormat or None, got {self.dispatch_format!r}."
            )
        _require_int("invalid_expert_id", self.invalid_expert_id)
        if not -(2**31) <= self.invalid_expert_id < 2**31:
            raise MoEEpConfigError(
                f"invalid_expert_id must fit in int32, got {self.invalid_expert_id}."
            )
        if 0 <= self.invalid_expert_id < self.num_experts:
            raise MoEEpConfigError(
                f"invalid_expert_id must lie outside [0, {self.num_experts}), where expert ids "
                f"are, got {self.invalid_expert_id}."
            )

    @property
    def token_dtype(self) -> torch.dtype:
        """Dtype of an unquantised row, of expert_output and of what combine returns."""
        return torch.bfloat16 if self.dtype is None else self.dtype

    @property
    def row_format(self) -> RowFormat:
        """Shape and dtypes of a row given to dispatch."""
        return row_format(self.dispatch_format, self.hidden_size, self.token_dtype)

    @property
    def dispatch_bytes_per_token(self) -> int:
        """Bytes of one token's value row and scale row together."""
        return self.row_format.row_bytes

    @property
    def dispatch_value_bytes_per_token(self) -> int:
        """Bytes of one token's value row (hidden_states)."""
        return self.row_format.value_bytes

    @property
    def dispatch_scale_bytes_per_token(self) -> int:
        """Bytes of one token's scale row (hidden_states_scale), 0 where the format has none."""
        return self.row_format.scale_bytes

    @property
    def combine_bytes_per_token(self) -> int:
        """Bytes of one row of expert_output."""
        return self.hidden_size * self.token_dtype.itemsize


def expert_partition(num_experts: int, ep_size: int, ep_rank: int) -> tuple[int, int]:
    """Return `(first, count)`: rank `ep_rank` owns the experts `[first, first + count)`.

    Blocks are contiguous; the first `num_experts % ep_size` ranks own one expert more than the
    others, and ranks past the last expert own none.
    """
    _require_positive_int("num_experts", num_experts)
    _require_positive_int("ep_size", ep_size)
    if not 0 <= ep_rank < ep_size:
        raise MoEEpConfigError(
            f"ep_rank must be 0..{ep_size - 1} (ep_size={ep_size}), got {ep_rank}."
        )
    return expert_range(num_experts, ep_size, ep_rank)


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)


def _require_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__}).")


def _require_positive_int(name: str, value: object) -> None:
    _require_int(name, value)
    if isinstance(value, int) and not 1 <= value < 2**31:
        limit = f"1..{MAX_TOP_K}" if name == "top_k" else f"1..{2**31 - 1}"
        raise MoEEpConfigError(f"{name} must be {limit}, got {value}.")
