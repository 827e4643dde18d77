"""Which card, which plan: the table of docs/plan.md, from the planner's Python side. No GPU, no torch.

python examples/plan.py [FOLDER]    pictures of the plans go to FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

from h3compile.plan.pictures import draw_memory, save
from h3compile.plan.planner import Planner, Question
from h3compile.plan.plans import Plan
from h3compile.plan.shapes import Clip, frames_of
from h3compile.targets import find_node

NODES = (
    "rtx-4090",
    "rtx-5090",
    "2xrtx-5090",
    "l40s",
    "rtx-pro-5000",
    "rtx-pro-6000",
    "gb10",
    "a100",
    "h100",
    "h20",
    "h200",
    "b200",
    "b300",
    "8xh200",
    "8xb300",
)
SECONDS = (5, 10, 15)


def smallest(node: str, passes: str, seconds: float) -> Plan | None:
    """The plan that takes the least of the device for steps at most 2 % longer; None where nothing fits."""
    clip = Clip(frames=frames_of(seconds))
    return Planner(Question(find_node(node), clip, passes)).smallest(0.02)


def row(node: str, passes: str) -> str:
    """Seconds of a request and GiB while denoising, for each length."""
    cells = [f"`{node}`", passes or "BF16"]
    for seconds in SECONDS:
        plan = smallest(node, passes, seconds)
        if plan is None:
            cells.append("does not fit")
            continue
        memory, kept = plan.memory, len(plan.residency.resident)
        held = "all" if not plan.residency.streamed else str(kept)
        gib = f"{memory.total('denoise') / 2**30:.1f} ({memory.peak / 2**30:.1f}) GiB"
        cells.append(f"{plan.request.total:,.0f} s, {gib}, {held}")
    return f"| {' | '.join(cells)} |"


def main(options: argparse.Namespace) -> None:
    """Print the table, and draw the memory of three cards where a folder is given."""
    print("| card | | " + " | ".join(f"{seconds} s clip" for seconds in SECONDS) + " |")
    print("|---|---|" + "---|" * len(SECONDS))
    for node in options.nodes:
        print(row(node, ""))
        if "gemm.float8_e4m3fn" in find_node(node).target.flops:
            print(row(node, "fp8"), flush=True)
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        plans = {node: smallest(node, "", 5) for node in ("rtx-4090", "rtx-pro-6000", "h200")}
        drawn = {node: plan for node, plan in plans.items() if plan is not None}
        title = "Memory of a 5 s clip at 1344x768, BF16: predicted"
        save(draw_memory(drawn, title), options.folder / "plan_memory.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="where pictures go")
    parser.add_argument("--nodes", nargs="+", default=NODES, help="cards, or several of one such as 8xb300")
    parser.add_argument("--model", help=argparse.SUPPRESS)  # plans are of the released sizes
    main(parser.parse_args())
