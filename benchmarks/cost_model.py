"""The cost model beside what was measured: every figure we have of an H200, and published ones of B300 nodes.

Prints a table, and draws it where asked. No GPU and no torch: predictions are arithmetic over the shipped
work tables. What does not fit is in `OUTLIERS`, by name and with the reason; nothing is tuned to hide it.

    python benchmarks/cost_model.py [--svg docs/cost-model.svg] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from figure import Figure
from figures_h200 import h200_figures
from figures_published import published_figures

# Beyond its bar, and why.
_COOL = "so short a run leaves the card below its power limit, where BF16 products are faster"
_HOST = "probably the host: launched from Python, a short kernel ends before the next one is there"
OUTLIERS: Mapping[str, str] = {
    "published, others: 1x GB10, FP8, 8 s at 960x576, a step": (
        "no rate of this target is measured, and the peer's FP8 runs eager: on one B300 it gained 7 %, not 20"
    ),
    "H200, one block: exact, 2,001 rows": _COOL,
    "H200, one block: exact, 2,001 rows, first run": _COOL,
    "H200, one block: fp8,sage, 2,001 rows": _HOST,
    "H200, one block: fp8,sage,skip, 2,001 rows": _HOST,
    "H200, operators: BF16 GEMM out": "one rate for all shapes; this one reaches 787 TFLOP/s, all 716",
    "H200, operators: INT8 GEMM out": "one rate for all shapes; this one reaches 735 TFLOP/s, all 845",
    "H200, forwards: hoist: once a request": f"{_HOST}: 32 of them on 50 rows, once a request",
    "H200, forwards: fold-schedule: AdaLN of 50 blocks": (
        "each call was timed from the host, 0.197 ms; the kernel itself takes 0.131 (next line)"
    ),
    "H200, memory: diffusers, 10 layers, 37,760 rows: group offload, two blocks": (
        "Python's variables keep two tensors of the width of a row that nothing reads again: 0.8 GiB"
    ),
    "8x B300, topologies: DP1xSP8 AllGather, request": (
        "the other publication has 29.09 s for the same plan (0 resident, above); this older one has 13 ms "
        "a block, and devices have 9 ms of work: probably the host's launching"
    ),
}


def figures() -> list[Figure]:
    """All of them, H200 first."""
    return [*h200_figures(), *published_figures()]


def table(found: list[Figure]) -> str:
    """The figures as a Markdown table, a group after the other; what does not fit is marked."""
    lines, group = [], ""
    for figure in found:
        if figure.group != group:
            group = figure.group
            lines += ["", f"| {group} | predicted | measured | off |", "|---|---|---|---|"]
        mark = "" if figure.fits else " **"
        values = f"{figure.predicted:.4g} {figure.unit} | {figure.measured:.4g} {figure.unit}"
        lines.append(f"| {figure.name} | {values} | {figure.off:+.1%}{mark} |")
    return "\n".join(lines[1:])


def draw(found: list[Figure], path: Path) -> None:
    """Every figure as a dot: measured along, predicted over measured up, with the bars."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "h3compile"
    groups = list(dict.fromkeys(figure.group for figure in found))
    figure, axes = plt.subplots(1, len(groups), figsize=(13, 4.6), sharey=True)
    for axis, group in zip(axes, groups, strict=True):
        dots = [one for one in found if one.group == group]
        bar = 100 * dots[0].bar
        axis.axhspan(-bar, bar, color="#dbe7ec", linewidth=0)
        axis.axhline(0, color="#5a6b75", linewidth=0.8)
        for place, one in enumerate(dots):
            color = "#2f6f8f" if one.fits else "#b04a3a"
            axis.plot(place, 100 * one.off, "o", color=color, markersize=4)
        outside = sum(not one.fits for one in dots)
        title = group.replace(", ", ",\n")
        axis.set_title(f"{title}\n{len(dots)} figures,\n{outside} outside", fontsize=8.5)
        axis.set_xticks([])
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    axes[0].set_ylabel("predicted over measured, %", fontsize=9)
    axes[0].set_ylim(-45, 45)
    caption = "A dot a figure, in the order of the table. Shaded: the bar. Red: outside, reason listed."
    figure.text(0.5, 0.01, caption, ha="center", fontsize=8.5, color="#5a6b75")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print the table; draw and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = figures()
    print(table(found))
    outside = [figure for figure in found if not figure.fits]
    print(f"\n{len(found)} figures, {len(outside)} outside of their bars:")
    for figure in outside:
        print(f"- {figure.key} ({figure.off:+.0%}): {OUTLIERS.get(figure.key, 'NOT EXPLAINED')}")
    if options.svg:
        draw(found, options.svg)
    if options.json:
        options.json.write_text(
            json.dumps([asdict(figure) | {"off": figure.off} for figure in found], indent=1)
        )


if __name__ == "__main__":
    main()
