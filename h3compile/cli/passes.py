"""`h3compile passes`: what can be done to a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from h3compile.cli.console import facts, stdout, table

if TYPE_CHECKING:
    from h3compile.pipeline.base import Pass

__all__ = ["passes"]


def passes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show everything about one pass.")
    ] = None,
) -> None:
    """List the passes, in the order in which they run.

    What each does, how it may change numbers, and what it needs: exact passes keep every bit; rounding
    passes stay as close to float64 as the reference; lossy passes have a measured error. Options go in
    parentheses, and the order typed never matters.

    \b
      h3compile passes
      h3compile passes fold-schedule
      h3compile build --passes "-fold-schedule" -o h3.h3e
    """
    from h3compile.pipeline.manager import in_order
    from h3compile.pipeline.registry import Registry

    registry = Registry.default()
    if name is not None:
        stdout().print(facts(_all(registry.get(name))))
        return
    kinds = {known: registry.get(known) for known in registry.names()}
    rows = [_row(kinds[known]) for known in in_order(list(kinds.values()))]
    stdout().print(table("", ("pass", "tier", "default", "does", "options", "order"), rows))


def _row(kind: type[Pass]) -> Sequence[str]:
    return (
        kind.name,
        str(kind.tier),
        "yes" if kind.default else "",
        _doc(kind).split("\n\n")[0],
        ", ".join(_options(kind)),
        "; ".join(f"{word} {', '.join(names)}" for word, names in _order(kind) if names),
    )


def _all(kind: type[Pass]) -> list[tuple[str, str]]:
    rows = [("pass", kind.name), ("tier", str(kind.tier)), ("default", "yes" if kind.default else "no")]
    rows += [(word, ", ".join(names) or "none") for word, names in _order(kind)]
    rows.append(("options", ", ".join(_options(kind)) or "none"))
    rows.append(("does", _doc(kind)))
    return rows


def _order(kind: type[Pass]) -> list[tuple[str, tuple[str, ...]]]:
    return [("requires", kind.requires), ("after", kind.after), ("conflicts with", kind.conflicts)]


def _options(kind: type[Pass]) -> list[str]:
    """``name=default`` of every option, or ``name: type`` where one must be given."""
    return [
        f"{option.name}: {option.type}"
        if option.default is dataclasses.MISSING
        else f"{option.name}={option.default}"
        for option in dataclasses.fields(kind)
    ]


def _doc(kind: type[Pass]) -> str:
    paragraphs = (kind.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).strip()
