"""Progress for people: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from h3compile.cli.console import stderr
from h3compile.progress import Progress

__all__ = ["Bars", "Lines", "shown"]


@contextmanager
def shown(console: Console | None = None) -> Iterator[Progress]:
    """A `Progress` on stderr for the length of the block."""
    console = console or stderr()
    if not console.is_terminal:
        yield Lines(sys.stderr)
        return
    bars = RichProgress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    with bars:
        progress = Bars(bars)
        try:
            yield progress
        finally:
            progress.close()


class Bars:
    """One bar a phase; the finished ones stay."""

    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._task: TaskID | None = None
        self._total: int | None = None
        self._done = 0

    def phase(self, name: str, total: int | None) -> None:
        self.close()
        self._total, self._done = total, 0
        self._task = self._bars.add_task(name, total=total)

    def advance(self, count: int = 1) -> None:
        self._done += count
        if self._task is not None:
            self._bars.advance(self._task, count)

    def note(self, text: str) -> None:
        self._bars.console.print(Text(text))

    def close(self) -> None:
        """End the current phase; one of unknown length becomes as long as it was."""
        if self._task is None:
            return
        if self._total is None:
            self._bars.update(self._task, total=max(self._done, 1), completed=max(self._done, 1))
        self._bars.stop_task(self._task)
        self._task = None


class Lines:
    """One line a phase, with the seconds since the beginning: for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._start = time.monotonic()

    def phase(self, name: str, total: int | None) -> None:
        self._print(name if total is None else f"{name} ({total})")

    def advance(self, count: int = 1) -> None:
        pass  # a log wants to know what is being done, not how far it is

    def note(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:7.1f} s] {text}", file=self._stream, flush=True)
