"""How long a step of several GPUs takes: the table and picture of docs/parallel.md. No GPU, no torch.

python examples/ranks_plan.py [FOLDER]    the picture goes to FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

from h3compile.plan import collectives
from h3compile.plan.block import block_spans
from h3compile.plan.cost import step_seconds
from h3compile.plan.pictures import draw_blocks, save
from h3compile.plan.shapes import Clip
from h3compile.plan.work import released
from h3compile.targets import find_target

TARGETS = ("h200", "b300")
RANKS = (1, 2, 4, 8)
PASSES = {"BF16": "", "fp8,sage": "fp8,sage"}
CLIP = Clip(frames=124)


def row(name: str, passes: str) -> str:
    """Seconds a step by the number of ranks, how well they scale, and what of it is exchanges of heads."""
    target, work = find_target(name), released(PASSES[passes])
    alone = step_seconds(work, target, CLIP.dims)
    cells = []
    for ranks in RANKS:
        step = step_seconds(work, target, CLIP.dims, shards=ranks)
        exchanged = sum(collectives.step_seconds(work, target, CLIP.dims, ranks).values())
        scaled = f" ({alone / ranks / step:.2f}, {exchanged / step:.1%})" if ranks > 1 else ""
        cells.append(f"{step:.3f} s{scaled}")
    return f"| `{name}` | {passes} | {' | '.join(cells)} |"


def main(options: argparse.Namespace) -> None:
    """Print the table, and draw one block of a rank where a folder is given."""
    print("| card | | " + " | ".join(f"{ranks} ranks" if ranks > 1 else "1 rank" for ranks in RANKS) + " |")
    print("|---|---|" + "---|" * len(RANKS))
    for name in TARGETS:
        for passes in PASSES:
            print(row(name, passes))
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        target, work = find_target("b300"), released("")
        ways = {"ulysses=8": 1, "ulysses=2, ring=4": 4, "ring=8": 8}
        blocks = {way: block_spans(work, target, CLIP.dims, 8, ring) for way, ring in ways.items()}
        blocks["ulysses=8, fp8,sage"] = block_spans(released("fp8,sage"), target, CLIP.dims, 8)
        title = "One block on one of eight B300, 1344x768, 124 frames: predicted"
        save(draw_blocks(blocks, title), options.folder / "parallel-block.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="where the picture goes")
    parser.add_argument("--model", help=argparse.SUPPRESS)  # predictions are of the released sizes
    main(parser.parse_args())
