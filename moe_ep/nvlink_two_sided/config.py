"""Which settings does nvlink_two_sided have?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moe_ep.config import CommunicationConfig


@dataclass(frozen=True, kw_only=True)
class NVLinkTwoSidedConfig(CommunicationConfig):
    """Settings of the nvlink_two_sided backend: those of every backend.

    On the CPU a call runs on the thread that makes it, so there is nothing to limit.
    """

    backend_name: ClassVar[str] = "nvlink_two_sided"
