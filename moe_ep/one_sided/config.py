"""Which settings do the backends on the one-sided transport share?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from moe_ep import _native
from moe_ep.config import CommunicationConfig, require_int_in_range

_MAX_EXTRA_BYTES = 1 << 20


@dataclass(frozen=True)
class PacketSteps:
    """Which steps go as packets on CUDA: flags in the data.

    max_tokens: of each rank.
    always: whether they come back as packets, too, also where a pull was measured to be faster.
    """

    max_tokens: int
    always: bool = False


@dataclass(frozen=True, kw_only=True)
class OneSidedConfig(CommunicationConfig):
    """What the configs of these backends derive from; CakeAlltoAllConfig explains the settings."""

    _reader_can_quantize: ClassVar[bool] = False
    """Whether the backend's kernels can sum rows in low precision that lie there as they are."""

    extra_payload_bytes_per_token: int = 0
    eplb_stats_num_experts: int = 0
    enable_rank_mask: bool = False
    use_low_precision_combine: bool = False
    enable_pdl: bool | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        extra, experts = self.extra_payload_bytes_per_token, self.eplb_stats_num_experts
        require_int_in_range("extra_payload_bytes_per_token", extra, 0, _MAX_EXTRA_BYTES)
        require_int_in_range("eplb_stats_num_experts", experts, 0, 2**31 - 1)
        for name in ("enable_rank_mask", "use_low_precision_combine"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be a bool, got {value!r}.")
        require_bool_or_none("enable_pdl", self.enable_pdl)

    def _packet_steps(self, ep_size: int, top_k: int, max_tokens_per_rank: int) -> PacketSteps:
        """Return those for which packets were measured to be faster."""
        return PacketSteps(_native.low_latency_tokens(ep_size, top_k, max_tokens_per_rank))


def require_bool_or_none(name: str, value: object) -> None:
    """Raise TypeError unless `value` is True, False or None."""
    if not isinstance(value, bool | None):
        raise TypeError(f"{name} must be a bool or None, got {value!r}.")
