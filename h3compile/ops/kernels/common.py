"""What the kernels that work on whole rows share.

One program owns a row and keeps it in registers, in parts of ``BLOCK`` columns: 8 columns a thread, one
16-byte load of 16-bit values. Columns past ``WIDTH`` read as zero, so they add nothing to a sum or a maximum.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_cached", "load_once", "part_count", "store_part", "store_rounded", "store_row", "table_row"]


@triton.constexpr_function
def part_count(width, block):
    """How many parts a row has."""
    return -(-width // block)


@triton.jit
def load_part(
    row, PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EVICT: tl.constexpr
):  # fmt: skip
    """A part of a row in float32.

    EVICT is "evict_first" for rows that nobody reads again, which must not push the others out of the
    cache, and "evict_last" for weights and table rows.
    """
    if row.dtype.element_ty == tl.bfloat16 and WIDTH % 2 == 0:
        # Halves of a word: a shift and a mask, where unpacking 16-bit values takes three instructions.
        words = row.to(tl.pointer_type(tl.uint32), bitcast=True)
        pairs = _load(words, PART, WIDTH // 2, BLOCK // 2, EVICT)
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = (pairs & 0xFFFF0000).to(tl.float32, bitcast=True)
        values = tl.interleave(low, high)
    else:
        values = _load(row, PART, WIDTH, BLOCK, EVICT).to(tl.float32)
    return values


@triton.jit
def _load(row, PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EVICT: tl.constexpr):
    column = PART * BLOCK + tl.arange(0, BLOCK)
    if (PART + 1) * BLOCK <= WIDTH:
        values = tl.load(row + column, eviction_policy=EVICT)
    else:
        values = tl.load(row + column, mask=column < WIDTH, other=0, eviction_policy=EVICT)
    return values


@triton.jit
def load_once(row, PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A part of a row that nobody reads again, in float32."""
    return load_part(row, PART, WIDTH, BLOCK, "evict_first")


@triton.jit
def load_cached(row, PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A part of a weight or a table row, which other programs read too, in float32."""
    return load_part(row, PART, WIDTH, BLOCK, "evict_last")


@triton.jit
def store_part(row, value, PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Round a part to the row's dtype and store it."""
    column = PART * BLOCK + tl.arange(0, BLOCK)
    value = value.to(row.dtype.element_ty)
    if (PART + 1) * BLOCK <= WIDTH:
        tl.store(row + column, value)
    else:
        tl.store(row + column, value, mask=column < WIDTH)


@triton.jit
def table_row(table, index, row, period, STRIDE: tl.constexpr):
    """The table row that sequence row ``row`` of a batch gathers; ``index`` has ``period`` entries."""
    at = row
    if at >= period:
        # Only of later documents: a division takes longer than the load.
        at = at % period
    return table + tl.load(index + at) * STRIDE


@triton.jit
def store_rounded(values, out, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The parts of a row, each value rounded once to the dtype of ``out``."""
    for part in tl.static_range(part_count(WIDTH, BLOCK)):
        store_part(out + row * WIDTH, values[part], part, WIDTH, BLOCK)


@triton.jit
def store_row(values, out, scales, static_scale, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The parts of a row in the dtype of ``out``, or with ``scales`` quantized to E4M3.

    The scale is amax/448 of the row, or ``static_scale``, beyond which values saturate.
    """
    if scales is None:
        store_rounded(values, out, row, WIDTH, BLOCK)
    else:
        if static_scale is None:
            top = tl.abs(values[0])
            for part in tl.static_range(1, part_count(WIDTH, BLOCK)):
                top = tl.maximum(top, tl.abs(values[part]))
            scale = tl.div_rn(tl.maximum(tl.max(top, 0), 1e-12), 448.0)
        else:
            scale = tl.load(static_scale)
        tl.store(scales + row, scale)
        inverse = tl.div_rn(1.0, scale)
        for part in tl.static_range(part_count(WIDTH, BLOCK)):
            value = values[part] * inverse
            if static_scale is not None:
                value = tl.clamp(value, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
            store_part(out + row * WIDTH, value, part, WIDTH, BLOCK)
