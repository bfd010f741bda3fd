"""The kernel that computes nothing: it checks the communication alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.experts.kernel import KernelConfig, SplitKernel, register_split_kernel


@dataclass(frozen=True)
class IdentityConfig(KernelConfig):
    """Settings of the identity: none."""

    kernel_name = "identity"


@register_split_kernel("identity")
class Identity(SplitKernel):
    """Every received row goes back as it came. A token comes out times the number of ranks that own
    an expert of it, whatever its weights are."""

    config_type = IdentityConfig

    def forward(self, received: MoEEpDispatchResult) -> Tensor:
        """Return the received rows."""
        return received.hidden_states
