"""Copies and kernels of a step that streams, as measured and as simulated, one above the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["Lane", "draw"]

Lane = list[tuple[float, float]]  # when each began and ended, in seconds


def draw(path: Path, lanes: Mapping[str, Mapping[str, Lane]]) -> None:
    """The first quarter of a second or so of both timelines, one above the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "h3compile"
    figure, axes = plt.subplots(2, 1, figsize=(10, 3.6), sharex=True, layout="constrained")
    colors = {"compute": ("#2f6f9f", "#7fb2d6"), "copy": ("#b5651d", "#e3a765")}
    ends = [end for found in lanes.values() for lane in found.values() for _, end in lane]
    shown = min(0.3, max(ends, default=0.3)) * 1e3
    for axis, (label, found) in zip(axes, lanes.items(), strict=True):
        for row, (stream, spans) in enumerate(found.items()):
            bars = [(start * 1e3, (end - start) * 1e3) for start, end in spans if start * 1e3 < shown]
            axis.broken_barh(bars, (row + 0.1, 0.8), facecolors=colors[stream])
        axis.set_yticks([0.5, 1.5], list(found))
        axis.set_ylim(2, 0)
        axis.set_title(label, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlim(0, shown)
    axes[-1].set_xlabel("ms from the begin of a step: 11,000 rows, no block resident, 2 slots")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
