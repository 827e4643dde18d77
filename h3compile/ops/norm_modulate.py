"""RMS norm, then modulation by a gathered table row: ``norm(x) * (1 + scale) + shift``."""

from __future__ import annotations

import torch

from h3compile.ops.launch import Run
from h3compile.ops.memory import empty
from h3compile.ops.numerics import FP8, modulation, normalized, quantized_rows
from h3compile.ops.operator import Cost, Provider, define
from h3compile.ops.rows import empty_fp8, launch_rows, row_count, unsupported

__all__ = ["NORM_MODULATE", "NORM_MODULATE_FP8"]


# Of a thread that also quantizes: 4 fewer than the compiler takes, so a multiprocessor holds a seventh row.
_REGISTERS = {("sm_90a", torch.bfloat16): 72}


def _modulated(
    x: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    index: torch.Tensor,
    shift: int,
    scale: int,
    eps: float,
) -> torch.Tensor:
    width = x.shape[-1]
    scales, shifts = (modulation(table, index, width, part) for part in (scale, shift))
    return normalized(x, weight, eps) * (1 + scales) + shifts


def _reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    index: torch.Tensor,
    shift: int,
    scale: int,
    eps: float,
) -> torch.Tensor:
    return _modulated(x, weight, table, index, shift, scale, eps).to(x.dtype)


def _reference_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    index: torch.Tensor,
    shift: int,
    scale: int,
    eps: float,
    static_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return quantized_rows(_modulated(x, weight, table, index, shift, scale, eps), static_scale)


def _fake(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_fp8(x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=FP8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _illegal(arch: str, x: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, *_: object) -> str | None:
    return unsupported(arch, (x, weight, table))


def _illegal_fp8(
    arch: str, x: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, *_: object
) -> str | None:
    return unsupported(arch, (x, weight, table), fp8=True)


def _launched(
    run: Run,
    arch: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    index: torch.Tensor,
    shift: int,
    scale: int,
    eps: float,
    out: torch.Tensor,
    scales: torch.Tensor | None = None,
    static_scale: torch.Tensor | None = None,
) -> None:
    launch_rows(
        run,
        "norm_modulate:norm_modulate_kernel",
        row_count(x),
        x.shape[-1],
        {
            "x": x,
            "weight": weight,
            "table": table,
            "index": index,
            "out": out,
            "scales": scales,
            "static_scale": static_scale,
            "period": index.shape[0],
        },
        # One sum for eight warps to wait for costs less than it brings; a maximum besides, more.
        warp_columns=1024 if scales is None else 2048,
        registers=_REGISTERS.get((arch, x.dtype)) if scales is not None else None,
        SHIFT=shift,
        SCALE=scale,
        STRIDE=table.shape[1],
        EPS=eps,
    )


def _launch(
    run: Run,
    arch: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    index: torch.Tensor,
    shift: int,
    scale: int,
    eps: float,
) -> torch.Tensor:
    out = empty(x, x.shape)
    _launched(run, arch, x, weight, table, index, shift, scale, eps, out)
    return out


def _launch_fp8(
    run: Run,
    arch: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    index: torch.Tensor,
    shift: int,
    scale: int,
    eps: float,
    static_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, scales = empty_fp8(x, x.shape[-1])
    _launched(run, arch, x, weight, table, index, shift, scale, eps, out, scales, static_scale)
    return out, scales


def _cost(x: torch.Tensor, *_: object) -> Cost:
    return Cost({"float32": 8 * x.numel()}, 2 * x.numel() * x.element_size())


def _cost_fp8(x: torch.Tensor, *_: object) -> Cost:
    return Cost({"float32": 10 * x.numel()}, x.numel() * (x.element_size() + 1))


_OPERANDS = "Tensor x, Tensor weight, Tensor table, Tensor index, int shift, int scale, float eps"

# x [..., rows, H] and weight [H] in one dtype, table [T, parts*H], index int64 [rows]; shift and scale
# number the parts. Computed in float32 and rounded once.
NORM_MODULATE = define(
    "norm_modulate",
    f"({_OPERANDS}) -> Tensor",
    reference=_reference,
    fake=_fake,
    cost=_cost,
    providers=(Provider("triton", _illegal, _launch),),
)

# The same, quantized for an FP8 linear: values E4M3, scales float32 (..., rows, 1).
NORM_MODULATE_FP8 = define(
    "norm_modulate.fp8",
    f"({_OPERANDS}, Tensor? static_scale=None) -> (Tensor, Tensor)",
    reference=_reference_fp8,
    fake=_fake_fp8,
    cost=_cost_fp8,
    providers=(Provider("triton", _illegal_fp8, _launch_fp8),),
)
