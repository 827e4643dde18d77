"""Operands of quantized attention from the projections.

``statistics_kernel`` reads K and V once: the sum of K, the extrema of K over each key block, the amax of V.
``reduce_kernel`` and ``key_scale_kernel`` make scales of them and the mean of K; ``quantize_kernel`` writes
Q and K, ``quantize_v_kernel`` V. Rows from ``valid`` on are padding: they may hold anything and influence
nothing; the last valid row is read in their place. Inputs are [rows, heads, D] with row strides; without a
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
def _places(x, row, STRIDE: tl.constexpr, ROWS: tl.constexpr, PAIR: tl.constexpr, TURNED: tl.constexpr):
    """Where the channels of ``row`` lie, or those of their pairs: two of BF16 in one word."""
    PACK: tl.constexpr = 2 if x.dtype.element_ty == tl.bfloat16 else 1
    place = tl.broadcast_to(tl.arange(0, D // PACK)[None, :], (ROWS, D // PACK))
    if PAIR:
        place = _pair(place, TURNED // PACK)
    if PACK == 2:
        x = x.to(tl.pointer_type(tl.uint32), bitcast=True)
    return x + row.to(tl.int64)[:, None] * (STRIDE // PACK) + place


@triton.jit
def _wide(values):
    """In FP32; halves of a word cost a shift and a mask, where 16-bit values take three instructions."""
    if values.dtype == tl.uint32:
        low = (values << 16).to(tl.float32, bitcast=True)
        high = (values & 0xFFFF0000).to(tl.float32, bitcast=True)
        values = tl.interleave(low, high)
    return values.to(tl.float32)


@triton.jit
def _weights(weight, row, TURNED: tl.constexpr):
    """The norm's weight of each channel, and the signed one of the other channel of its pair."""
    ROWS: tl.constexpr = row.shape[0]
    channel = tl.broadcast_to(tl.arange(0, D)[None, :], (ROWS, D))
    own = tl.full((ROWS, D), 1.0, tl.float32)
    across = own
    if weight is not None:
        own = _wide(tl.load(_places(weight, row, 0, ROWS, False, TURNED)))
        across = _wide(tl.load(_places(weight, row, 0, ROWS, True, TURNED)))
    return own, tl.where(channel < TURNED // 2, -across, across)


@triton.jit
def _table(table, row, OUTSIDE: tl.constexpr, TURNED: tl.constexpr):
    ROWS: tl.constexpr = row.shape[0]
    PACK: tl.constexpr = 2 if table.dtype.element_ty == tl.bfloat16 else 1
    turns = (tl.arange(0, D // PACK) < TURNED // PACK)[None, :]
    # What stands for a table outside of it: a word of two ones, or of zeros.
    other = (0x3F803F80 if PACK == 2 else 1) * OUTSIDE
    return _wide(tl.load(_places(table, row, TURNED, ROWS, False, TURNED), mask=turns, other=other))


@triton.jit
def _factors(own, across, cos, sin, row, TURNED: tl.constexpr):
    """What a channel and the other of its pair are multiplied by in ``row``, which is alike for all heads."""
    if TURNED > 0:
        own = own * _table(cos, row, 1, TURNED)
        across = across * _table(sin, row, 0, TURNED)
    return own, across


@triton.jit
def _turned(x, other, own, across, weight, TURNED: tl.constexpr, EPS: tl.constexpr):
    """Rows of a head in FP32 before the norm's factor, and this factor."""
    x = _wide(x)
    y = x * own
    if TURNED > 0:
        y += _wide(other) * across
    if weight is not None:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / D + EPS)
    else:
        inverse = tl.full((x.shape[0],), 1.0, tl.float32)
    return y, inverse


@triton.jit
def _reciprocal(x):
    """1 / x for a positive x that is no denormal, in two instructions."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _eight_bits(y, INT8: tl.constexpr):
    """y as E4M3, or as INT8 rounded to nearest, ties to even."""
    if INT8:
        values = (y + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        values = y.to(tl.float8e4nv)
    return values


@triton.jit
def _key_statistics(
    k, weight, cos, sin, k_sum, k_extrema, head, run, runs, valid,
    HEADS: tl.constexpr, STRIDE: tl.constexpr, TURNED: tl.constexpr, EPS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Sum of K over BLOCKS * BLOCK rows, its extrema over BLOCK rows."""
    offset = tl.arange(0, STEP)
    line = tl.arange(0, D)
    total = tl.zeros((STEP, D), tl.float32)
    own_weight, across_weight = _weights(weight, offset, TURNED)
    for block in range(BLOCKS):
        first = (run * BLOCKS + block) * BLOCK
        high = tl.full((STEP, D), float("-inf"), tl.float32)
        low = tl.full((STEP, D), float("inf"), tl.float32)
        for outer in range(0, BLOCK, STEP * AHEAD):
            keys = ()  # type: tuple[tl.tensor, ...]
            pairs = ()  # type: tuple[tl.tensor, ...]
            for ahead in tl.static_range(AHEAD):
                row = tl.minimum(first + outer + ahead * STEP + offset, valid - 1)
                keys += (tl.load(_places(k, row, STRIDE, STEP, False, TURNED)),)
                if TURNED > 0:
                    pairs += (tl.load(_places(k, row, STRIDE, STEP, True, TURNED)),)
            for ahead in tl.static_range(AHEAD):
                index = first + outer + ahead * STEP + offset
                own, across = _factors(
                    own_weight, across_weight, cos, sin, tl.minimum(index, valid - 1), TURNED
                )
                pair = pairs[ahead] if TURNED > 0 else None
                y, inverse = _turned(keys[ahead], pair, own, across, weight, TURNED, EPS)
                if k_sum is not None:
                    total += y * tl.where(index < valid, inverse, 0.0)[:, None]
                if k_extrema is not None:
                    y *= inverse[:, None]
                    high = tl.maximum(high, y)
                    low = tl.minimum(low, y)
        if k_extrema is not None:
            at = k_extrema + ((run * BLOCKS + block).to(tl.int64) * HEADS + head) * D + line
            tl.store(at, tl.max(high, 0))
            tl.store(at + runs.to(tl.int64) * BLOCKS * HEADS * D, tl.min(low, 0))
    if k_sum is not None:
        tl.store(k_sum + (run.to(tl.int64) * HEADS + head) * D + line, tl.sum(total, 0))


@triton.jit
def statistics_kernel(
    k, v, k_weight, cos, sin, k_sum, k_extrema, v_amax, valid,
    HEADS: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, TURNED: tl.constexpr,
    EPS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    K_AHEAD: tl.constexpr, V_AHEAD: tl.constexpr,
):  # fmt: skip
    """Sum of K and amax of V over runs of BLOCKS * BLOCK rows, extrema of K over BLOCK rows.

    k_sum and v_amax FP32 [runs, heads, D]; k_extrema FP32 [2, runs * BLOCKS, heads, D], maxima first.
    Grid (parts * heads, runs): the even programs take K and the odd ones V, which keeps the memory busy while
    the others compute; with neither sums nor extrema there is only V.
    """
    KEYS: tl.constexpr = k_sum is not None or k_extrema is not None
    run = tl.program_id(1)
    offset = tl.arange(0, STEP)
    if KEYS:
        head = tl.program_id(0) // 2
        of_keys = tl.program_id(0) % 2 == 0
    else:
        head = tl.program_id(0)
        of_keys = False
    if of_keys:
        _key_statistics(
            k + head * D, k_weight, cos, sin, k_sum, k_extrema, head, run, tl.num_programs(1), valid,
            HEADS, K_STRIDE, TURNED, EPS, BLOCKS, BLOCK, STEP, K_AHEAD,
        )  # fmt: skip
    else:
        largest = tl.zeros((STEP, D), tl.float32)
        for start in range(0, BLOCKS * BLOCK, STEP * V_AHEAD):
            values = ()  # type: tuple[tl.tensor, ...]
            for ahead in tl.static_range(V_AHEAD):
                row = tl.minimum(run * BLOCKS * BLOCK + start + ahead * STEP + offset, valid - 1)
                values += (tl.load(_places(v + head * D, row, V_STRIDE, STEP, False, TURNED)),)
            for ahead in tl.static_range(V_AHEAD):
                largest = tl.maximum(largest, tl.abs(_wide(values[ahead])))
        place = (run.to(tl.int64) * HEADS + head) * D + tl.arange(0, D)
        tl.store(v_amax + place, tl.max(largest, 0))


@triton.jit
def reduce_kernel(
    k_sum, v_amax, k_shift, v_scale, runs, valid,
    HEADS: tl.constexpr, RUNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Minus the mean of K, and the scale of V, FP32 [heads, D]; grid (heads * D / CHANNELS,)."""
    place = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros((RUNS, CHANNELS), tl.float32)
    largest = tl.zeros((RUNS, CHANNELS), tl.float32)
    for start in range(0, runs, RUNS):
        run = start + tl.arange(0, RUNS)
        at = run.to(tl.int64)[:, None] * (HEADS * D) + place[None, :]
        ok = (run < runs)[:, None]
        largest = tl.maximum(largest, tl.load(v_amax + at, mask=ok, other=0.0))
        if k_sum is not None:
            total += tl.load(k_sum + at, mask=ok, other=0.0)
    if k_sum is not None:
        tl.store(k_shift + place, -tl.sum(total, 0) / valid)
    amax = tl.maximum(tl.max(largest, 0), SMALLEST_AMAX)
    tl.store(v_scale + place, amax / E4M3_MAX)


@triton.jit
def key_scale_kernel(
    k_extrema, k_shift, scales, blocks, stored, valid,
    HEADS: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Scales of K, FP32 [heads, blocks], from ``stored`` extrema; grid (heads, ceil(blocks / COUNT))."""
    head = tl.program_id(0)
    block = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    ok = block * BLOCK < valid
    channel = tl.arange(0, D)
    at = k_extrema + (block.to(tl.int64)[:, None] * HEADS + head) * D + channel[None, :]
    high = tl.load(at, mask=ok[:, None], other=0.0)
    low = tl.load(at + stored.to(tl.int64) * HEADS * D, mask=ok[:, None], other=0.0)
    if k_shift is not None:
        shift = tl.load(k_shift + head * D + channel)[None, :]
        high += shift
        low += shift
    amax = tl.where(ok, tl.max(tl.maximum(high, -low), 1), 0.0)
    amax = tl.maximum(amax, SMALLEST_AMAX)
    tl.store(scales + head.to(tl.int64) * blocks + block, amax / LARGEST, mask=block < blocks)


@triton.jit
def _joined(parts):
    """Columns [ROWS, n] of the first and the second half, alternating: [ROWS, 2 * n]."""
    HALF: tl.constexpr = len(parts) // 2
    joined = ()  # type: tuple[tl.tensor, ...]
    for number in tl.static_range(HALF):
        pair = tl.join(parts[number], parts[number + HALF])
        joined += (pair.reshape(pair.shape[0], pair.numel // pair.shape[0]),)
    return joined


@triton.jit
def _side_by_side(parts):
    """Vectors [ROWS], a power of two of them, as [ROWS, number], without an exchange between threads."""
    columns = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(len(parts)):
        columns += (parts[part][:, None],)
    for _ in tl.static_range(len(parts).bit_length() - 1):
        columns = _joined(columns)
    return columns[0]


@triton.jit
def quantize_kernel(
    x, weight, cos, sin, shift, values, scales, rows, valid,
    STRIDE: tl.constexpr, TURNED: tl.constexpr, EPS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, GIVEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """values [heads, rows, D] in eight bits; grid (heads / GROUP, ceil(rows / ROWS)).

    BLOCK rows have one of the scales FP32 [heads, ceil(rows / BLOCK)]: they are read if GIVEN, else written,
    where BLOCK is 1 or ROWS.
    """
    tl.static_assert(GIVEN or BLOCK == 1 or BLOCK == ROWS, "a program holds one block, or is given its scale")
    INT8: tl.constexpr = values.dtype.element_ty == tl.int8
    LARGEST: tl.constexpr = INT8_MAX if INT8 else E4M3_MAX
    PACK: tl.constexpr = 2 if x.dtype.element_ty == tl.bfloat16 else 1
    WRITTEN: tl.constexpr = triton.next_power_of_2(GROUP)
    group = tl.program_id(0) * GROUP
    channel = tl.arange(0, D)[None, :]
    index = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.maximum(tl.minimum(index, valid - 1), 0)
    x += group * D
    at = _places(x, row, STRIDE, ROWS, False, TURNED)
    at_pair = _places(x, row, STRIDE, ROWS, True, TURNED)
    xs = ()  # type: tuple[tl.tensor, ...]
    pairs = ()  # type: tuple[tl.tensor, ...]
    for member in tl.static_range(GROUP):
        if member < AHEAD:
            xs += (tl.load(at + member * (D // PACK)),)
            if TURNED > 0:
                pairs += (tl.load(at_pair + member * (D // PACK)),)
    own, across = _weights(weight, row, TURNED)
    own, across = _factors(own, across, cos, sin, row, TURNED)
    blocks = tl.cdiv(rows, BLOCK)
    inside = index < rows
    target = values + (group.to(tl.int64) * rows + index)[:, None] * D + channel
    scales += group.to(tl.int64) * blocks
    written = ()  # type: tuple[tl.tensor, ...]
    for member in tl.static_range(GROUP):
        if member + AHEAD < GROUP:
            xs += (tl.load(at + (member + AHEAD) * (D // PACK)),)
            if TURNED > 0:
                pairs += (tl.load(at_pair + (member + AHEAD) * (D // PACK)),)
        pair = pairs[member] if TURNED > 0 else None
        y, inverse = _turned(xs[member], pair, own, across, weight, TURNED, EPS)
        inverse = tl.where(index < valid, inverse, 0.0)
        if shift is not None:
            # Padding, which becomes the shift, is zeroed below.
            y = y * inverse[:, None] + tl.load(shift + (group + member) * D + channel)
            inverse = tl.where(index < valid, 1.0, 0.0)
        if GIVEN:
            factor = _reciprocal(tl.load(scales + member * blocks + row // BLOCK))
        else:
            amax = tl.max(tl.abs(y), 1) * inverse
            if BLOCK > 1:
                amax = tl.max(amax, 0)
            scale = tl.maximum(amax, SMALLEST_AMAX) * (1 / LARGEST)
            factor = _reciprocal(scale)
            if BLOCK > 1:
                tl.store(scales + member * blocks + tl.program_id(1), scale)
            else:
                written += (scale,)
        y *= (inverse * factor)[:, None]
        tl.store(target, _eight_bits(y, INT8), mask=inside[:, None])
        target += rows * D
    if BLOCK == 1:
        # At once: this exchange between threads would hold up every head.
        for _ in tl.static_range(GROUP, WRITTEN):
            written += (written[0],)
        members = tl.arange(0, WRITTEN)[None, :]
        at = scales + members * rows + index[:, None]
        tl.store(at, _side_by_side(written), mask=inside[:, None] & (members < GROUP))


@triton.jit
def quantize_v_kernel(x, scales, values, rows, valid, STRIDE: tl.constexpr, CHANNELS: tl.constexpr):
    """values E4M3 [heads, D, ceil(rows / TILE) * TILE] in stored key order.

    Grid (D / CHANNELS, ceil(rows / TILE), heads).
    """
    head = tl.program_id(2)
    position = tl.program_id(1) * TILE + tl.arange(0, TILE)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row = stored_keys(position)
    at = x + row.to(tl.int64)[:, None] * STRIDE + head * D + channel[None, :]
    y = tl.load(at, mask=(row < valid)[:, None], other=0.0).to(tl.float32)
    inverse = 1.0 / tl.load(scales + head * D + channel)
    padded = tl.cdiv(rows, TILE) * TILE
    at = values + (head.to(tl.int64) * D + channel)[:, None] * padded + position[None, :]
    tl.store(at, _eight_bits(y * inverse[None, :], False).trans())
