"""Rows to FP8 for a linear whose input no fused operator quantizes already."""

from __future__ import annotations

import torch

from h3compile.ops.launch import Run, ceil_div
from h3compile.ops.numerics import FP8, quantized_rows
from h3compile.ops.operator import Cost, Provider, define
from h3compile.ops.rows import (
    contiguous,
    empty_fp8,
    launch,
    launch_rows,
    power_of_two,
    row_count,
    unsupported,
)

__all__ = ["QUANTIZE_ROWS"]

# Rows as short as those of a head leave most of a program's threads without work: several go in one, values
# together. One a program, heads of 128 were quantized at a seventh of a copy's speed (h200_rank_alone.json).
_SHORT = 512
_TOGETHER = 4096


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
    rows, width = row_count(x), x.shape[-1]
    if width > _SHORT or width != power_of_two(width):
        launch_rows(run, "quantize_rows:quantize_rows_kernel", rows, width, arguments)
        return out, scales
    contiguous("quantize_rows", arguments)
    together = _TOGETHER // width
    launch(
        run,
        "quantize_rows:quantize_short_rows_kernel",
        (ceil_div(rows, together), 1, 1),
        {**arguments, "rows": rows},
        {"WIDTH": width, "ROWS": together},
        warps=4,
    )
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
