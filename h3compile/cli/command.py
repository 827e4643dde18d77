"""How every command fails: one line, an exit code, and nothing else unless asked."""

from __future__ import annotations

import sys
import traceback

import typer
from typer.core import TyperCommand

from h3compile.errors import H3CompileError, Interrupted

__all__ = ["BUG", "FAILED", "INTERRUPTED", "Command"]

FAILED = 1  # the user can mend it
BUG = 2  # the user cannot
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class Command(TyperCommand):
    """A command whose failures end in one line on stderr.

    `H3CompileError` prints ``error: cause: mend`` and exits with 1; an interrupt prints ``interrupted`` and
    exits with 130; anything else is a bug, said so in one line, and exits with 2. ``h3compile --debug``
    shows the traceback of each.
    """

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        debug = bool(ctx.find_root().params.get("debug"))
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise  # how typer itself ends a command
        except (KeyboardInterrupt, Exception) as error:
            if debug:
                traceback.print_exc()
            code, line = _verdict(error)
            if code == BUG and not debug:
                line += f" (h3compile --debug {ctx.info_name} ... shows the traceback; please report it)"
            print(line, file=sys.stderr)
            raise typer.Exit(code) from None


def _verdict(error: BaseException) -> tuple[int, str]:
    """The exit code and the line for an error."""
    if isinstance(error, (KeyboardInterrupt, Interrupted)):
        return INTERRUPTED, "interrupted"
    if isinstance(error, H3CompileError):
        return FAILED, f"error: {error}"
    text = " ".join(str(error).split()) or "no message"
    return BUG, f"bug: {type(error).__name__}: {text}"
