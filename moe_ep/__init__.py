"""Communication for expert-parallel Mixture-of-Experts layers: dispatch tokens to experts and
combine their outputs."""

from moe_ep.bootstrap import BootstrapConfig
from moe_ep.cake import CakeAlltoAll, CakeAlltoAllConfig
from moe_ep.collectives import CommBackend
from moe_ep.communication import MoEEpCommunication
from moe_ep.config import CommunicationConfig
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.errors import (
    MoEEpAbandonedError,
    MoEEpConfigError,
    MoEEpDisagreementError,
    MoEEpError,
    MoEEpInputError,
    MoEEpMaskDisagreementError,
    MoEEpPlatformError,
    MoEEpStateError,
    MoEEpTimeoutError,
)
from moe_ep.expert_major import ExpertMajorRows
from moe_ep.experts import (
    GroupedGemmConfig,
    IdentityConfig,
    KernelConfig,
    MoEWeightPack,
    SplitKernel,
    available_split_kernels,
    register_split_kernel,
)
from moe_ep.layer import MoEEpLayer, MoEEpTensors, SplitConfig
from moe_ep.nvlink_one_sided import NVLinkOneSidedAlltoAll, NVLinkOneSidedConfig
from moe_ep.nvlink_two_sided import NVLinkTwoSidedAlltoAll, NVLinkTwoSidedConfig
from moe_ep.params import MoEEpCommParams, QuantFormat, expert_partition
from moe_ep.registry import (
    available_communication_backends,
    communication_backend_name,
    create_communication,
    estimate_workspace_bytes,
    is_communication_backend,
    register_communication,
)
from moe_ep.torch_dist import TorchDistAlltoAll, TorchDistConfig
from moe_ep.version import __version__

__all__ = [
    "BootstrapConfig",
    "CakeAlltoAll",
    "CakeAlltoAllConfig",
    "CommBackend",
    "CommunicationConfig",
    "ExpertMajorRows",
    "GroupedGemmConfig",
    "IdentityConfig",
    "KernelConfig",
    "MoEEpAbandonedError",
    "MoEEpCommParams",
    "MoEEpCommunication",
    "MoEEpConfigError",
    "MoEEpDisagreementError",
    "MoEEpDispatchResult",
    "MoEEpError",
    "MoEEpInputError",
    "MoEEpLayer",
    "MoEEpMaskDisagreementError",
    "MoEEpPlatformError",
    "MoEEpStateError",
    "MoEEpTensors",
    "MoEEpTimeoutError",
    "MoEWeightPack",
    "NVLinkOneSidedAlltoAll",
    "NVLinkOneSidedConfig",
    "NVLinkTwoSidedAlltoAll",
    "NVLinkTwoSidedConfig",
    "QuantFormat",
    "SplitConfig",
    "SplitKernel",
    "TorchDistAlltoAll",
    "TorchDistConfig",
    "__version__",
    "available_communication_backends",
    "available_split_kernels",
    "communication_backend_name",
    "create_communication",
    "estimate_workspace_bytes",
    "expert_partition",
    "is_communication_backend",
    "register_communication",
    "register_split_kernel",
]
