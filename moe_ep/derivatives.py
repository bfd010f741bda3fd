"""How are derivatives refused that are not there, whichever way they are asked for?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_ep.errors import MoEEpStateError

Result = TypeVar("Result")


def differentiable_once(backward: Callable[..., Result]) -> Callable[..., Result]:
    """Make the backward of a torch.autograd.Function raise MoEEpStateError where a graph of it is
    wanted and there would be something in it, or gradients come in a batch.

    torch's once_differentiable hangs its error where torch.autograd.grad with inputs does not come
    by: the second derivative then is silently left out.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor | None) -> Result:
        if torch.is_grad_enabled() and any(g is not None and g.requires_grad for g in grads):
            raise MoEEpStateError(
                "second derivatives through dispatch, combine and the expert-major rows are not "
                "there: call backward or torch.autograd.grad without create_graph=True."
            )
        if not torch.compiler.is_compiling() and any(map(_is_batch, grads)):
            raise MoEEpStateError(
                "gradients in a batch (is_grads_batched) through dispatch, combine and the "
                "expert-major rows are not there: call torch.autograd.grad for each of them."
            )
        with torch.no_grad():
            return backward(ctx, *grads)

    return once


def _is_batch(grad: Tensor | None) -> bool:
    return grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad)
