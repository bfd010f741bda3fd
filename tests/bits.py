"""Are two tensors the same, bit for bit? Closeness is never asked."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_SHOWN = 8


def as_bits(tensor: Tensor) -> Tensor:
    """Return the tensor's bits as integers of the same shape, dense."""
    return tensor.detach().cpu().contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()])


def assert_same_bits(
    got: Tensor,
    wanted: Tensor,
    *,
    rank: int | None = None,
    what: str = "",
    rows: Tensor | None = None,
) -> None:
    """Fail where an element differs, showing rank, row, column, wanted and got.

    NaN equals the same NaN, and -0.0 is not +0.0.
    rows: bool, the rows to compare (the others are unspecified); None: all.
    """
    where = f"{what or 'tensor'}{'' if rank is None else f' on rank {rank}'}"
    assert got.dtype == wanted.dtype, f"{where}: dtype {got.dtype}, wanted {wanted.dtype}"
    assert got.shape == wanted.shape, f"{where}: shape {got.shape}, wanted {wanted.shape}"
    differs = as_bits(got) != as_bits(wanted)
    if rows is not None:
        differs = differs & rows.view(-1, *[1] * (got.dim() - 1))
    if not differs.any():
        return
    places = differs.nonzero()
    lines = [f"{where}: {len(places)} of {differs.numel()} elements differ"]
    for place in places[:_MOST_SHOWN].tolist():
        at = tuple(place)
        row_column = ", ".join(
            f"{name} {index}" for name, index in zip(("row", "column", "depth"), at, strict=False)
        )
        lines.append(f"  {row_column}: wanted {_show(wanted, at)}, got {_show(got, at)}")
    raise AssertionError("\n".join(lines))


def _show(tensor: Tensor, at: tuple[int, ...]) -> str:
    digits = 2 * tensor.element_size()
    bits = int(as_bits(tensor)[at]) & (16**digits - 1)
    number = tensor[at].float().item() if tensor.is_floating_point() else int(tensor[at])
    return f"{number} (0x{bits:0{digits}x})"
