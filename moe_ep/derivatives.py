"""How is a second derivative refused, whichever way it is asked for?"""

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
    wanted and there would be something in it.

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
        with torch.no_grad():
            return backward(ctx, *grads)

    return once
