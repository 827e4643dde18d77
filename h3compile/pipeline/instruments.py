"""Instruments: what watches the passes without being part of them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from h3compile.pipeline.base import Pass
from h3compile.program.printer import print_program
from h3compile.program.program import Program
from h3compile.progress import Progress

__all__ = ["Dump", "Instrument", "Report"]


class Instrument(Protocol):
    """Called by the manager around every pass; it cannot change the program."""

    def before(self, number: int, item: Pass, program: Program) -> None: ...

    def after(self, number: int, item: Pass, program: Program) -> None: ...


class Dump:
    """Writes ``NN_pass.before.txt`` and ``NN_pass.after.txt`` into a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def before(self, number: int, item: Pass, program: Program) -> None:
        self._write(f"{number:02d}_{item.name}.before.txt", program)

    def after(self, number: int, item: Pass, program: Program) -> None:
        self._write(f"{number:02d}_{item.name}.after.txt", program)

    def _write(self, name: str, program: Program) -> None:
        (self._folder / name).write_text(print_program(program), encoding="utf-8")


class Report:
    """Tells a `Progress` which pass is running."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def before(self, number: int, item: Pass, program: Program) -> None: ...

    def after(self, number: int, item: Pass, program: Program) -> None:
        self._progress.advance()
