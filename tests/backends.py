"""Which backends does the contract suite run on? A new backend adds a line to `ALL`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Backend:
    """A backend under test, and what of the contract it offers beyond what all must.

    masks: active_rank_mask.
    extra_bytes: extra_payload_bytes_per_token.
    zero_copy: get_combine_input_buffer returns memory.
    interruptible: a wait for a peer ends at Ctrl-C at once, and not only with its budget.
    """

    name: str
    masks: bool = False
    extra_bytes: bool = False
    zero_copy: bool = False
    interruptible: bool = False
    devices: tuple[str, ...] = ("cpu",)

    def __str__(self) -> str:
        return self.name


ALL = (
    Backend("cake", masks=True, extra_bytes=True, zero_copy=True, interruptible=True),
    Backend("torch_dist"),
)


def on_each(*, having: str | None = None) -> pytest.MarkDecorator:
    """Run a test with `backend` and `device` for each backend on each of its devices.

    having: the field of Backend that must be true.
    """
    pairs = [
        (backend, device)
        for backend in ALL
        if having is None or getattr(backend, having)
        for device in backend.devices
    ]
    return pytest.mark.parametrize(("backend", "device"), pairs, ids=str)


every_backend = on_each()
