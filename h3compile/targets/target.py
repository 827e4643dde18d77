"""Target: data about a device an engine can be built for."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from h3compile.errors import H3CompileError
from h3compile.targets.rates import Link, Rate

__all__ = ["Target"]


@dataclass(frozen=True)
class Target:
    """One device an engine can be built for.

    ``memory`` is in bytes, nominal, and None where the machine decides (the CPU). ``devices`` are shell
    patterns over the names that the CUDA driver reports.

    ``bandwidth`` counts bytes read and bytes written; ``flops`` has the keys of `FLOPS` that the device can
    compute; ``host`` is the way from pinned host memory, ``peer`` that to another device of the machine;
    ``launch_seconds`` is what a kernel costs however small. All are empty where only measuring tells them.
    ``sheet`` is where the nominal rates come from, if their own ``source`` does not say otherwise.
    """

    name: str
    title: str
    arch: str
    memory: int | None
    devices: tuple[str, ...]
    bandwidth: Rate | None = None
    flops: Mapping[str, Rate] = field(default_factory=dict, hash=False)
    host: Link | None = None
    peer: Link | None = None
    launch_seconds: float = 0.0
    sheet: str = ""

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

    def rate(self, key: str) -> Rate:
        """``flops[key]``, or for ``bandwidth`` that; `H3CompileError` where there is none."""
        found = self.bandwidth if key == "bandwidth" else self.flops.get(key)
        if found is None:
            raise H3CompileError(
                f"{self.name} has no rate for {key}",
                "measure one with `h3compile targets --measure -o FILE` and give --target FILE"
                if not self.flops
                else f"it has {', '.join(self.flops)}",
            )
        return found
