"""Nodes: several devices of one target in a machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from h3compile.errors import H3CompileError
from h3compile.targets.detect import resolve_target
from h3compile.targets.file import is_target_file
from h3compile.targets.target import Target

__all__ = ["Node", "find_node"]

_COUNTED = re.compile(r"(\d+)\s*[xX]\s*(\S.*)")


@dataclass(frozen=True)
class Node:
    """``count`` devices of one target, each of which reaches the others by ``target.peer``."""

    target: Target
    count: int

    def __str__(self) -> str:
        return self.target.name if self.count == 1 else f"{self.count}x{self.target.name}"


def find_node(text: str) -> Node:
    """The node that ``text`` names: a target as `resolve_target` takes it, or ``8xb300``, eight of it.

    Raises `H3CompileError` for a count of 0, for several of what has no link to another, and where
    `resolve_target` does.
    """
    text = text.strip()
    counted = None if Path(text).is_file() else _COUNTED.fullmatch(text)
    if counted is None:
        return Node(resolve_target(text), 1)
    count, target = int(counted[1]), resolve_target(counted[2])
    if count == 0:
        raise H3CompileError(f"{text!r} is no device at all", f"write {target.name} or 2x{target.name}")
    if count > 1 and target.peer is None:
        mend = "add `peer` to the file" if is_target_file(counted[2]) else f"write {target.name}"
        raise H3CompileError(f"{text!r}: {target.name} has no link to another device", mend)
    return Node(target, count)
