"""The errors a user can cause, each one line that names the cause and the mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BuildError",
    "CheckpointError",
    "EngineError",
    "H3CompileError",
    "Interrupted",
    "RankFailure",
    "nearest",
]


class H3CompileError(Exception):
    """A failure with its cause and, where there is one, its mend, printed as ``cause: mend``."""

    def __init__(self, cause: str, mend: str = "") -> None:
        self.cause = " ".join(cause.split())
        self.mend = " ".join(mend.split())
        super().__init__(f"{self.cause}: {self.mend}" if self.mend else self.cause)


class CheckpointError(H3CompileError):
    """The checkpoint is missing, damaged or of another model."""


class BuildError(H3CompileError):
    """The program could not be compiled as asked."""


class EngineError(H3CompileError):
    """The engine is damaged, too new, or made for another machine."""


class Interrupted(H3CompileError):
    """The caller asked for a stop and the work ended at the next safe point."""


class RankFailure(H3CompileError):
    """One of several ranks failed, ended or hangs, and none of them can go on.

    ``rank`` is the one at fault where that is known. ``mine``: this process found it first, and is the one
    to report it.
    """

    def __init__(self, cause: str, mend: str = "", *, rank: int | None = None, mine: bool = False) -> None:
        super().__init__(cause, mend)
        self.rank = rank
        self.mine = mine


def nearest(name: str, known: Iterable[str]) -> str:
    """The mend for an unknown name: the nearest known one, or the whole list when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"choose one of {', '.join(names)}" if names else "none is known"
