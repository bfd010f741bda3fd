"""Which limits and defaults hold for every backend?

Below every other module, so that each can import it. The limits themselves stand in
csrc/core/limits.h.
"""

from __future__ import annotations

from moe_ep._native import MAX_EP_SIZE, MAX_TIMEOUT_SEC, MAX_TOP_K

__all__ = ["DEFAULT_TIMEOUT_SEC", "INT32_MAX", "MAX_EP_SIZE", "MAX_TIMEOUT_SEC", "MAX_TOP_K"]

DEFAULT_TIMEOUT_SEC = 300
"""Seconds of wall clock that a call waits for a peer unless told otherwise."""

INT32_MAX = 2**31 - 1
"""Of ids, offsets and sizes that are int32 somewhere on their way."""
