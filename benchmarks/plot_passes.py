"""Draws `results/h200_passes.json`: one block under every set of passes beside its peers.

python benchmarks/plot_passes.py benchmarks/results/h200_passes.json docs/passes.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

# In the file -> on the page, from the slowest peer to the fastest of ours.
NAMES = {
    "diffusers": "Diffusers, as shipped",
    "torch.compile": "torch.compile",
    "torch.compile+fp8": "torch.compile, FP8 linears",
    "-fuse": "exact passes",
    "default": "fuse",
    "sage": "fuse, sage",
    "fp8": "fuse, fp8",
    "fp8,sage": "fuse, fp8, sage",
}
PEERS = 3
# TFLOP of a block at 37,760 rows over the best FP8 rate seen on this GPU.
FLOOR_MS = 46.7


def main(source: Path, target: Path) -> None:
    rows = json.loads(source.read_text())["rows"]
    lengths = ["11000", "37760", "73500"]
    figure, axes = plt.subplots(1, len(lengths), figsize=(11, 3.6), sharey=True)
    for axis, length in zip(axes, lengths, strict=True):
        times = [rows[length]["ms"][name] for name in NAMES]
        colors = ["#9aa5b1"] * PEERS + ["#2f6f8f"] * (len(NAMES) - PEERS)
        axis.barh(list(NAMES.values()), times, color=colors, height=0.7)
        compiled = rows[length]["ms"]["torch.compile"]
        for place, time in enumerate(times):
            axis.text(time, place, f" {time:.1f}  {compiled / time:.2f}x", va="center", fontsize=8)
        axis.set_xlim(0, max(times) * 1.33)
        axis.set_title(f"{int(length):,} rows", fontsize=10)
        axis.set_xlabel("ms a block; x over torch.compile", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        if length == "37760":
            axis.axvline(FLOOR_MS, color="#b04a3a", linestyle="--", linewidth=1)
            floor = "all of it at the best FP8 rate"
            axis.text(FLOOR_MS + 2, len(NAMES) - 0.3, floor, color="#b04a3a", fontsize=7)
    axes[0].set_ylim(len(NAMES), -0.7)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
