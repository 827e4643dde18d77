"""What several commands ask of a clip or a model, spelled once, and the request it makes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from h3compile.cli.values import parse_size

__all__ = ["Frames", "Model", "Size", "Steps", "fields_of"]

Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="A checkpoint folder, or a repository in the local Hugging Face cache.  "
        "[default: MiniMaxAI/MiniMax-H3]",
    ),
]
Size = Annotated[
    str | None, typer.Option(metavar="WxH", help="In pixels, multiples of 32.  [default: 1344x768]")
]
Frames = Annotated[
    int | None, typer.Option(metavar="N", help="At 24 a second; rounded up to 17 n + 5.  [default: 124]")
]
Steps = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Grid points of the schedule; N of them are N - 1 forwards.  [default: 50]"
    ),
]


def fields_of(
    size: str | None, references: Sequence[Path] | None, **options: Path | float | None
) -> dict[str, object]:
    """The fields of a `Request` that were typed, by name; `H3CompileError` for a size that is none."""
    fields: dict[str, object] = {name: value for name, value in options.items() if value is not None}
    if references:
        fields["references"] = tuple(references)
    if size is not None:
        fields["width"], fields["height"] = parse_size(size)
    return fields
