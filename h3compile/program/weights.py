"""Weights as lazy expressions over checkpoint tensors.

Nothing is loaded when a program is built or rewritten. `Weight.evaluate` reads what it needs through
a `TensorSource`, one expression at a time, when an engine is written or loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from h3compile.errors import CheckpointError

__all__ = [
    "E4M3_MAX",
    "Cast",
    "Concat",
    "Fp8",
    "Fp8Scale",
    "Literal",
    "Load",
    "Reorder",
    "TensorSource",
    "Weight",
]


class TensorSource(Protocol):
    """Where checkpoint tensors come from."""

    def read(self, key: str) -> torch.Tensor:
        """The tensor stored under ``key``, on the CPU."""
        ...


class Weight:
    """An expression that yields one weight; subclasses are frozen dataclasses.

    ``shape`` and ``dtype`` are known without loading anything.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def evaluate(self, source: TensorSource) -> torch.Tensor:
        """The weight's value on the CPU, contiguous, of ``shape`` and ``dtype``."""
        raise NotImplementedError

    def reads(self) -> tuple[str, ...]:
        """The checkpoint keys the expression reads."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Size of the value in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Load(Weight):
    """The checkpoint tensor ``key`` as it is stored.

    Evaluation raises `CheckpointError` when it is stored in another shape or dtype.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def evaluate(self, source: TensorSource) -> torch.Tensor:
        tensor = source.read(self.key)
        if (tuple(tensor.shape), tensor.dtype) != (self.shape, self.dtype):
            raise CheckpointError(
                f"{self.key} is {tensor.dtype} {tuple(tensor.shape)}, not {self.dtype} {self.shape}",
                "give the checkpoint that the program was traced for",
            )
        return tensor

    def reads(self) -> tuple[str, ...]:
        return (self.key,)

    def __str__(self) -> str:
        return f"load({self.key})"


@dataclass(frozen=True)
class Literal(Weight):
    """A small value that the model computes instead of storing, such as a frequency table."""

    values: tuple[float, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Literal:
        """The literal with the bits of ``tensor``; `ValueError` when float64 does not hold its values."""
        if not torch.equal(tensor.double().to(tensor.dtype), tensor):
            raise ValueError(f"a literal holds no {tensor.dtype} beyond float64, and no NaN")
        return cls(tuple(tensor.double().flatten().tolist()), tuple(tensor.shape), tensor.dtype)

    def evaluate(self, source: TensorSource) -> torch.Tensor:
        return torch.tensor(self.values, dtype=torch.float64).to(self.dtype).reshape(self.shape)

    def reads(self) -> tuple[str, ...]:
        return ()

    def __str__(self) -> str:
        return f"literal({len(self.values)} values)"


@dataclass(frozen=True)
class Cast(Weight):
    """``operand`` rounded to ``dtype``."""

    operand: Weight
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.operand.shape

    def evaluate(self, source: TensorSource) -> torch.Tensor:
        return self.operand.evaluate(source).to(self.dtype)

    def reads(self) -> tuple[str, ...]:
        return self.operand.reads()

    def __str__(self) -> str:
        return f"cast({self.operand}, {str(self.dtype).removeprefix('torch.')})"


@dataclass(frozen=True)
class Concat(Weight):
    """``operands`` joined along ``dim``; they agree in dtype and in every other dimension."""

    operands: tuple[Weight, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        if not self.operands or not 0 <= self.dim < len(self.operands[0].shape):
            raise ValueError(f"cannot concatenate {len(self.operands)} weights along dimension {self.dim}")
        first = self.operands[0]
        for other in self.operands[1:]:
            rest = [n for d, n in enumerate(other.shape) if d != self.dim]
            if other.dtype != first.dtype or rest != [n for d, n in enumerate(first.shape) if d != self.dim]:
                raise ValueError(f"cannot concatenate {first} and {other} along dimension {self.dim}")

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        total = sum(operand.shape[self.dim] for operand in self.operands)
        first = self.operands[0].shape
        return (*first[: self.dim], total, *first[self.dim + 1 :])

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.operands[0].dtype

    def evaluate(self, source: TensorSource) -> torch.Tensor:
        out = torch.empty(self.shape, dtype=self.dtype)
        start = 0
        for operand in self.operands:
            size = operand.shape[self.dim]
            # One operand at a time: the peak is the result and one part, not the result twice.
            out.narrow(self.dim, start, size).copy_(operand.evaluate(source))
            start += size
        return out

    def reads(self) -> tuple[str, ...]:
        return tuple(key for operand in self.operands for key in operand.reads())

    def __str__(self) -> str:
        return f"concat({', '.join(map(str, self.operands))})"


@dataclass(frozen=True)
class Reorder(Weight):
    """``operand`` with dimension 0 cut into ``groups`` equal parts, taken in ``order``.

    ``order`` indexes the parts and may repeat or leave some out; ``Reorder(w, 2, (1, 0))`` swaps halves.
    """

    operand: Weight
    groups: int
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        rows = self.operand.shape[0]
        legal = self.order and all(0 <= i < self.groups for i in self.order)
        if not legal or rows % self.groups:
            raise ValueError(f"cannot reorder {rows} rows as {self.order} of {self.groups}")

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        rows = self.operand.shape[0] // self.groups * len(self.order)
        return (rows, *self.operand.shape[1:])

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.operand.dtype

    def evaluate(self, source: TensorSource) -> torch.Tensor:
        parts = self.operand.evaluate(source).chunk(self.groups)
        return torch.cat([parts[i] for i in self.order])

    def reads(self) -> tuple[str, ...]:
        return self.operand.reads()

    def __str__(self) -> str:
        return f"reorder({self.operand}, {self.groups}, {self.order})"


E4M3_MAX = 448.0
# An output channel of zeros has a scale too.
_SMALLEST_AMAX = 1e-12


@dataclass(frozen=True)
class Fp8Scale(Weight):
    """The scale of every row of the matrix ``operand`` in E4M3: amax / 448, float32."""

    operand: Weight

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.operand.shape[:1]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return torch.float32

    def evaluate(self, source: TensorSource) -> torch.Tensor:
        return _row_scales(self.operand.evaluate(source))

    def reads(self) -> tuple[str, ...]:
        return self.operand.reads()

    def __str__(self) -> str:
        return f"fp8_scale({self.operand})"


@dataclass(frozen=True)
class Fp8(Weight):
    """The matrix ``operand`` in E4M3, each row divided by its `Fp8Scale`."""

    operand: Weight

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.operand.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return torch.float8_e4m3fn

    def evaluate(self, source: TensorSource) -> torch.Tensor:
        value = self.operand.evaluate(source)
        scales = _row_scales(value)
        out = torch.empty(value.shape, dtype=self.dtype)
        # A few rows at a time: float32 copies of a whole matrix would be four times its result.
        for start in range(0, len(value), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            scaled = value[rows].float() / scales[rows, None]
            out[rows] = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(self.dtype)
        return out

    def reads(self) -> tuple[str, ...]:
        return self.operand.reads()

    def __str__(self) -> str:
        return f"fp8({self.operand})"


_ROWS_AT_ONCE = 1024


def _row_scales(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.abs().amax(1).float().clamp_min(_SMALLEST_AMAX) / E4M3_MAX
