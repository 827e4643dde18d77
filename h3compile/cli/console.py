"""What the commands print with: tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["device", "facts", "stderr", "stdout", "table"]


def stdout() -> Console:
    """The console for results; a pipe gets plain text, unwrapped."""
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = 200
    return console


def stderr() -> Console:
    """The console for progress and notes, so that results can be piped."""
    return Console(stderr=True, highlight=False)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()
) -> Table:
    """A table; the columns in ``numbers`` are set to the right. Cells are text, never markup."""
    made = Table(
        title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def device(target: str, arch: str) -> str:
    """A target with its architecture, where that is not its name."""
    return target if arch == target else f"{target} ({arch})"


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and values, one pair a line."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="bold")
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(Text(name), Text(value))
    return made
