"""Which settings does nvlink_two_sided have?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from moe_ep.config import CommunicationConfig, require_int_in_range

_MAX_SM_COUNT = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class NVLinkTwoSidedConfig(CommunicationConfig):
    """Settings of the nvlink_two_sided backend, besides those of every backend.

    max_sm_count: on CUDA, the most streaming multiprocessors that moving rows takes at a time, at
        least 1; None: as many as there is work for. Slower with few, the same results. Nothing on
        the CPU, where a call runs on the thread that makes it.
    """

    backend_name: ClassVar[str] = "nvlink_two_sided"

    max_sm_count: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_sm_count is not None:
            require_int_in_range("max_sm_count", self.max_sm_count, 1, _MAX_SM_COUNT)
