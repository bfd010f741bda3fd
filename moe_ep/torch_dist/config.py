"""Which settings does torch_dist have?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moe_ep.config import CommunicationConfig, require_int_in_range


@dataclass(frozen=True, kw_only=True)
class TorchDistConfig(CommunicationConfig):
    """Settings of the torch_dist backend, besides those of every backend.

    eplb_stats_num_experts: length of eplb_local_stats, 0..num_experts; 0: no statistics.
    """

    backend_name: ClassVar[str] = "torch_dist"

    eplb_stats_num_experts: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int_in_range("eplb_stats_num_experts", self.eplb_stats_num_experts, 0, 2**31 - 1)
