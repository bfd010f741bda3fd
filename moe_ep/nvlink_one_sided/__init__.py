"""Portable one-sided exchange: put by the source, get by the combine, no bulk-copy engine."""

from moe_ep.nvlink_one_sided.communication import NVLinkOneSidedAlltoAll
from moe_ep.nvlink_one_sided.config import NVLinkOneSidedConfig

__all__ = ["NVLinkOneSidedAlltoAll", "NVLinkOneSidedConfig"]
