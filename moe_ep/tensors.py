"""How do backends take tensors that lie in memory in any way?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_ep.errors import MoEEpInputError


def dense_rows(tensor: Tensor) -> Tensor:
    """Return the tensor with rows of adjacent elements; the rows themselves may lie anywhere."""
    if tensor.shape[1] <= 1 or tensor.stride(1) == 1:
        return tensor
    # Not contiguous(): it takes a tensor without rows as it is, whatever its strides.
    return tensor.clone(memory_format=torch.contiguous_format)


def fill_with_sums(output: Tensor, combine_into: Callable[[Tensor], None]) -> None:
    """Have `combine_into` write the sums to `output`, by way of a contiguous tensor where it is
    not.

    combine_into: an op; where it raises MoEEpInputError, the sums are there.
    """
    if output.is_contiguous():
        combine_into(output)
        return
    dense = torch.empty(output.shape, dtype=output.dtype, device=output.device)
    try:
        combine_into(dense)
    except MoEEpInputError:
        output.copy_(dense)  # the sums are right, the error is about other slots
        raise
    output.copy_(dense)


def host_may_read(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be looked at without a wait for a device: sizes may then
    follow from them.
    """
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
