"""Which of a test's cases run on GPUs? Fewer sizes than on the CPU, and every promise.

Imports nothing that would initialise CUDA: conftest.py needs it before ranks know their share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.ranks.devices import NCCL, ONE_GPU, SPREAD

GPUS = (ONE_GPU, SPREAD, NCCL)


def few_on_gpus(**kept: Sequence[Any]) -> pytest.MarkDecorator:
    """Of a test's cases run on GPUs only those whose parameters are among these: sizes that kernels
    take other ways for. `--every-case` runs all.

    Over NCCL one case of each test is enough, of two ranks: torch_dist's own code is the CPU's.
    """
    return pytest.mark.few_on_gpus(**kept)


def is_left_out(item: pytest.Item, seen_on_nccl: set[str]) -> bool:
    """Return whether `few_on_gpus` leaves a case out.

    seen_on_nccl: tests of which a case was kept; the kept one is added.
    """
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    device = parameters.get("device")
    if device not in GPUS:
        return False
    marks = item.iter_markers("few_on_gpus")
    if any(parameters[name] not in kept for mark in marks for name, kept in mark.kwargs.items()):
        return True
    if device != NCCL:
        return False
    test = item.nodeid.partition("[")[0]
    if test in seen_on_nccl or parameters.get("size", 2) != 2:
        return True
    seen_on_nccl.add(test)
    return False
