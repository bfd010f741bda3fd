"""On which stream does a communication work? On the one that the user chose."""

from __future__ import annotations

import contextlib

import torch

from moe_ep.bootstrap import BootstrapConfig


def on_stream_of(bootstrap: BootstrapConfig) -> contextlib.AbstractContextManager[object]:
    """Return the context in which a backend works."""
    handle = bootstrap.stream
    if handle == 0:
        return contextlib.nullcontext()
    stream = torch.cuda.ExternalStream(handle, device=bootstrap.torch_device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)
