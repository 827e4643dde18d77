"""What a launch of a Triton kernel is, without Triton: an engine is run where no compiler is installed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

__all__ = ["Binary", "BinaryRecord", "Launch", "Run", "Spec", "ceil_div"]


@dataclass(frozen=True)
class Spec:
    """One compiled variant of a Triton function.

    ``kernel`` is ``module:function`` below h3compile.ops.kernels. ``types`` are the runtime parameters in
    order with their Triton types, ``constants`` the compile-time ones. ``warps``, ``stages`` and
    ``registers`` (a limit for each thread) are Triton's launch options. No field depends on a row count,
    so the variants of a region are known when it is built.
    """

    kernel: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int | float | bool | str | None], ...] = ()
    warps: int = 4
    stages: int = 3
    registers: int | None = None
    gluon: bool = False

    @property
    def key(self) -> str:
        """A name for the variant that no other variant has, fit for a file."""
        text = json.dumps(asdict(self), sort_keys=True)
        function = self.kernel.partition(":")[2]
        return f"{function}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Launch:
    """One launch: the variant, the grid, and the runtime arguments in the order of ``spec.types``.

    Tensors start on a 16-byte boundary: the kernels are compiled for that.
    """

    spec: Spec
    grid: tuple[int, int, int]
    arguments: tuple[torch.Tensor | int | float, ...]


class BinaryRecord(Protocol):
    """What an artifact records of a `Binary`: its fields, and the file's name in the artifact's folder."""

    file: str
    entry: str
    warps: int
    shared: int
    scratch: int
    scratch_alignment: int
    scratch_arguments: int


@dataclass(frozen=True)
class Binary:
    """A compiled variant in a file, and what launching it needs.

    ``shared`` is dynamic shared memory in bytes; ``scratch`` and ``scratch_alignment`` are bytes of global
    memory for each program of the grid; ``scratch_arguments`` counts the trailing pointers Triton adds, of
    which the first is that memory.
    """

    file: Path
    entry: str
    warps: int
    shared: int
    scratch: int
    scratch_alignment: int
    scratch_arguments: int

    @classmethod
    def recorded(cls, record: BinaryRecord, folder: Path) -> Binary:
        """The binary that ``record`` describes, in ``folder``."""
        return cls(
            folder / record.file,
            record.entry,
            record.warps,
            record.shared,
            record.scratch,
            record.scratch_alignment,
            record.scratch_arguments,
        )


# Executes a launch, or only notes it when the operands are fake.
Run = Callable[[Launch], None]


def ceil_div(value: int, divisor: int) -> int:
    """``value / divisor`` rounded up; symbolic where ``value`` is."""
    return -(-value // divisor)
