"""How do arguments and results travel between processes? Pickled, tensors as their bytes.

torch's own pickling of a tensor takes its whole storage along, which for a view of a workspace is
the workspace.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.device.type == "cpu":
            dense = obj.detach().contiguous()
            content = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
            return _tensor_from_bytes, (content, obj.dtype, tuple(obj.shape))
        return NotImplemented


def _tensor_from_bytes(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)


def dumps(obj: Any) -> bytes:
    """Pickle an object with tensors in it."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


loads = pickle.loads


def call_of(
    device: str, body: Callable[..., Any], kwargs: dict[str, Any]
) -> tuple[str, str, str, dict[str, Any]]:
    """Return what `process.run` needs to know of a call."""
    return device, *name_of(body), kwargs


def name_of(body: Callable[..., Any]) -> tuple[str, str]:
    """Return the module and qualified name by which another process finds a function."""
    if "<locals>" in body.__qualname__ or "<lambda>" in body.__qualname__:
        raise TypeError(f"{body.__qualname__} must be defined at module level to run on a rank")
    return body.__module__, body.__qualname__


def find(module: str, qualname: str) -> Callable[..., Any]:
    """Return the function that `name_of` named."""
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]
