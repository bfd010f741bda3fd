"""The losses of both runs as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def save_plot(path: Path, curves: dict[str, Sequence[float]]) -> None:
    """Write a PNG with a line for each curve. Needs matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for index, (label, losses) in enumerate(curves.items()):
        axes.plot(losses, label=label, linewidth=4 - 2 * index, alpha=0.5 + 0.5 * (index > 0))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
