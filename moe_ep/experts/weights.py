"""How do all experts' weights become a rank's own, and all of them again?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from moe_ep.checks import check_type
from moe_ep.collectives import CommBackend
from moe_ep.config import require_int_in_range
from moe_ep.errors import MoEEpConfigError
from moe_ep.experts.kernel import SplitKernel


@dataclass(frozen=True)
class MoEWeightPack:
    """A rank's own experts: L of them, with I = intermediate_size, and J = 2 * I for gated
    activations (gate first, then up), else I.

    w13: [L, J, hidden_size]. w2: [L, hidden_size, I].
    w13_bias: [L, J] or None. w2_bias: [L, hidden_size] or None.
    """

    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return those that there are, by name."""
        by_name = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in by_name.items() if value is not None}


@torch.no_grad()
def load_own(kernel: SplitKernel, own: Mapping[str, Tensor]) -> None:
    """Copy a rank's own experts into the kernel. Raises KeyError, TypeError, MoEEpConfigError."""
    needed = _named(kernel, own, "weights")
    surplus = [repr(name) for name in own if name not in needed]
    if surplus:
        raise MoEEpConfigError(
            f"weights has {', '.join(surplus)}, which the experts have no place for: they take "
            f"{', '.join(needed)}. Leave them out, or set the kernel's config to have them."
        )
    for name, parameter in needed.items():
        _require_fit(name, own[name], parameter, list(parameter.shape), "the rank's own experts")
    for name, parameter in needed.items():
        parameter.copy_(own[name])


@torch.no_grad()
def load_full(kernel: SplitKernel, full: Mapping[str, Tensor], prefix: str) -> None:
    """Copy the rank's share of all experts into the kernel; see MoEEpLayer.load_full_state_dict."""
    num_experts = kernel.params.num_experts
    first, count = kernel.first_local_expert, kernel.num_local_experts
    needed = _named(kernel, full, "state_dict", prefix)
    for name, parameter in needed.items():
        shape = [num_experts, *parameter.shape[1:]]
        whose = f"all {num_experts} experts"
        _require_fit(prefix + name, full[prefix + name], parameter, shape, whose)
    for name, parameter in needed.items():
        parameter.copy_(full[prefix + name][first : first + count])


@torch.no_grad()
def gather_full(
    kernel: SplitKernel, comm: CommBackend, prefix: str, only_rank: int | None
) -> dict[str, Tensor] | None:
    """Return all experts' weights; see MoEEpLayer.full_state_dict. Collective."""
    if only_rank is not None:
        require_int_in_range("only_rank", only_rank, 0, comm.get_size() - 1)
    wanted = only_rank is None or only_rank == comm.get_rank()
    full = {}
    for name, parameter in kernel.named_parameters():
        shares = comm.allgather(parameter.detach().cpu().contiguous())  # one at a time
        if wanted:
            full[prefix + name] = torch.cat(shares)
        del shares
    return full if wanted else None


def _named(
    kernel: SplitKernel, given: Mapping[str, Tensor], what: str, prefix: str = ""
) -> dict[str, nn.Parameter]:
    """Return the kernel's parameters, each of which must be given."""
    needed = dict(kernel.named_parameters())
    if given and not needed:
        raise MoEEpConfigError(f"kernel {kernel.kernel_name!r} has no weights: give none.")
    for name in needed:
        if prefix + name not in given:
            names = ", ".join(prefix + n for n in needed)
            raise KeyError(f"{what} has no {prefix + name!r}; the experts need: {names}")
    return needed


def _require_fit(
    name: str, value: Tensor, parameter: nn.Parameter, shape: list[int], whose: str
) -> None:
    check_type(repr(name), value, Tensor)
    # Of one byte would be quantised numbers, which mean nothing without their scales.
    is_number = value.is_floating_point() and value.element_size() >= 2
    if not is_number and value.dtype != parameter.dtype:
        raise TypeError(
            f"{name!r} must be floating, of 2 bytes or more, or {parameter.dtype} as the experts' "
            f"own, got {value.dtype}."
        )
    if list(value.shape) != shape:
        raise MoEEpConfigError(f"{name!r} must be {shape}, of {whose}, got {list(value.shape)}.")
