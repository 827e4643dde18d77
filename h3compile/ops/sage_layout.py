"""SAGE's operands in the order that attention of other libraries takes: [rows, heads, D]."""

from __future__ import annotations

from collections.abc import Callable

import torch

from h3compile.ops.attention import unsupported_heads
from h3compile.ops.launch import Run, ceil_div
from h3compile.ops.online_softmax import K_TILE
from h3compile.ops.package import on_device_of, without_data
from h3compile.ops.rows import launch

__all__ = ["attend_inside", "rows_first", "unfit", "value_rows"]

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


def unfit(q: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Why other libraries cannot have these heads, or this dtype of the result; None when they can."""
    reason = unsupported_heads(q.shape[2])
    if reason is None and dtype != torch.bfloat16:
        return f"its result is bfloat16, not {str(dtype).removeprefix('torch.')}"
    return reason


def attend_inside(
    run: Run,
    q: torch.Tensor,
    v: torch.Tensor,
    dtype: torch.dtype,
    valid: int | None,
    attend: Callable[[torch.Tensor, torch.Tensor], None],
) -> torch.Tensor:
    """[1, rows, heads, D] in ``dtype``, zero from row ``valid`` on, before which ``attend`` writes it.

    ``attend`` is given the values and the result of the valid rows, both [valid, heads, D]; it is not called
    for operands without data, of which a build only asks what is launched.
    """
    heads, rows, width = q.shape
    values = value_rows(run, v, rows)
    out = q.new_empty((1, rows, heads, width), dtype=dtype)
    if without_data(q):
        return out
    count = rows if valid is None else valid
    with on_device_of(q):
        attend(values[:count], out[0, :count])
    out[0, count:] = 0
    return out
