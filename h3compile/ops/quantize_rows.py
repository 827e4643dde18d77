"""Rows to FP8 for a linear whose input no fused operator quantizes already."""

from __future__ import annotations

import torch

from h3compile.ops.launch import Run
from h3compile.ops.numerics import FP8, quantized_rows
from h3compile.ops.operator import Cost, Provider, define
from h3compile.ops.rows import empty_fp8, launch_rows, row_count, unsupported

__all__ = ["QUANTIZE_ROWS"]


def _reference(
    x: torch.Tensor, static_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return quantized_rows(x, static_scale)


def _fake(x: torch.Tensor, static_scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=FP8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _illegal(arch: str, x: torch.Tensor, *_: object) -> str | None:
    return unsupported(arch, (x,), fp8=True)


def _launch(
    run: Run, arch: str, x: torch.Tensor, static_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    out, scales = empty_fp8(x, x.shape[-1])
    arguments = {"x": x, "out": out, "scales": scales, "static_scale": static_scale}
    launch_rows(run, "quantize_rows:quantize_rows_kernel", row_count(x), x.shape[-1], arguments)
    return out, scales


def _cost(x: torch.Tensor, static_scale: torch.Tensor | None = None) -> Cost:
    return Cost({"float32": 2 * x.numel()}, x.numel() * (x.element_size() + 1))


# x [..., rows, K]; values E4M3, scales float32 (..., rows, 1): amax/448, or the calibrated static_scale.
QUANTIZE_ROWS = define(
    "quantize_rows",
    "(Tensor x, Tensor? static_scale=None) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    cost=_cost,
    providers=(Provider("triton", _illegal, _launch),),
)
