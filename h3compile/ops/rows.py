"""Launches from operands: parameter types, and the kernels that give every row a program."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import torch

from h3compile.ops.launch import Launch, Run, Spec
from h3compile.ops.memory import empty
from h3compile.ops.numerics import FP8

__all__ = [
    "FLOATS",
    "byte_count",
    "contiguous",
    "empty_fp8",
    "launch",
    "launch_rows",
    "power_of_two",
    "row_count",
    "unsupported",
]

Constant = int | float | bool | str | None

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    FP8: "fp8e4nv",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
# Columns a thread takes of each part of a row: one 16-byte load of 16-bit values.
_COLUMNS = 8


def launch(
    run: Run,
    kernel: str,
    grid: tuple[int, int, int],
    arguments: Mapping[str, torch.Tensor | int | None],
    constants: Mapping[str, Constant],
    *,
    warps: int,
    stages: int = 3,
    registers: int | None = None,
    gluon: bool = False,
) -> None:
    """Launch ``module:function`` on ``arguments``, its runtime parameters in order.

    Integers are passed as i32; an argument that is none becomes a compile-time constant. The keywords are
    those of `Spec`.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    types = tuple(
        (name, f"*{_TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else "i32")
        for name, value in given.items()
    )
    absent = tuple((name, None) for name, value in arguments.items() if value is None)
    spec = Spec(kernel, types, absent + tuple(constants.items()), warps, stages, registers, gluon)
    run(Launch(spec, grid, tuple(given.values())))


def contiguous(kernel: str, arguments: Mapping[str, torch.Tensor | int | None]) -> None:
    """Raise `ValueError` when a tensor among the arguments is not contiguous."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            raise ValueError(f"{kernel} needs {name} contiguous, not with strides {value.stride()}")


def byte_count(x: torch.Tensor) -> int:
    """The bytes of ``x``, whose sizes may be symbolic: torch's own ``nbytes`` refuses those."""
    return x.numel() * x.element_size()


def row_count(x: torch.Tensor) -> int:
    """How many rows ``x`` [..., width] has."""
    return math.prod(x.shape[:-1])


def launch_rows(
    run: Run,
    kernel: str,
    rows: int,
    width: int,
    arguments: Mapping[str, torch.Tensor | int | None],
    *,
    warp_columns: int = 2048,
    registers: int | None = None,
    **constants: Constant,
) -> None:
    """Launch one program for each of ``rows`` rows of ``width`` columns.

    A warp takes ``warp_columns`` of them, or more where eight warps are too few: by default as many as fit in
    registers, for fewer threads wait for each other. ``registers`` limits those of a thread.
    """
    contiguous(kernel, arguments)
    warps = next((warps for warps in (1, 2, 4) if width <= warp_columns * warps), 8)
    block = 32 * _COLUMNS * warps
    constants |= {"WIDTH": width, "BLOCK": block}
    launch(run, kernel, (rows, 1, 1), arguments, constants, warps=warps, registers=registers)


def empty_fp8(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for E4M3 values [..., rows, width] and float32 scales [..., rows, 1] of the rows of ``x``."""
    scales = empty(x, (*x.shape[:-1], 1), torch.float32)
    return empty(x, (*x.shape[:-1], width), FP8), scales


def power_of_two(number: int) -> int:
    """The smallest power of two from ``number`` on."""
    return 1 << (number - 1).bit_length()


def unsupported(arch: str, tensors: Iterable[torch.Tensor | None], *, fp8: bool = False) -> str | None:
    """Why a kernel cannot read ``tensors`` as floats on ``arch``, or with ``fp8`` write E4M3 there."""
    least = 89 if fp8 else 80
    match = re.fullmatch(r"sm_(\d+)[a-z]?", arch)
    if match is None:
        return f"{arch} is no NVIDIA architecture"
    if int(match[1]) < least:
        return f"it needs sm_{least} or later"
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in FLOATS:
            return f"no kernel for {str(tensor.dtype).removeprefix('torch.')}"
    return None
