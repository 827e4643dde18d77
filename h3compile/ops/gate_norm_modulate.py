"""A gated residual, and the norm and modulation that read it: ``r = x + gate * branch``, ``norm(r) ...``."""

from __future__ import annotations

import torch

from h3compile.ops.launch import Run
from h3compile.ops.memory import empty
from h3compile.ops.numerics import FP8, modulation, normalized, quantized_rows, wide
from h3compile.ops.operator import Cost, Provider, define
from h3compile.ops.rows import empty_fp8, launch_rows, row_count, unsupported

__all__ = ["GATE_NORM_MODULATE", "GATE_NORM_MODULATE_FP8"]


def _computed(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    index: torch.Tensor,
    gate: int,
    shift: int,
    scale: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    width = x.shape[-1]
    gates, shifts, scales = (modulation(table, index, width, part) for part in (gate, shift, scale))
    residual = wide(x) + gates * wide(branch)
    # The norm reads the sum before it is rounded for storing.
    return residual.to(x.dtype), normalized(residual, weight, eps) * (1 + scales) + shifts


def _reference(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    index: torch.Tensor,
    gate: int,
    shift: int,
    scale: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    residual, out = _computed(x, branch, weight, table, index, gate, shift, scale, eps)
    return residual, out.to(x.dtype)


def _reference_fp8(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    index: torch.Tensor,
    gate: int,
    shift: int,
    scale: int,
    eps: float,
    static_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    residual, out = _computed(x, branch, weight, table, index, gate, shift, scale, eps)
    return residual, *quantized_rows(out, static_scale)


def _fake(x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _fake_fp8(x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=FP8), scales


def _illegal(
    arch: str, x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, *_: object
) -> str | None:
    return unsupported(arch, (x, branch, weight, table))


def _illegal_fp8(
    arch: str, x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, *_: object
) -> str | None:
    return unsupported(arch, (x, branch, weight, table), fp8=True)


def _launched(
    run: Run,
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    index: torch.Tensor,
    gate: int,
    shift: int,
    scale: int,
    eps: float,
    out: torch.Tensor,
    scales: torch.Tensor | None = None,
    static_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    residual = empty(x, x.shape)
    launch_rows(
        run,
        "gate_norm_modulate:gate_norm_modulate_kernel",
        row_count(x),
        x.shape[-1],
        {
            "x": x,
            "branch": branch,
            "weight": weight,
            "table": table,
            "index": index,
            "residual": residual,
            "out": out,
            "scales": scales,
            "static_scale": static_scale,
            "period": index.shape[0],
        },
        GATE=gate,
        SHIFT=shift,
        SCALE=scale,
        STRIDE=table.shape[1],
        EPS=eps,
    )
    return residual


def _launch(
    run: Run,
    arch: str,
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    index: torch.Tensor,
    gate: int,
    shift: int,
    scale: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = empty(x, x.shape)
    return _launched(run, x, branch, weight, table, index, gate, shift, scale, eps, out), out


def _launch_fp8(
    run: Run,
    arch: str,
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    index: torch.Tensor,
    gate: int,
    shift: int,
    scale: int,
    eps: float,
    static_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, scales = empty_fp8(x, x.shape[-1])
    residual = _launched(
        run, x, branch, weight, table, index, gate, shift, scale, eps, out, scales, static_scale
    )
    return residual, out, scales


def _cost(x: torch.Tensor, *_: object) -> Cost:
    return Cost({"float32": 10 * x.numel()}, 4 * x.numel() * x.element_size())


def _cost_fp8(x: torch.Tensor, *_: object) -> Cost:
    return Cost({"float32": 12 * x.numel()}, x.numel() * (3 * x.element_size() + 1))


_OPERANDS = (
    "Tensor x, Tensor branch, Tensor weight, Tensor table, Tensor index,"
    " int gate, int shift, int scale, float eps"
)

# x and branch [..., rows, H], weight [H], table [T, parts*H], index int64 [rows]; returns the residual and
# the modulated norm. Computed in float32; each result is rounded once.
GATE_NORM_MODULATE = define(
    "gate_norm_modulate",
    f"({_OPERANDS}) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    cost=_cost,
    providers=(Provider("triton", _illegal, _launch),),
)

# The same with the second result quantized: residual, values E4M3, scales float32 (..., rows, 1).
GATE_NORM_MODULATE_FP8 = define(
    "gate_norm_modulate.fp8",
    f"({_OPERANDS}, Tensor? static_scale=None) -> (Tensor, Tensor, Tensor)",
    reference=_reference_fp8,
    fake=_fake_fp8,
    cost=_cost_fp8,
    providers=(Provider("triton", _illegal_fp8, _launch_fp8),),
)
