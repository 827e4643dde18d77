"""The frontier of streaming on two H200: measured, as the cost model has it now, and as predicted before.

python benchmarks/ranks_picture.py docs/parallel-frontier.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from figure import GIB
from figures_h200 import RESULTS, h200_figures

MODES = {"allgather": "#2f6f9f", "local": "#b5651d"}


@dataclass(frozen=True)
class Point:
    """Seconds a step and GiB of each device under one plan, of each kind."""

    rows: str
    mode: str
    resident: int
    measured: tuple[float, float]
    model: tuple[float, float]
    before: tuple[float, float]


def points() -> Iterator[Point]:
    """Those of `ranks.py`, all plans and lengths; where all blocks stay there is one for both modes."""
    run = json.loads((RESULTS / "h200_x2_ranks_earlier.json").read_text())["dlo"]
    found = {figure.name: figure for figure in h200_figures() if figure.group == "2x H200, streaming"}
    for name, point in run.items():
        if not isinstance(point, dict):
            continue
        rows, mode, _ = name.split()
        label = f"{int(rows):,} rows, {mode}, {point['resident']} of 50 resident"
        seconds, used = found[label], found[f"{label}: used"]
        yield Point(
            rows,
            mode,
            point["resident"],
            (used.measured, seconds.measured / 1e3),
            (used.predicted, seconds.predicted / 1e3),
            (point["planned_bytes"] / GIB, point["predicted_ms"] / 1e3),
        )


def draw(path: Path) -> None:
    """A plot for each length, both from zero."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "h3compile"
    every = list(points())
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    for axis, rows in zip(axes, ("37760", "11000"), strict=True):
        for mode, color in MODES.items():
            line = [p for p in every if p.rows == rows and (p.mode == mode or p.resident == 50)]
            line.sort(key=lambda point: point.resident)
            for kind, style in (("measured", "o-"), ("model", "x:")):
                across, up = zip(*(getattr(point, kind) for point in line), strict=True)
                what = "measured" if kind == "measured" else "cost model of that version"
                axis.plot(
                    across,
                    up,
                    style,
                    color=color,
                    label=f"{mode}, {what}",
                    markersize=6 if kind == "model" else 5,
                )
            across, up = zip(*(point.before for point in line), strict=True)
            axis.plot(
                across,
                up,
                "+",
                color="#9aa5ab",
                markersize=6,
                label="predicted before" if mode == "local" else None,
            )
        axis.set_title(f"{int(rows):,} rows", loc="left", fontsize=10)
        axis.set_xlabel("GiB of each of two H200, all that the driver counts")
        axis.set_ylim(0, 1.12 * max(point.measured[1] for point in every if point.rows == rows))
        axis.set_xlim(left=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("s a step of 50 blocks, BF16")
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path)
    draw(parser.parse_args().picture)
