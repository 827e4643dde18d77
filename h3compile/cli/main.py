"""The command line: one file a command, assembled here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from h3compile import __version__
from h3compile.cli import build, calibrate, doctor, finalize, inspect, passes, plan, run, targets, tiny
from h3compile.cli.command import Command
from h3compile.cli.interrupt import terminate_like_interrupt

__all__ = ["application", "main"]

# In the order in which a newcomer needs them.
_COMMANDS: tuple[tuple[str, Callable[..., None]], ...] = (
    ("plan", plan.plan),
    ("build", build.build),
    ("run", run.run),
    ("calibrate", calibrate.calibrate),
    ("inspect", inspect.inspect),
    ("finalize", finalize.finalize),
    ("passes", passes.passes),
    ("targets", targets.targets),
    ("tiny", tiny.tiny),
    ("doctor", doctor.doctor),
)


def _version(asked: bool) -> None:
    if asked:
        print(f"h3compile {__version__}")
        raise typer.Exit


def _top(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Compile MiniMax-H3, the joint video and audio diffusion transformer, ahead of time.

    A checkpoint goes in and an engine comes out: a folder that loads in seconds and takes the place of
    the transformer. Work that no denoising step needs is done before: at build, or once a request.

    The whole way on any machine, with a small random model:

    \b
      h3compile tiny tiny-h3
      h3compile build --model tiny-h3 -o tiny.h3e
      h3compile run tiny.h3e --prompt "a red kite" --size 64x64 --steps 4 -o kite.mp4
    """


def application() -> typer.Typer:
    """The typer application with every command."""
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,
    )
    app.callback()(_top)
    for name, function in _COMMANDS:
        app.command(name, cls=Command)(function)
    return app


def main() -> None:
    """The `h3compile` command."""
    terminate_like_interrupt()
    application()()
