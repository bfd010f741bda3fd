"""Which backends does the contract suite run on? A new backend adds a line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Backend:
    """A backend under test, and what of the contract it offers beyond what all must.

    masks: active_rank_mask. extra_bytes: extra_payload_bytes_per_token. zero_copy:
    get_combine_input_buffer returns memory.
    """

    name: str
    masks: bool = False
    extra_bytes: bool = False
    zero_copy: bool = False
    devices: tuple[str, ...] = field(default=("cpu",))

    def __str__(self) -> str:
        return self.name


ALL = (
    Backend("cake", masks=True, extra_bytes=True, zero_copy=True),
    Backend("torch_dist"),
)


def on_devices(*, having: str | None = None) -> list[Any]:
    """Return the (backend, device) pairs that a test runs on.

    having: the name of a field of Backend that must be true.
    """
    return [
        (backend, device)
        for backend in ALL
        if having is None or getattr(backend, having)
        for device in backend.devices
    ]
