"""SwiGLU of a row: ``value * silu(gate)``, optionally quantized."""

from __future__ import annotations

import triton
import triton.language as tl

from h3compile.ops.kernels.common import load_once, part_count, store_row

__all__ = ["swiglu_kernel"]


@triton.jit
def swiglu_kernel(
    x, out, scales, static_scale, GATE_FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program a row. x [rows, 2 * WIDTH], out [rows, WIDTH].

    With ``scales`` (float32 [rows]) ``out`` is E4M3, by the row's own amax or by ``static_scale``.
    """
    row = tl.program_id(0).to(tl.int64)
    first = x + row * (2 * WIDTH)
    gate_row = first if GATE_FIRST else first + WIDTH
    value_row = first + WIDTH if GATE_FIRST else first
    values = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(part_count(WIDTH, BLOCK)):
        gate = load_once(gate_row, part, WIDTH, BLOCK)
        value = load_once(value_row, part, WIDTH, BLOCK)
        values += (value * gate / (1.0 + tl.exp(-gate)),)
    store_row(values, out, scales, static_scale, row, WIDTH, BLOCK)
