"""How do several ranks run on one GPU at the same time? As clients of an MPS daemon."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
import mps


def reason_against_sharing() -> str | None:
    """Return why ranks cannot share a GPU on this machine, or None if they can."""
    if mps.daemon_is_running(os.environ):
        return None
    return mps.unavailable_reason()


@contextlib.contextmanager
def sharing(ranks_per_gpu: int) -> Iterator[dict[str, str]]:
    """Give the block the variables that its ranks need before they start CUDA.

    The daemon is its own, unless this process was started beside one. One rank a GPU needs none.
    """
    if ranks_per_gpu == 1:
        yield {}
    elif mps.daemon_is_running(os.environ):
        yield mps.share_of_gpu(ranks_per_gpu)
    else:
        with mps.mps_daemon() as daemon:
            if daemon is None:
                raise RuntimeError(f"ranks cannot share a GPU here: {mps.unavailable_reason()}")
            yield {**daemon.environment, **mps.share_of_gpu(ranks_per_gpu)}
