"""Operands of quantized attention from the projections: a pass for statistics, a small reduction, a pass that quantizes.

``statistics_kernel`` sums K and takes the amax of V over runs of rows, ``reduce_kernel`` turns those partial
results into the mean of K and the scale of V, and a kernel each writes Q, K and V. Rows from ``valid`` on are
padding: they may hold anything and influence nothing. Inputs are [rows, heads, D] with row strides; without a
weight there is no norm, and with TURNED 0 no rotation.
"""

from __future__ import annotations

import triton
import triton.language as tl

D: tl.constexpr = tl.constexpr(128)
TILE: tl.constexpr = tl.constexpr(128)
SMALLEST_AMAX: tl.constexpr = tl.constexpr(1e-3)
E4M3_MAX: tl.constexpr = tl.constexpr(448.0)
INT8_MAX: tl.constexpr = tl.constexpr(127.0)
# Adding this to a float below 2^22 rounds it (ties to even) and leaves the integer in the low bits.
ROUNDER: tl.constexpr = tl.constexpr(12582912.0)


@triton.jit
def stored_keys(position):
    """Which key of its group of 16 lies at each stored position: 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15.

    This is the order in which a thread of a quad holds the columns of a score tile.
    """
    return (position & -16) | ((position >> 1) & 1) * 8 | ((position >> 2) & 3) * 2 | (position & 1)


@triton.jit
def _pair(channel, TURNED: tl.constexpr):
    """The other channel of the pair that is turned together; itself where nothing is turned."""
    other = tl.where(channel < TURNED // 2, channel + TURNED // 2, channel - TURNED // 2)
    return tl.where(channel < TURNED, other, channel)


@triton.jit
def _table(table, row, channel, ok, TURNED: tl.constexpr, OUTSIDE: tl.constexpr):
    """Cosines or sines of ``row`` at ``channel``, and what stands for them where nothing is turned."""
    at = table + row.to(tl.int64)[:, None] * TURNED + channel[None, :]
    return tl.load(at, mask=ok & (channel < TURNED)[None, :], other=OUTSIDE).to(tl.float32)


@triton.jit
def _weight(weight, channel, ROWS: tl.constexpr):
    # As many rows as there are, all alike: in the layout of what it multiplies, without an exchange.
    return tl.load(weight + tl.broadcast_to(channel[None, :], (ROWS, D))).to(tl.float32)


@triton.jit
def _prepared(
    x, head, row, valid, weight, cos, sin, STRIDE: tl.constexpr, TURNED: tl.constexpr, EPS: tl.constexpr
):  # fmt: skip
    """Rows of one head in FP32: RMS norm, then the rotation of the first TURNED channels; zero for padding."""
    channel = tl.arange(0, D)
    pair = _pair(channel, TURNED)
    ok = (row < valid)[:, None]
    base = x + row.to(tl.int64)[:, None] * STRIDE + head * D
    own = tl.load(base + channel[None, :], mask=ok, other=0.0).to(tl.float32)
    y = own
    if weight is not None:
        y = y * _weight(weight, channel, row.shape[0])
    if TURNED > 0:
        # Read again, from the cache: it lies with another thread.
        other = tl.load(base + pair[None, :], mask=ok & (channel < TURNED)[None, :], other=0.0).to(tl.float32)
        if weight is not None:
            other = other * _weight(weight, pair, row.shape[0])
        sine = _table(sin, row, channel, ok, TURNED, 0.0)
        y = y * _table(cos, row, channel, ok, TURNED, 1.0)
        y += other * tl.where((channel < TURNED // 2)[None, :], -sine, sine)
    if weight is not None:
        y = y * tl.rsqrt(tl.sum(own * own, 1) / D + EPS)[:, None]
    return y


@triton.jit
def _eight_bits(y, inverse, INT8: tl.constexpr):
    """y * inverse as E4M3, or as INT8 rounded to nearest, ties to even."""
    y = y * inverse
    if INT8:
        values = (y + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        values = y.to(tl.float8e4nv)
    return values


@triton.jit
def statistics_kernel(
    k, v, k_weight, cos, sin, k_sum, v_amax, valid,
    HEADS: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, TURNED: tl.constexpr,
    EPS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Sums of K and amax of V over runs of ROWS rows; grid (heads, runs).

    v_amax FP32 [runs, heads, D]; k_sum FP32 [2, runs, heads, D], whose sum over the first two dimensions is
    that of K: a channel adds to its own sum and, turned, to that of its pair.
    """
    head = tl.program_id(0)
    first = tl.program_id(1) * ROWS
    channel = tl.arange(0, D)
    pair = _pair(channel, TURNED)
    straight = tl.zeros((STEP, D), tl.float32)
    across = tl.zeros((STEP, D), tl.float32)
    largest = tl.zeros((STEP, D), tl.float32)
    for start in range(0, ROWS, STEP):
        row = first + start + tl.arange(0, STEP)
        ok = (row < valid)[:, None]
        place = head * D + channel[None, :]
        value = tl.load(v + row.to(tl.int64)[:, None] * V_STRIDE + place, mask=ok, other=0.0)
        largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
        if k_sum is not None:
            x = tl.load(k + row.to(tl.int64)[:, None] * K_STRIDE + place, mask=ok, other=0.0).to(tl.float32)
            if k_weight is not None:
                x = x * tl.rsqrt(tl.sum(x * x, 1) / D + EPS)[:, None]
            if TURNED > 0:
                straight += x * _table(cos, row, channel, ok, TURNED, 1.0)
                at = sin + row.to(tl.int64)[:, None] * TURNED + pair[None, :]
                across += x * tl.load(at, mask=ok & (channel < TURNED)[None, :], other=0.0).to(tl.float32)
            else:
                straight += x
    run = tl.program_id(1).to(tl.int64) * HEADS + head
    tl.store(v_amax + run * D + channel, tl.max(largest, 0))
    if k_sum is not None:
        weight = 1.0
        if k_weight is not None:
            weight = tl.load(k_weight + channel).to(tl.float32)
        tl.store(k_sum + run * D + channel, tl.sum(straight, 0) * weight)
        sign = tl.where(channel < TURNED // 2, 1.0, -1.0)
        turned = k_sum + (tl.num_programs(1).to(tl.int64) * HEADS + run) * D
        tl.store(turned + pair, tl.sum(across, 0) * weight * sign)


@triton.jit
def reduce_kernel(
    k_sum, v_amax, k_mean, v_scale, runs, valid, HEADS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Mean of K and scale of V, FP32 [heads, D], from what statistics_kernel gives; grid (heads,)."""
    head = tl.program_id(0)
    channel = tl.arange(0, D)
    total = tl.zeros((RUNS, D), tl.float32)
    largest = tl.zeros((RUNS, D), tl.float32)
    for start in range(0, runs, RUNS):
        run = start + tl.arange(0, RUNS)
        at = (run.to(tl.int64)[:, None] * HEADS + head) * D + channel[None, :]
        ok = (run < runs)[:, None]
        largest = tl.maximum(largest, tl.load(v_amax + at, mask=ok, other=0.0))
        if k_sum is not None:
            total += tl.load(k_sum + at, mask=ok, other=0.0)
            total += tl.load(k_sum + runs.to(tl.int64) * HEADS * D + at, mask=ok, other=0.0)
    if k_sum is not None:
        tl.store(k_mean + head * D + channel, tl.sum(total, 0) / valid)
    amax = tl.maximum(tl.max(largest, 0), SMALLEST_AMAX)
    tl.store(v_scale + head * D + channel, amax / E4M3_MAX)


@triton.jit
def quantize_q_kernel(
    x, weight, cos, sin, values, scales, rows, valid,
    STRIDE: tl.constexpr, TURNED: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """values [heads, rows, D] in eight bits and scales FP32 [heads, rows]; grid (heads, ceil(rows / ROWS))."""
    INT8: tl.constexpr = values.dtype.element_ty == tl.int8
    LARGEST: tl.constexpr = INT8_MAX if INT8 else E4M3_MAX
    head = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    y = _prepared(x, head, row, valid, weight, cos, sin, STRIDE, TURNED, EPS)
    scale = tl.maximum(tl.max(tl.abs(y), 1), SMALLEST_AMAX) / LARGEST
    place = head.to(tl.int64) * rows + row
    tl.store(scales + place, scale, mask=row < rows)
    at = values + place[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(at, _eight_bits(y, (1.0 / scale)[:, None], INT8), mask=(row < rows)[:, None])


@triton.jit
def quantize_k_kernel(
    x, weight, cos, sin, mean, values, scales, rows, valid,
    STRIDE: tl.constexpr, TURNED: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """values [heads, rows, D] in eight bits and scales FP32 [heads, blocks]; grid (heads, blocks).

    A block of BLOCK rows has one scale; its rows are computed STEP at a time.
    """
    INT8: tl.constexpr = values.dtype.element_ty == tl.int8
    LARGEST: tl.constexpr = INT8_MAX if INT8 else E4M3_MAX
    head = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    channel = tl.arange(0, D)
    parts = ()
    amax = SMALLEST_AMAX
    for start in tl.static_range(0, BLOCK, STEP):
        row = first + start + tl.arange(0, STEP)
        y = _prepared(x, head, row, valid, weight, cos, sin, STRIDE, TURNED, EPS)
        if mean is not None:
            y = tl.where((row < valid)[:, None], y - tl.load(mean + head * D + channel)[None, :], 0.0)
        parts = parts + (y,)
        amax = tl.maximum(amax, tl.max(tl.abs(y)))
    scale = amax / LARGEST
    tl.store(scales + head.to(tl.int64) * tl.cdiv(rows, BLOCK) + tl.program_id(1), scale)
    for start in tl.static_range(0, BLOCK, STEP):
        row = first + start + tl.arange(0, STEP)
        at = values + (head.to(tl.int64) * rows + row)[:, None] * D + channel[None, :]
        tl.store(at, _eight_bits(parts[start // STEP], 1.0 / scale, INT8), mask=(row < rows)[:, None])


@triton.jit
def quantize_v_kernel(x, scales, values, rows, valid, STRIDE: tl.constexpr, CHANNELS: tl.constexpr):
    """values E4M3 [heads, D, ceil(rows / 128) * 128] in stored key order; grid (D / CHANNELS, ceil(rows / 128), heads)."""
    head = tl.program_id(2)
    position = tl.program_id(1) * TILE + tl.arange(0, TILE)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row = stored_keys(position)
    at = x + row.to(tl.int64)[:, None] * STRIDE + head * D + channel[None, :]
    y = tl.load(at, mask=(row < valid)[:, None], other=0.0).to(tl.float32)
    inverse = 1.0 / tl.load(scales + head * D + channel)
    padded = tl.cdiv(rows, TILE) * TILE
    at = values + (head.to(tl.int64) * D + channel)[:, None] * padded + position[None, :]
    tl.store(at, _eight_bits(y, inverse[None, :], False).trans())
