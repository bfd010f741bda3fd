"""On which stream does a communication work? On the one that the user chose. And is that one being
captured, if any is?
"""

from __future__ import annotations

import contextlib

import torch

from moe_ep.bootstrap import BootstrapConfig
from moe_ep.errors import MoEEpStateError


def on_stream_of(bootstrap: BootstrapConfig) -> contextlib.AbstractContextManager[object]:
    """Return the context in which a backend works."""
    handle = bootstrap.stream
    if handle == 0:
        return contextlib.nullcontext()
    stream = torch.cuda.ExternalStream(handle, device=bootstrap.torch_device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


def refuse_foreign_capture(call: str, bootstrap: BootstrapConfig) -> None:
    """Raise in a capture of a CUDA graph that would miss a call, which would run at once."""
    device = bootstrap.torch_device
    if device.type != "cuda" or torch.compiler.is_compiling():
        return
    current = torch.cuda.current_device()
    usual = current == device.index and bootstrap.stream == 0
    if usual or not torch.cuda.is_current_stream_capturing():
        return
    with torch.cuda.device(device), on_stream_of(bootstrap):
        if torch.cuda.is_current_stream_capturing():
            return  # the streams are joined in one capture
    whose = "the current" if bootstrap.stream == 0 else "the bootstrap's"
    raise MoEEpStateError(
        f"{call} while a CUDA graph is being captured on cuda:{current}, but it runs on "
        f"{whose} stream of {device}, which is not captured: capture that one."
    )
