"""Which settings does nvlink_one_sided have?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moe_ep._native import MAX_PACKET_TOKENS
from moe_ep.config import require_int_in_range
from moe_ep.errors import MoEEpConfigError
from moe_ep.one_sided.config import OneSidedConfig, PacketSteps, require_bool_or_none


@dataclass(frozen=True, kw_only=True)
class NVLinkOneSidedConfig(OneSidedConfig):
    """Settings of the nvlink_one_sided backend, besides those of every backend.

    extra_payload_bytes_per_token, eplb_stats_num_experts: as in CakeAlltoAllConfig.
    enable_rank_mask, use_low_precision_combine, enable_pdl: likewise.
    lamport: on CUDA, which steps go over the Lamport transport, whose data are their own flags:
        None: small ones, where that was measured to be faster; True: all that fit, also their way
        back; False: none. It takes memory for `lamport_max_tokens` tokens. Rows that are pushed
        back fit up to 1 MiB; combines that quantise, or in low precision, never use it.
    lamport_max_tokens: 1..32, the tokens a rank of the largest step that goes over it; a step's
        size is its tokens_per_rank. None: with lamport=None what was measured, with True 32.

    On the CPU there is one transport for all sizes, and the last two say nothing; they are checked
    all the same.
    """

    backend_name: ClassVar[str] = "nvlink_one_sided"

    lamport: bool | None = None
    lamport_max_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_bool_or_none("lamport", self.lamport)
        if self.lamport_max_tokens is None:
            return
        require_int_in_range("lamport_max_tokens", self.lamport_max_tokens, 1, MAX_PACKET_TOKENS)
        if self.lamport is False:
            raise MoEEpConfigError(
                f"lamport_max_tokens must be None with lamport=False, got "
                f"{self.lamport_max_tokens}: no step goes over the Lamport transport then. Leave "
                "lamport_max_tokens out, or set lamport to None or True."
            )

    def _packet_steps(self, ep_size: int, top_k: int, max_tokens_per_rank: int) -> PacketSteps:
        """Return those that go over the Lamport transport."""
        if self.lamport is False:
            return PacketSteps(0)
        limit = self.lamport_max_tokens
        if self.lamport is None and limit is None:
            return super()._packet_steps(ep_size, top_k, max_tokens_per_rank)
        max_tokens = min(MAX_PACKET_TOKENS if limit is None else limit, max_tokens_per_rank)
        return PacketSteps(max_tokens, always=self.lamport is True)
