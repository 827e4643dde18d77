"""A gated residual: ``x + gate * branch``."""

from __future__ import annotations

import triton
import triton.language as tl

from h3compile.ops.kernels.common import load_cached, load_once, part_count, store_part, table_row

__all__ = ["gate_residual_kernel"]


@triton.jit
def gate_residual_kernel(
    x, branch, table, index, out, period,
    GATE: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row. x, branch, out [rows, WIDTH], table [T, STRIDE], index int64 [period].

    GATE numbers the table's part of WIDTH columns.
    """
    row = tl.program_id(0).to(tl.int64)
    entry = table_row(table, index, tl.program_id(0), period, STRIDE)
    for part in tl.static_range(part_count(WIDTH, BLOCK)):
        value = load_once(x + row * WIDTH, part, WIDTH, BLOCK)
        added = load_once(branch + row * WIDTH, part, WIDTH, BLOCK)
        gate = load_cached(entry + GATE * WIDTH, part, WIDTH, BLOCK)
        store_part(out + row * WIDTH, value + gate * added, part, WIDTH, BLOCK)
