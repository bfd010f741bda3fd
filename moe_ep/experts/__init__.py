"""What a rank does with the rows that it received: kernels of a MoEEpLayer, by name."""

from moe_ep.experts.grouped_gemm import GroupedGemm, GroupedGemmConfig
from moe_ep.experts.identity import Identity, IdentityConfig
from moe_ep.experts.kernel import (
    KernelConfig,
    SplitKernel,
    available_split_kernels,
    register_split_kernel,
)
from moe_ep.experts.weights import MoEWeightPack

__all__ = [
    "GroupedGemm",
    "GroupedGemmConfig",
    "Identity",
    "IdentityConfig",
    "KernelConfig",
    "MoEWeightPack",
    "SplitKernel",
    "available_split_kernels",
    "register_split_kernel",
]
