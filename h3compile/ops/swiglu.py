"""SwiGLU: ``value * silu(gate)`` from the two halves of the last dimension, in either order."""

from __future__ import annotations

import torch

from h3compile.ops.launch import Run
from h3compile.ops.memory import empty
from h3compile.ops.numerics import FP8, quantized_rows, wide
from h3compile.ops.operator import Cost, Provider, define
from h3compile.ops.rows import empty_fp8, launch_rows, row_count, unsupported

__all__ = ["SWIGLU", "SWIGLU_FP8"]


def _activated(x: torch.Tensor, gate_first: bool) -> torch.Tensor:
    first, second = wide(x).chunk(2, -1)
    gate, value = (first, second) if gate_first else (second, first)
    return value * (gate * torch.sigmoid(gate))


def _reference(x: torch.Tensor, gate_first: bool) -> torch.Tensor:
    return _activated(x, gate_first).to(x.dtype)


def _reference_fp8(
    x: torch.Tensor, gate_first: bool, static_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return quantized_rows(_activated(x, gate_first), static_scale)


def _fake(x: torch.Tensor, gate_first: bool) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _fake_fp8(
    x: torch.Tensor, gate_first: bool, static_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    values = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=FP8)
    return values, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _illegal(arch: str, x: torch.Tensor, *_: object) -> str | None:
    return unsupported(arch, (x,))


def _illegal_fp8(arch: str, x: torch.Tensor, *_: object) -> str | None:
    return unsupported(arch, (x,), fp8=True)


def _launched(
    run: Run,
    x: torch.Tensor,
    gate_first: bool,
    out: torch.Tensor,
    scales: torch.Tensor | None = None,
    static_scale: torch.Tensor | None = None,
) -> None:
    arguments = {"x": x, "out": out, "scales": scales, "static_scale": static_scale}
    launch_rows(run, "swiglu:swiglu_kernel", row_count(x), out.shape[-1], arguments, GATE_FIRST=gate_first)


def _launch(run: Run, arch: str, x: torch.Tensor, gate_first: bool) -> torch.Tensor:
    out = empty(x, (*x.shape[:-1], x.shape[-1] // 2))
    _launched(run, x, gate_first, out)
    return out


def _launch_fp8(
    run: Run, arch: str, x: torch.Tensor, gate_first: bool, static_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    out, scales = empty_fp8(x, x.shape[-1] // 2)
    _launched(run, x, gate_first, out, scales, static_scale)
    return out, scales


def _cost(x: torch.Tensor, gate_first: bool) -> Cost:
    return Cost({"float32": 3 * x.numel()}, x.numel() * x.element_size() * 3 // 2)


def _cost_fp8(x: torch.Tensor, gate_first: bool, static_scale: torch.Tensor | None = None) -> Cost:
    return Cost({"float32": 4 * x.numel()}, x.numel() * x.element_size() + x.numel() // 2)


# x [..., rows, 2F]: [value | gate], or [gate | value] with gate_first. Computed in float32, rounded once.
SWIGLU = define(
    "swiglu",
    "(Tensor x, bool gate_first) -> Tensor",
    reference=_reference,
    fake=_fake,
    cost=_cost,
    providers=(Provider("triton", _illegal, _launch),),
)

# The same, quantized for an FP8 linear: values E4M3 [..., rows, F], scales float32 (..., rows, 1).
SWIGLU_FP8 = define(
    "swiglu.fp8",
    "(Tensor x, bool gate_first, Tensor? static_scale=None) -> (Tensor, Tensor)",
    reference=_reference_fp8,
    fake=_fake_fp8,
    cost=_cost_fp8,
    providers=(Provider("triton", _illegal_fp8, _launch_fp8),),
)
