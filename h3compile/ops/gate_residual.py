"""A gated residual: ``x + gate * branch``, the gate gathered from a table row."""

from __future__ import annotations

import torch

from h3compile.ops.launch import Run
from h3compile.ops.memory import empty
from h3compile.ops.numerics import modulation, wide
from h3compile.ops.operator import Cost, Provider, define
from h3compile.ops.rows import launch_rows, row_count, unsupported

__all__ = ["GATE_RESIDUAL"]


def _reference(
    x: torch.Tensor, branch: torch.Tensor, table: torch.Tensor, index: torch.Tensor, gate: int
) -> torch.Tensor:
    return (wide(x) + modulation(table, index, x.shape[-1], gate) * wide(branch)).to(x.dtype)


def _fake(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


def _illegal(arch: str, x: torch.Tensor, branch: torch.Tensor, table: torch.Tensor, *_: object) -> str | None:
    return unsupported(arch, (x, branch, table))


def _launch(
    run: Run,
    arch: str,
    x: torch.Tensor,
    branch: torch.Tensor,
    table: torch.Tensor,
    index: torch.Tensor,
    gate: int,
) -> torch.Tensor:
    out = empty(x, x.shape)
    launch_rows(
        run,
        "gate_residual:gate_residual_kernel",
        row_count(x),
        x.shape[-1],
        {"x": x, "branch": branch, "table": table, "index": index, "out": out, "period": index.shape[0]},
        # Nothing is summed over a row: its warps wait for nothing.
        warp_columns=1024,
        GATE=gate,
        STRIDE=table.shape[1],
    )
    return out


def _cost(x: torch.Tensor, *_: object) -> Cost:
    return Cost({"float32": 2 * x.numel()}, 3 * x.numel() * x.element_size())


# x and branch [..., rows, H] in one dtype, table [T, parts*H], index int64 [rows]. Computed in float32 and
# rounded once.
GATE_RESIDUAL = define(
    "gate_residual",
    "(Tensor x, Tensor branch, Tensor table, Tensor index, int gate) -> Tensor",
    reference=_reference,
    fake=_fake,
    cost=_cost,
    providers=(Provider("triton", _illegal, _launch),),
)
