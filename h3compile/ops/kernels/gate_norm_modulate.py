"""A gated residual and the norm and modulation of it, in one pass over the row."""

from __future__ import annotations

import triton
import triton.language as tl

from h3compile.ops.kernels.common import load_cached, load_once, part_count, store_part, store_row, table_row
from h3compile.ops.kernels.norm_modulate import modulated

__all__ = ["gate_norm_modulate_kernel"]


@triton.jit
def gate_norm_modulate_kernel(
    x, branch, weight, table, index, residual, out, scales, static_scale, period,
    GATE: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr, STRIDE: tl.constexpr, EPS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `norm_modulate_kernel`, of ``residual = x + gate * branch``, which is stored too."""
    row = tl.program_id(0).to(tl.int64)
    entry = table_row(table, index, tl.program_id(0), period, STRIDE)
    parts = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(part_count(WIDTH, BLOCK)):
        value = load_once(x + row * WIDTH, part, WIDTH, BLOCK)
        added = load_once(branch + row * WIDTH, part, WIDTH, BLOCK)
        # The norm reads the sum before it is rounded for storing.
        parts += (value + load_cached(entry + GATE * WIDTH, part, WIDTH, BLOCK) * added,)
    for part in tl.static_range(part_count(WIDTH, BLOCK)):
        store_part(residual + row * WIDTH, parts[part], part, WIDTH, BLOCK)
    values = modulated(parts, weight, entry + SHIFT * WIDTH, entry + SCALE * WIDTH, EPS, WIDTH, BLOCK)
    store_row(values, out, scales, static_scale, row, WIDTH, BLOCK)
