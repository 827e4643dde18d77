"""How a rank's process came out, told to the one that started it: one of them speaks for all."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NoReturn

from h3compile.errors import H3CompileError, Interrupted, RankFailure

__all__ = ["DEBUG", "FOLDER", "READY", "Outcome", "first_reason", "last_words", "leave", "outcome_of"]

# Variables of a rank's environment: where it finds its job and leaves its outcome, and whether to show more.
FOLDER = "H3COMPILE_RANK_FOLDER"
DEBUG = "H3COMPILE_DEBUG"

# The file there that says that rank 0 can be interrupted.
READY = "ready"


@dataclass(frozen=True)
class Outcome:
    """What ended a rank: its own ``failed`` or ``bug``, an ``interrupt``, or ``others``: what it was told."""

    kind: Literal["failed", "bug", "interrupt", "others"]
    cause: str = ""
    mend: str = ""

    def encode(self) -> str:
        """As text, for a file."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Outcome:
        """The outcome that was encoded."""
        return cls(**json.loads(text))


def outcome_of(error: BaseException) -> Outcome:
    """What to tell of the error that ends a rank."""
    match error:
        case RankFailure():
            return Outcome("others", error.cause, error.mend)
        case KeyboardInterrupt() | Interrupted():
            return Outcome("interrupt")
        case H3CompileError():
            return Outcome("failed", error.cause, error.mend)
    text = " ".join(str(error).split()) or "no message"
    return Outcome("bug", f"{type(error).__name__}: {text}")


def leave(error: BaseException) -> None:
    """Tells the process that started this rank why it ends."""
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    path = Path(os.environ[FOLDER]) / f"outcome.{os.environ['RANK']}"
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(outcome_of(error).encode(), encoding="utf-8")
    partial.replace(path)


def last_words(failure: RankFailure) -> NoReturn:
    """Leaves ``failure`` as the outcome of a rank that does not come free, and ends the process."""
    leave(failure)
    os._exit(1)


def first_reason(
    outcomes: Sequence[Outcome | None], codes: Sequence[int | None], words: Sequence[str]
) -> Exception:
    """The error that stands for those of all ranks, at least one of which did not come to its end.

    Rank by rank: ``outcomes`` where one was told, exit ``codes`` where a process ended by itself, negative
    ones by a signal, and the last ``words`` of those. What a rank did counts before what it heard of others.
    """
    told = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome is not None]
    for rank, outcome in told:
        if outcome.kind == "failed":
            # What every rank would say alike is no rank's own.
            alone = sum(other.kind == "failed" and other.cause == outcome.cause for _, other in told) == 1
            at = f"rank {rank}: " if alone and rank else ""
            return H3CompileError(at + outcome.cause, outcome.mend)
        if outcome.kind == "bug":
            return H3CompileError(
                f"rank {rank} failed with {outcome.cause}",
                "h3compile --debug run ... shows the traceback; please report it",
            )
    for rank, code in enumerate(codes):
        if code is None or code == 0 or outcomes[rank] is not None:
            continue
        if code < 0:
            return H3CompileError(
                f"rank {rank} was ended by {signal.Signals(-code).name}",
                "where nobody sent it, look for the kernel's word on memory in dmesg",
            )
        return H3CompileError(f"rank {rank} ended with exit code {code}: {words[rank] or 'without a word'}")
    for _, outcome in told:
        if outcome.kind == "others":
            return H3CompileError(outcome.cause, outcome.mend)
    return Interrupted("interrupted")
