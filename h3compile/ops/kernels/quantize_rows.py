"""A row to E4M3 with its scale."""

from __future__ import annotations

import triton
import triton.language as tl

from h3compile.ops.kernels.common import load_once, part_count, store_row

__all__ = ["quantize_rows_kernel"]


@triton.jit
def quantize_rows_kernel(x, out, scales, static_scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row. x [rows, WIDTH], out E4M3 [rows, WIDTH], scales float32 [rows]."""
    row = tl.program_id(0).to(tl.int64)
    values = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(part_count(WIDTH, BLOCK)):
        values += (load_once(x + row * WIDTH, part, WIDTH, BLOCK),)
    store_row(values, out, scales, static_scale, row, WIDTH, BLOCK)
