"""`h3compile tiny`: a complete small model to try everything with."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from h3compile.cli.console import stdout
from h3compile.cli.progress import shown

__all__ = ["tiny"]

# The components that `write_tiny` reports; only the length of the bar depends on it.
_COMPONENTS = 9


class Precision(enum.StrEnum):
    """How the tiny weights are stored."""

    BF16 = "bf16"
    FP32 = "fp32"


def tiny(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder to write; must not exist, or be empty.")
    ],
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of all weights.", min=0)] = 0,
    dtype: Annotated[
        Precision, typer.Option(help="bf16 mixes BF16 and FP32 as the release does; fp32 is FP32 throughout.")
    ] = Precision.BF16,
    layers: Annotated[int, typer.Option(metavar="N", help="Transformer blocks.", min=1)] = 4,
) -> None:
    """Write a small MiniMax-H3 with random weights.

    It has every component, in the layout of the release, so that building, running and serving can be tried
    in seconds on any machine, with no network. What it generates is noise.

    \b
      h3compile tiny tiny-h3
      h3compile build --model tiny-h3 -o tiny.h3e
    """
    import torch

    from h3compile.models.tiny import write_tiny

    kind = {Precision.BF16: torch.bfloat16, Precision.FP32: torch.float32}[dtype]
    with shown() as progress:
        progress.phase("write the components", _COMPONENTS)
        write_tiny(directory, seed=seed, dtype=kind, num_layers=layers, progress=lambda _: progress.advance())
    stdout().print(f"wrote {directory}", markup=False)
