"""Two-sided exchange: sender and receiver meet in FIFOs of fixed size."""

from moe_ep.nvlink_two_sided.communication import NVLinkTwoSidedAlltoAll
from moe_ep.nvlink_two_sided.config import NVLinkTwoSidedConfig

__all__ = ["NVLinkTwoSidedAlltoAll", "NVLinkTwoSidedConfig"]
