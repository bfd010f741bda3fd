"""Cake: fused one-sided exchange over memory that all ranks of a host share."""

from moe_ep.cake.communication import CakeAlltoAll
from moe_ep.cake.config import CakeAlltoAllConfig

__all__ = ["CakeAlltoAll", "CakeAlltoAllConfig"]
