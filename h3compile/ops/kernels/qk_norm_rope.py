"""RMS norm and partial rotary embedding of the query and key heads of a row."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["qk_norm_rope_kernel"]


@triton.jit
def _pair(column, TURNED: tl.constexpr):
    """The other channel of the pair that is turned together."""
    return tl.where(column < TURNED // 2, column + TURNED // 2, column - TURNED // 2)


@triton.jit
def _factors(weight, cos, sin, column, inside, TURNED: tl.constexpr):
    """What a channel and the other channel of its pair are multiplied by: the same for every head.

    ``cos`` and ``sin`` point to the row's tables; with TURNED 0 the second factor means nothing.
    """
    direct = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    across = direct
    if TURNED > 0:
        turns = column < TURNED
        sine = tl.load(sin + column, mask=turns, other=0.0).to(tl.float32)
        across = tl.load(weight + _pair(column, TURNED), mask=turns, other=0.0).to(tl.float32)
        across *= tl.where(column < TURNED // 2, -sine, sine)
        direct *= tl.load(cos + column, mask=turns, other=1.0).to(tl.float32)
    return direct, across


@triton.jit
def _turned(x, pair, direct, across, WIDTH: tl.constexpr, TURNED: tl.constexpr, EPS: tl.constexpr):
    """Norm and turn heads."""
    x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + EPS)[:, None]
    y = x * direct
    if TURNED > 0:
        y += pair.to(tl.float32) * across
    return y * inverse


@triton.jit
def qk_norm_rope_kernel(
    qkv, q_weight, k_weight, cos, sin, query, key,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr, EPS: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, ceil(HEADS / (TILE * TILES))); COLUMNS is WIDTH up to a power of two.

    qkv [rows, 3 * HEADS * WIDTH] with row stride STRIDE, weights [WIDTH], cos and sin [rows, TURNED], or
    none with TURNED 0; query and key [rows, HEADS, WIDTH].
    """
    row = tl.program_id(0).to(tl.int64)
    # One layout for every operand: what all heads share is loaded for each head of a tile.
    column = tl.broadcast_to(tl.arange(0, COLUMNS)[None, :], (TILE, COLUMNS))
    inside = column < WIDTH
    if TURNED > 0:
        cos += row * TURNED
        sin += row * TURNED
    q_direct, q_across = _factors(q_weight, cos, sin, column, inside, TURNED)
    k_direct, k_across = _factors(k_weight, cos, sin, column, inside, TURNED)
    source = qkv + row * STRIDE
    offset = row * (HEADS * WIDTH)
    other = _pair(column, TURNED)
    turns = column < TURNED
    first = tl.program_id(1) * (TILES * TILE) + tl.arange(0, TILE)[:, None]
    # All that the program reads is asked for before anything is computed.
    xs = ()  # type: tuple[tl.tensor, ...]
    pairs = ()  # type: tuple[tl.tensor, ...]
    for tile in tl.static_range(TILES):
        head = first + tile * TILE
        mask = (head < HEADS) & inside
        for side in tl.static_range(2):
            here = source + (side * HEADS + head) * WIDTH
            xs += (tl.load(here + column, mask=mask, other=0.0),)
            if TURNED > 0:
                pairs += (tl.load(here + other, mask=mask & turns, other=0.0),)
    for tile in tl.static_range(TILES):
        head = first + tile * TILE
        mask = (head < HEADS) & inside
        for side in tl.static_range(2):
            x = xs[2 * tile + side]
            pair = pairs[2 * tile + side] if TURNED > 0 else x
            direct = q_direct if side == 0 else k_direct
            across = q_across if side == 0 else k_across
            y = _turned(x, pair, direct, across, WIDTH, TURNED, EPS)
            target = (query if side == 0 else key) + offset + head * WIDTH + column
            tl.store(target, y.to(query.dtype.element_ty), mask=mask)
