"""Which ops does a backend on the one-sided transport call? Those with its prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import moe_ep.ops  # noqa: F401  (loads the ops)


@dataclass(frozen=True)
class OneSidedOps:
    """The ops of one backend; their schemas stand in csrc/ops/library.cpp."""

    initialize: Any
    forget: Any
    dispatch: Any
    dispatch_in_place: Any
    received_rows: Any
    combine: Any
    combine_out: Any
    combine_quantized: Any
    abandon: Any
    begin_shared_batch: Any
    end_shared_batch: Any
    check: Any

    @classmethod
    def of(cls, prefix: str) -> OneSidedOps:
        """Return those of a backend; prefix: "cake" or "one_sided"."""
        names = cls.__dataclass_fields__
        return cls(**{name: getattr(torch.ops.moe_ep, f"{prefix}_{name}") for name in names})
