"""SAGE's values as other libraries take them: rows first, keys in order."""

from __future__ import annotations

import triton
import triton.language as tl

from h3compile.ops.kernels.qk_prepare import stored_keys


@triton.jit
def value_rows_kernel(v, out, rows, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """out [rows, HEADS, WIDTH] from v [HEADS, WIDTH, ceil(rows / TILE) * TILE] in stored key order.

    Grid (ceil(rows / TILE), HEADS). Both are bytes.
    """
    head = tl.program_id(1)
    position = tl.program_id(0) * TILE + tl.arange(0, TILE)
    channel = tl.arange(0, WIDTH)
    padded = tl.cdiv(rows, TILE) * TILE
    values = tl.load(v + (head.to(tl.int64) * WIDTH + channel)[:, None] * padded + position[None, :])
    row = stored_keys(position)
    target = out + (row.to(tl.int64)[:, None] * HEADS + head) * WIDTH + channel[None, :]
    tl.store(target, values.trans(), mask=(row < rows)[:, None])
