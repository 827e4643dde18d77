"""SAGE's operands in the order that attention of other libraries takes: [rows, heads, D]."""

from __future__ import annotations

import torch

from h3compile.ops.launch import Run, ceil_div
from h3compile.ops.online_softmax import K_TILE
from h3compile.ops.rows import launch

__all__ = ["rows_first", "value_rows"]

_WARPS = 8


def value_rows(run: Run, v: torch.Tensor, rows: int) -> torch.Tensor:
    """The values of `sage_prepare`, [heads, D, P] in stored key order, as [rows, heads, D]."""
    heads, width, _ = v.shape
    out = v.new_empty((rows, heads, width))
    launch(
        run,
        "sage_layout:value_rows_kernel",
        (ceil_div(rows, K_TILE), heads, 1),
        {"v": v.view(torch.int8), "out": out.view(torch.int8), "rows": rows},
        {"HEADS": heads, "WIDTH": width, "TILE": K_TILE},
        warps=_WARPS,
    )
    return out


def rows_first(x: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` rows of queries or keys [heads, rows, D] of 8 bits, as [count, heads, D]."""
    # In words of eight: a copy by bytes would be bound by instructions.
    words = x.view(torch.int64)[:, :count].transpose(0, 1).contiguous()
    return words.view(x.dtype)
