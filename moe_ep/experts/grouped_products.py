"""How do rows go through their experts' two linear layers? Each layer in one grouped product."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's own name for it)

from moe_ep.errors import MoEEpConfigError
from moe_ep.expert_major import ExpertMajorRows

_ALIGNMENT_BYTES = 16  # of each row and matrix, see torch.nn.functional.grouped_mm


class GroupedLinear(NamedTuple):
    """One linear layer of each of L experts. weight: [L, in, out]. bias: [L, out], or None."""

    weight: Tensor
    bias: Tensor | None


def run_two_layers(
    permuted: ExpertMajorRows,
    first: GroupedLinear,
    activation: Callable[[Tensor], Tensor],
    second: GroupedLinear,
) -> Tensor:
    """Return [M, out]: what its expert makes of each row; unspecified for rows without one.

    There is one expert at least. activation: takes the first layer's output, row by row.
    """
    h = _grouped_linear(permuted.hidden_states, permuted, first)
    # grouped_mm leaves rows past the last group uninitialised, in backward, too. Nobody reads such
    # rows of the second product: from here on backward they are zeros.
    h = torch.where(permuted.expert_of_row.view(-1, 1) >= 0, h, 0)
    return _grouped_linear(activation(h), permuted, second)


def require_aligned(dtype: torch.dtype, **widths: int) -> None:
    """Raise MoEEpConfigError unless rows of all the widths, given by name, are multiples of 16
    bytes, which grouped products need."""
    multiple = _ALIGNMENT_BYTES // dtype.itemsize
    for name, width in widths.items():
        if width % multiple != 0:
            raise MoEEpConfigError(
                f"{name} must be a multiple of {multiple} ({_ALIGNMENT_BYTES} bytes of {dtype}) "
                f"for grouped matrix products, got {width}."
            )


def _grouped_linear(rows: Tensor, permuted: ExpertMajorRows, layer: GroupedLinear) -> Tensor:
    y = F.grouped_mm(rows, layer.weight, offs=permuted.expert_offsets[1:])
    if layer.bias is None:
        return y
    return y + layer.bias[permuted.expert_of_row.clamp(min=0)]
