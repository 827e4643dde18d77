"""Targets: data about the devices an engine can be built for."""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Literal

from h3compile.errors import H3CompileError, nearest

__all__ = ["Target", "find_target", "targets"]


@dataclass(frozen=True)
class Target:
    """One device an engine can be built for.

    ``memory`` is in bytes, nominal, and None where the machine decides (the CPU). ``devices`` are shell
    patterns over the names that the CUDA driver reports.
    """

    name: str
    title: str
    arch: str
    memory: int | None
    devices: tuple[str, ...]

    @property
    def kind(self) -> Literal["cuda", "cpu"]:
        """The torch device type."""
        return "cpu" if self.arch == "cpu" else "cuda"

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability, such as (10, 3) for ``sm_103a``; None for the CPU."""
        if self.kind == "cpu":
            return None
        digits = self.arch.removeprefix("sm_").rstrip("a")
        return int(digits[:-1]), int(digits[-1])

    def names(self, device: str) -> bool:
        """Whether the CUDA driver's ``device`` name is this target's."""
        return any(fnmatch.fnmatchcase(device, pattern) for pattern in self.devices)


@cache
def targets() -> Mapping[str, Target]:
    """Every known target by name, in the order of the data file."""
    text = resources.files("h3compile.targets").joinpath("targets.toml").read_text(encoding="utf-8")
    found = {}
    for name, entry in tomllib.loads(text).items():
        memory_gb: int | None = entry.get("memory_gb")
        found[name] = Target(
            name=name,
            title=entry["title"],
            arch=entry["arch"],
            memory=None if memory_gb is None else memory_gb * 10**9,
            devices=tuple(entry.get("devices", ())),
        )
    return MappingProxyType(found)


def find_target(name: str) -> Target:
    """The target called ``name``, in any case; `H3CompileError` naming the nearest when unknown."""
    known = targets()
    target = known.get(name.lower())
    if target is None:
        raise H3CompileError(f"no target is called {name!r}", nearest(name.lower(), known))
    return target
