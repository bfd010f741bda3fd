"""Experts of two linear layers, all of a rank's in two grouped matrix products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own name for it)

from moe_ep.config import require_int_in_range
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.errors import MoEEpConfigError
from moe_ep.expert_major import permute_to_experts, unpermute_from_experts
from moe_ep.experts.grouped_products import GroupedLinear, require_aligned, run_two_layers
from moe_ep.experts.kernel import KernelConfig, SplitKernel, register_split_kernel
from moe_ep.limits import INT32_MAX
from moe_ep.params import MoEEpCommParams


def _gelu_tanh(h: Tensor) -> Tensor:
    return F.gelu(h, approximate="tanh")


_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
}
_GATED: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "geglu": F.gelu}


@dataclass(frozen=True)
class GroupedGemmConfig(KernelConfig):
    """Settings of the experts.

    intermediate_size: I, the width between the two layers.
    activation: "swiglu" (silu(gate) * up), "geglu" (gelu(gate) * up), "gelu", "gelu_tanh", "relu".
    bias: whether both layers have one.
    alignment: each expert's rows begin at a multiple of it; see
        `MoEEpCommunication.permute_to_experts`.
    max_rows: room for so many picks of local experts; None: for all there could be. A row of which
        a pick finds no room comes out as NaN.

    Raises TypeError and MoEEpConfigError.
    """

    kernel_name = "grouped_gemm"

    intermediate_size: int
    activation: str = "swiglu"
    bias: bool = False
    alignment: int = 1
    max_rows: int | None = None

    def __post_init__(self) -> None:
        require_int_in_range("intermediate_size", self.intermediate_size, 1, INT32_MAX)
        require_int_in_range("alignment", self.alignment, 1, INT32_MAX)
        if self.activation not in (*_PLAIN, *_GATED):
            known = ", ".join((*_GATED, *_PLAIN))
            raise MoEEpConfigError(f"activation must be one of {known}, got {self.activation!r}.")
        if not isinstance(self.bias, bool):
            raise TypeError(f"bias must be a bool, got {self.bias!r}.")
        if self.max_rows is not None:
            require_int_in_range("max_rows", self.max_rows, 0, INT32_MAX)
            if self.max_rows % self.alignment != 0:
                raise MoEEpConfigError(
                    f"max_rows must be a multiple of alignment={self.alignment}, got "
                    f"{self.max_rows}."
                )

    @property
    def is_gated(self) -> bool:
        """Whether the first layer has a gate beside its up projection."""
        return self.activation in _GATED


@register_split_kernel("grouped_gemm")
class GroupedGemm(SplitKernel):
    """down(activation(up(row))) for each pick of a local expert, weighted, and summed for each row.

    Parameters, with L local experts, I = intermediate_size, and J = 2 * I for a gated activation
    (gate first, then up), else I:

    w13: [L, J, hidden_size]. w13_bias: [L, J].
    w2: [L, hidden_size, I]. w2_bias: [L, hidden_size].

    Products are torch.nn.functional.grouped_mm on every device. On CUDA it is one kernel in
    bfloat16; for float16 and float32 torch takes the products one after the other and waits for the
    device, and float32 it neither compiles nor exports. Each product, the activation and the sum
    over a row's picks are rounded to the token dtype; that sum is in float32 and in the order of
    the picks. Differentiable in the rows, their weights and the parameters; an expert without a row
    has gradients of zero.
    """

    config_type = GroupedGemmConfig

    config: GroupedGemmConfig

    def __init__(
        self,
        config: GroupedGemmConfig,
        params: MoEEpCommParams,
        *,
        first_local_expert: int,
        num_local_experts: int,
        device: torch.device,
    ) -> None:
        """Make the experts, initialised as torch.nn.Linear is. Not collective.

        Raises MoEEpConfigError where rows are not quantised as the token dtype, or their bytes no
        multiple of 16.
        """
        super().__init__(
            config,
            params,
            first_local_expert=first_local_expert,
            num_local_experts=num_local_experts,
            device=device,
        )
        _require_rows_for_products(params, config)
        hidden, inner = params.hidden_size, config.intermediate_size
        outer = inner * (2 if config.is_gated else 1)

        def parameter(fan_in: int, *shape: int) -> nn.Parameter:
            value = torch.empty(num_local_experts, *shape, dtype=params.token_dtype, device=device)
            bound = fan_in**-0.5
            return nn.Parameter(value.uniform_(-bound, bound))

        self.w13 = parameter(hidden, outer, hidden)
        self.w2 = parameter(inner, hidden, inner)
        self.w13_bias = parameter(hidden, outer) if config.bias else None
        self.w2_bias = parameter(inner, hidden) if config.bias else None

    def forward(self, received: MoEEpDispatchResult) -> Tensor:
        """Return what the experts make of the received rows; unweighted where none were sent."""
        if self.num_local_experts == 0:
            return torch.zeros_like(received.hidden_states)  # no row has a token
        config = self.config
        permuted = permute_to_experts(
            received,
            self.first_local_expert,
            self.num_local_experts,
            alignment=config.alignment,
            max_rows=config.max_rows,
        )
        first = GroupedLinear(self.w13.transpose(1, 2), self.w13_bias)
        second = GroupedLinear(self.w2.transpose(1, 2), self.w2_bias)
        y = run_two_layers(permuted, first, self._activated, second)
        return unpermute_from_experts(y, permuted, apply_weights=received.topk_weights is not None)

    def _activated(self, h: Tensor) -> Tensor:
        if not self.config.is_gated:
            return _PLAIN[self.config.activation](h)
        gate, up = h.chunk(2, dim=1)
        return _GATED[self.config.activation](gate) * up


def _require_rows_for_products(params: MoEEpCommParams, config: GroupedGemmConfig) -> None:
    if params.row_format.value_dtypes != (params.token_dtype,):
        raise MoEEpConfigError(
            f"kernel 'grouped_gemm' takes unquantised rows, got dispatch_format="
            f"{params.dispatch_format}: set it to None, or register a kernel for that format."
        )
    require_aligned(
        params.token_dtype,
        hidden_size=params.hidden_size,
        intermediate_size=config.intermediate_size,
    )
