"""`h3compile finalize`: the last step of a build for another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from h3compile.cli.console import facts, stdout
from h3compile.cli.progress import shown

__all__ = ["finalize"]


def finalize(
    engine: Annotated[
        Path, typer.Argument(metavar="ENGINE", help="The engine that was built on another machine.")
    ],
    again: Annotated[
        bool,
        typer.Option("--again", help="Lower anew what is lowered already, for this machine's torch and CPU."),
    ] = False,
) -> None:
    """Lower what a build for an absent device left over.

    A build does everything but this where the target is not in the machine. Run it once on a machine
    that has the target; the engine is replaced whole, or left as it was.

    \b
      h3compile build --target b300 -o h3.h3e      (anywhere)
      h3compile finalize h3.h3e                    (on the B300)
    """
    from h3compile.lower import finalize as finish

    with shown() as progress:
        done = finish(engine, again=again, progress=progress)
    stdout().print(
        facts([("engine", str(done.path)), ("digest", done.digest), ("target", done.manifest.target)])
    )
