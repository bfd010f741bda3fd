"""The reference backend: all-to-all over torch.distributed, on any network that has one."""

from moe_ep.torch_dist.communication import TorchDistAlltoAll
from moe_ep.torch_dist.config import TorchDistConfig

__all__ = ["TorchDistAlltoAll", "TorchDistConfig"]
