"""Wrong calls: tensors to make them with, and what they raised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Problem = tuple[type[Exception], str]
"""What a call raised: the class and the message."""


def rows(count: int, width: int = 16, **more: Any) -> torch.Tensor:
    return torch.zeros(count, width, **{"dtype": torch.bfloat16, **more})


def ids(count: int, top_k: int = 2, **more: Any) -> torch.Tensor:
    return torch.zeros(count, top_k, **{"dtype": torch.int32, **more})


def weights(count: int, top_k: int = 2, **more: Any) -> torch.Tensor:
    return torch.zeros(count, top_k, **more)


def problem_of(call: Any, *args: Any, **kwargs: Any) -> Problem | None:
    try:
        call(*args, **kwargs)
    except Exception as raised:
        return type(raised), str(raised)
    return None


def expect(problem: Problem | None, error: type[Exception], words: Sequence[str]) -> None:
    assert problem is not None, "nothing was raised"
    raised, message = problem
    assert issubclass(raised, error), f"{raised.__name__}: {message}"
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
