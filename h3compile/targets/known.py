"""The targets that are known by name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType

from h3compile.errors import H3CompileError, nearest
from h3compile.targets.entry import read_entry
from h3compile.targets.target import Target

__all__ = ["find_target", "recorded_target", "targets"]


@cache
def targets() -> Mapping[str, Target]:
    """Every known target by name, in the order of the data file."""
    text = resources.files("h3compile.targets").joinpath("targets.toml").read_text(encoding="utf-8")
    return MappingProxyType(
        {name: read_entry(name, entry, "targets.toml") for name, entry in tomllib.loads(text).items()}
    )


def find_target(name: str) -> Target:
    """The target called ``name``, in any case; `H3CompileError` naming the nearest when unknown."""
    known = targets()
    target = known.get(name.lower())
    if target is None:
        raise H3CompileError(f"no target is called {name!r}", nearest(name.lower(), known))
    return target


def recorded_target(name: str, arch: str) -> Target:
    """The target an engine was built for, by what its manifest says of it.

    One that came from a file, whose name nobody else knows, is any device of its architecture.
    """
    known = targets().get(name)
    return known if known is not None else Target(name, name, arch, None, ("*",))
