"""What runs against what? A backend and its settings, written as `cake:no-pdl:eager`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

TIMEOUT_SEC = 60
"""How long a round waits for a rank that died: the benchmark should end, not hang."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A backend with its settings.

    label: as in the tables.
    mode: on CUDA, how rounds are issued. "graph": a captured CUDA graph of many (eager where the
        backend cannot be captured); "steady": the same without what its launch costs; "eager": a
        loop in Python; "phases": a graph with an event after every call, which costs time but tells
        dispatch from combine; "compiled": a graph that torch.compile has made; "compiled-steady":
        the same without what its launch costs. On the CPU "eager".
    zero_copy: experts write where combine reads, if the backend can do that.
    pdl: `enable_pdl` of the backend's config; None: as it decides.
    mask: all ranks are active, by a mask on the device that the kernels look at.
    stats: statistics of every expert travel with dispatch.
    fp8_dispatch: rows go out in DeepSeek's FP8, whatever the run's --dispatch-format.
    fp8_combine: rows travel back as scaled FP8. With either, the limits are still those of the
        run's format and unquantised rows back.
    lamport: of the nvlink_one_sided backend: whether steps go over its Lamport transport; None: as
        it decides.
    """

    label: str
    backend: str
    mode: str
    zero_copy: bool
    pdl: bool | None = None
    mask: bool = False
    stats: bool = False
    fp8_dispatch: bool = False
    fp8_combine: bool = False
    lamport: bool | None = None

    def options(self, num_experts: int) -> dict[str, Any]:
        """Return settings for create_communication."""
        options: dict[str, Any] = {"timeout_sec": TIMEOUT_SEC}
        if self.pdl is not None:
            options["enable_pdl"] = self.pdl
        if self.mask:
            options["enable_rank_mask"] = True
        if self.stats:
            options["eplb_stats_num_experts"] = num_experts
        if self.fp8_combine:
            options["use_low_precision_combine"] = True
        if self.lamport is not None:
            options["lamport"] = self.lamport
        return options

    @property
    def with_phases(self) -> Variant:
        """The same with events between the calls."""
        return replace(self, label=f"{self.label}:phases", mode="phases")


MODIFIERS: dict[str, dict[str, Any]] = {
    "graph": {"mode": "graph"},
    "steady": {"mode": "steady"},
    "eager": {"mode": "eager"},
    "phases": {"mode": "phases"},
    "compiled": {"mode": "compiled", "zero_copy": False},
    "compiled-steady": {"mode": "compiled-steady", "zero_copy": False},
    "pdl": {"pdl": True},
    "no-pdl": {"pdl": False},
    "zero-copy": {"zero_copy": True},
    "copy": {"zero_copy": False},
    "mask": {"mask": True},
    "stats": {"stats": True},
    "fp8-dispatch": {"fp8_dispatch": True},
    "fp8-combine": {"fp8_combine": True},
    "lamport": {"lamport": True},
    "fence": {"lamport": False},
}
CUDA_MODIFIERS = (
    *("graph", "steady", "phases", "compiled", "compiled-steady"),
    *("pdl", "no-pdl", "lamport", "fence"),
)


def parse_variant(text: str, *, mode: str, zero_copy: bool, pdl: bool | None) -> Variant:
    """Return what `backend[:modifier]...` names; the keywords hold where no modifier says more.

    Raises ValueError for an unknown modifier.
    """
    backend, *modifiers = text.split(":")
    variant = Variant(label=text, backend=backend, mode=mode, zero_copy=zero_copy, pdl=pdl)
    for modifier in modifiers:
        if modifier not in MODIFIERS:
            raise ValueError(f"{text}: {modifier} unknown; there are {','.join(MODIFIERS)}")
        variant = replace(variant, **MODIFIERS[modifier])
    return variant
