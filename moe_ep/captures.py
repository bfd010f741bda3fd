"""Is a call made while a CUDA graph is captured that would miss it?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from moe_ep.errors import MoEEpStateError


def refuse_foreign_capture(
    call: str,
    device: torch.device,
    stream: int,
    on_stream: Callable[[], contextlib.AbstractContextManager[object]],
) -> None:
    """Raise in a capture of a CUDA graph that would miss a call, which would run at once.

    device: where it runs. stream: of the bootstrap; 0: torch's current one. on_stream: enters it.
    """
    if device.type != "cuda" or torch.compiler.is_compiling():
        return
    current = torch.cuda.current_device()
    usual = current == device.index and stream == 0
    if usual or not torch.cuda.is_current_stream_capturing():
        return
    with torch.cuda.device(device), on_stream():
        if torch.cuda.is_current_stream_capturing():
            return  # the streams are joined in one capture
    whose = "the current" if stream == 0 else "the bootstrap's"
    raise MoEEpStateError(
        f"{call} while a CUDA graph is being captured on cuda:{current}, but it runs on "
        f"{whose} stream of {device}, which is not captured: capture that one."
    )
