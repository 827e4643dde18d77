"""Target files: one target that a user wrote or measured."""

from __future__ import annotations

import tomllib
from pathlib import Path

from h3compile.errors import H3CompileError, nearest
from h3compile.targets.entry import read_entry, write_entry
from h3compile.targets.known import targets
from h3compile.targets.target import Target

__all__ = ["is_target_file", "read_target", "write_target"]


def is_target_file(text: str) -> bool:
    """Whether ``text``, where a target is asked for, means a file: it ends so, or there is one."""
    return text.lower().endswith(".toml") or Path(text).is_file()


def read_target(path: Path | str) -> Target:
    """The one target in the TOML file at ``path``.

    Raises `H3CompileError` where the file cannot be read, does not hold exactly one target, or holds
    one that `read_entry` refuses, of an architecture that nothing is compiled for, or under the name of a
    known target of another architecture.
    """
    path = Path(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise H3CompileError(
            f"the target file {path} cannot be read ({reason})",
            "write one with `h3compile targets --measure -o FILE`",
        ) from error
    if len(tables) != 1:
        raise H3CompileError(
            f"{path} has {len(tables)} tables at its top and a target file has one, called like its target",
            "leave one, such as [h200]",
        )
    ((name, entry),) = tables.items()
    target = read_entry(name, entry, str(path))
    _check(target, path)
    return target


def _check(target: Target, path: Path) -> None:
    known = targets()
    arches = {one.arch for one in known.values()}
    if target.arch not in arches:
        raise H3CompileError(
            f"{path}: {target.name}.arch is {target.arch!r}, and nothing is compiled for it",
            nearest(target.arch, arches),
        )
    same = known.get(target.name)
    if same is not None and same.arch != target.arch:
        raise H3CompileError(
            f"{path}: {target.name} is known as {same.arch}, and here it is {target.arch}",
            "give it another name",
        )


def write_target(target: Target, path: Path | str, comment: str = "") -> None:
    """Write ``target`` to the file at ``path``, whole or not at all; OSError where that fails."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(write_entry(target, comment), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
