"""Is a tensor its values in memory, and nothing besides?

What torch hangs on a tensor beyond that is lost in an exchange, or breaks it half way.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def check_plain(name: str, value: Tensor) -> None:
    """Raise TypeError for a tensor that is more, or less, than its values in memory. Nothing is
    asked while a graph is traced, whose compiler knows what it does."""
    if torch.compiler.is_compiling():
        return
    if value.is_neg():
        raise TypeError(f"{name} must hold its values, got a negated view: pass resolve_neg().")
    if type(value) is not Tensor and hasattr(value, "to_local"):
        raise TypeError(
            f"{name} must be a plain tensor, got a {type(value).__name__}: pass what this rank has "
            "of it, to_local()."
        )
    if torch._C._are_functorch_transforms_active():
        raise TypeError(
            f"{name} must be a plain tensor, got one of a torch.func transform (grad, vmap, jvp): "
            "dispatch and combine have gradients for backward and torch.autograd.grad alone."
        )
    if forward_ad._current_level >= 0 and _has_tangent(value):
        raise TypeError(
            f"{name} must be a plain tensor, got a dual one: there is no forward-mode "
            "differentiation of dispatch and combine."
        )


def _has_tangent(value: Tensor) -> bool:
    return forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]
