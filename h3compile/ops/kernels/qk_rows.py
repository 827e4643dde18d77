"""Rows of a head of Q or K, normed and rotated, as the kernels that prepare attention read them.

A row is read in two halves: the first and the second channels of the pairs that are turned together. Inputs
are [rows, heads, D] with row strides; without a weight there is no norm, and with TURNED 0 no rotation.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["D", "channels", "factors_of", "halves_of", "tables_of", "turned", "weights_of", "wide"]

D: tl.constexpr = tl.constexpr(128)


@triton.jit
def halves_of(x, row, ROWS: tl.constexpr, STRIDE: tl.constexpr, TURNED: tl.constexpr):
    """Where the channels of ``row`` lie, first and second ones of the pairs that are turned together.

    Channels that are not turned make pairs too. Two channels of BF16 are one word.
    """
    PACK: tl.constexpr = 2 if x.dtype.element_ty == tl.bfloat16 else 1
    first, second = channels(ROWS, PACK, TURNED)
    if PACK == 2:
        x = x.to(tl.pointer_type(tl.uint32), bitcast=True)
    x += row.to(tl.int64)[:, None] * (STRIDE // PACK)
    return x + first, x + second


@triton.jit
def channels(ROWS: tl.constexpr, PACK: tl.constexpr, TURNED: tl.constexpr):
    """The first and the second channel of each pair, counted in words of PACK: [ROWS, D / 2 / PACK]."""
    HALF: tl.constexpr = D // 2 // PACK
    PAIRS: tl.constexpr = TURNED // 2 // PACK
    pair = tl.broadcast_to(tl.arange(0, HALF)[None, :], (ROWS, HALF))
    return tl.where(pair < PAIRS, pair, pair + PAIRS), tl.where(pair < PAIRS, pair + PAIRS, pair + HALF)


@triton.jit
def wide(values):
    """In FP32; halves of a word cost a shift and a mask, where 16-bit values take three instructions."""
    if values.dtype == tl.uint32:
        low = (values << 16).to(tl.float32, bitcast=True)
        high = (values & 0xFFFF0000).to(tl.float32, bitcast=True)
        values = tl.interleave(low, high)
    return values.to(tl.float32)


@triton.jit
def weights_of(weight, ROWS: tl.constexpr, TURNED: tl.constexpr):
    """The norm's weights of the firsts and the seconds."""
    if weight is not None:
        # Of ROWS rows, for loads that the threads of all rows make: one row would go through shared memory.
        at_first, at_second = halves_of(weight, tl.zeros((ROWS,), tl.int32), ROWS, 0, TURNED)
        first = wide(tl.load(at_first))
        second = wide(tl.load(at_second))
    else:
        first = tl.full((ROWS, D // 2), 1.0, tl.float32)
        second = first
    return first, second


@triton.jit
def _table(table, row, ROWS: tl.constexpr, OUTSIDE: tl.constexpr, TURNED: tl.constexpr):
    """Words of a table [rows, TURNED] for the firsts and the seconds, OUTSIDE where nothing is turned."""
    PACK: tl.constexpr = 2 if table.dtype.element_ty == tl.bfloat16 else 1
    at_first, at_second = halves_of(table, row, ROWS, TURNED, TURNED)
    turns = (tl.arange(0, D // 2 // PACK) < TURNED // 2 // PACK)[None, :]
    other = (0x3F803F80 if PACK == 2 else 1) * OUTSIDE
    first = tl.load(at_first, mask=turns, other=other)
    second = tl.load(at_second, mask=turns, other=other)
    return first, second


@triton.jit
def tables_of(cos, sin, row, ROWS: tl.constexpr, TURNED: tl.constexpr):
    """The four words of the tables for ``row``; none without rotation."""
    if TURNED > 0:
        cos_first, cos_second = _table(cos, row, ROWS, 1, TURNED)
        sin_first, sin_second = _table(sin, row, ROWS, 0, TURNED)
        words = (cos_first, cos_second, sin_first, sin_second)  # type: tuple[tl.tensor, ...]
    else:
        words = ()
    return words


@triton.jit
def factors_of(first, second, tables, TURNED: tl.constexpr):
    """What the two of a pair are multiplied by for each of them, which is alike for all heads.

    ``first`` and ``second`` are the weights of the norm. Returned are the factors of the own channel and of
    the other one for the firsts, then for the seconds.
    """
    if TURNED > 0:
        factors = (
            first * wide(tables[0]),
            -second * wide(tables[2]),
            second * wide(tables[1]),
            first * wide(tables[3]),
        )
    else:
        factors = (first, first, second, second)
    return factors


@triton.jit
def turned(halves, factors, weight, TURNED: tl.constexpr, EPS: tl.constexpr):
    """Both halves of rows of a head in FP32 before the norm's factor, and this factor.

    The halves are [..., rows, D / 2]; ``factors`` lack the leading dimension that heads have.
    """
    x = wide(halves[0])
    other = wide(halves[1])
    first = x * factors[0]
    second = other * factors[2]
    if TURNED > 0:
        first += other * factors[1]
        second += x * factors[3]
    LEADING: tl.constexpr = x.shape[:-1]
    if weight is not None:
        both = tl.join(x, other).reshape(LEADING + (D,))
        inverse = tl.rsqrt(tl.sum(both * both, len(LEADING)) / D + EPS)
    else:
        inverse = tl.full(LEADING, 1.0, tl.float32)
    return first, second, inverse
