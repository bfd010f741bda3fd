"""Which settings do the backends on the one-sided transport share, and are they right?"""

from __future__ import annotations

from typing import Any, Protocol

from moe_ep.config import require_int_in_range
from moe_ep.params import MoEEpCommParams

_MAX_EXTRA_BYTES = 1 << 20


class OneSidedSettings(Protocol):
    """The settings, as a backend's config has them; see CakeAlltoAllConfig."""

    @property
    def extra_payload_bytes_per_token(self) -> int: ...
    @property
    def eplb_stats_num_experts(self) -> int: ...
    @property
    def enable_rank_mask(self) -> bool: ...
    @property
    def use_low_precision_combine(self) -> bool: ...
    @property
    def enable_pdl(self) -> bool | None: ...
    @property
    def timeout_sec(self) -> int: ...
    @property
    def comm_backend(self) -> Any: ...

    def layers_with(self, params: MoEEpCommParams) -> tuple[MoEEpCommParams, ...]: ...


def check_settings(settings: OneSidedSettings) -> None:
    """Raise TypeError or MoEEpConfigError for the first that is wrong."""
    require_int_in_range(
        "extra_payload_bytes_per_token",
        settings.extra_payload_bytes_per_token,
        0,
        _MAX_EXTRA_BYTES,
    )
    require_int_in_range("eplb_stats_num_experts", settings.eplb_stats_num_experts, 0, 2**31 - 1)
    for name in ("enable_rank_mask", "use_low_precision_combine"):
        value = getattr(settings, name)
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {value!r}.")
    require_bool_or_none("enable_pdl", settings.enable_pdl)


def require_bool_or_none(name: str, value: object) -> None:
    """Raise TypeError unless `value` is True, False or None."""
    if not isinstance(value, bool | None):
        raise TypeError(f"{name} must be a bool or None, got {value!r}.")
