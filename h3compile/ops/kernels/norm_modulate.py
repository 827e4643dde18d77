"""RMS norm and modulation of a row: ``norm(x) * (1 + scale) + shift``, optionally quantized."""

from __future__ import annotations

import triton
import triton.language as tl

from h3compile.ops.kernels.common import load_cached, load_once, part_count, store_row, table_row

__all__ = ["modulated", "norm_modulate_kernel"]


@triton.jit
def modulated(parts, weight, shift, scale, EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``norm(x) * (1 + scale) + shift`` of the parts of a row, in float32."""
    squares = parts[0] * parts[0]
    for part in tl.static_range(1, part_count(WIDTH, BLOCK)):
        squares += parts[part] * parts[part]
    inverse = tl.rsqrt(tl.sum(squares, 0) / WIDTH + EPS)
    values = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(part_count(WIDTH, BLOCK)):
        factor = load_cached(weight, part, WIDTH, BLOCK)
        factor += factor * load_cached(scale, part, WIDTH, BLOCK)
        values += (parts[part] * factor * inverse + load_cached(shift, part, WIDTH, BLOCK),)
    return values


@triton.jit
def norm_modulate_kernel(
    x, weight, table, index, out, scales, static_scale, period,
    SHIFT: tl.constexpr, SCALE: tl.constexpr, STRIDE: tl.constexpr, EPS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row. x, out [rows, WIDTH], weight [WIDTH], table [T, STRIDE], index int64 [period].

    SHIFT and SCALE number the table's parts of WIDTH columns. With ``scales`` (float32 [rows]) ``out`` is
    E4M3, by the row's own amax or by ``static_scale`` (float32 [1]).
    """
    row = tl.program_id(0).to(tl.int64)
    entry = table_row(table, index, tl.program_id(0), period, STRIDE)
    parts = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(part_count(WIDTH, BLOCK)):
        parts += (load_once(x + row * WIDTH, part, WIDTH, BLOCK),)
    values = modulated(parts, weight, entry + SHIFT * WIDTH, entry + SCALE * WIDTH, EPS, WIDTH, BLOCK)
    store_row(values, out, scales, static_scale, row, WIDTH, BLOCK)
