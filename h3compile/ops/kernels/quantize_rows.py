"""Rows to E4M3 with their scales."""

from __future__ import annotations

import triton
import triton.language as tl

from h3compile.ops.kernels.common import load_once, part_count, store_row

__all__ = ["quantize_rows_kernel", "quantize_short_rows_kernel"]


@triton.jit
def quantize_rows_kernel(x, out, scales, static_scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row. x [rows, WIDTH], out E4M3 [rows, WIDTH], scales float32 [rows]."""
    row = tl.program_id(0).to(tl.int64)
    values = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(part_count(WIDTH, BLOCK)):
        values += (load_once(x + row * WIDTH, part, WIDTH, BLOCK),)
    store_row(values, out, scales, static_scale, row, WIDTH, BLOCK)


@triton.jit
def quantize_short_rows_kernel(
    x, out, scales, static_scale, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """ROWS rows a program, such as those of a head: WIDTH is a power of two. Operands as above."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    values = tl.load(x + at, mask=row[:, None] < rows, other=0.0, eviction_policy="evict_first").to(
        tl.float32
    )
    if static_scale is None:
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(values), 1), 1e-12), 448.0)
    else:
        scale = tl.zeros((ROWS,), tl.float32) + tl.load(static_scale)
    tl.store(scales + row, scale, mask=row < rows)
    value = values * tl.div_rn(1.0, scale)[:, None]
    if static_scale is not None:
        value = tl.clamp(value, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=row[:, None] < rows)
