"""Operands of quantized attention from the projections.

``statistics_kernel`` reads K and V once: the sum of K, the extrema of K over each key block, the amax of V.
``reduce_kernel`` and ``key_scale_kernel`` make scales of them and the mean of K; ``quantize_kernel`` writes
Q and K, ``quantize_v_kernel`` V. Rows from ``valid`` on are padding: they may hold anything and influence
nothing; the last valid row is read in their place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from h3compile.ops.kernels.qk_rows import (
    D,
    channels,
    factors_of,
    halves_of,
    tables_of,
    turned,
    weights_of,
)

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
def _head_of(group, member, MEMBERS: tl.constexpr, ROWS: tl.constexpr):
    """The head of each of ROWS rows, two a warp, as member ``member`` of the group."""
    return (group * MEMBERS + member) * (ROWS // 2) + tl.arange(0, ROWS) // 2


@triton.jit
def _over_rows(values, KIND: tl.constexpr):
    """Maximum, minimum or sum over the two rows that a tile has of each head: [WARPS, channels]."""
    parts = values.reshape(values.shape[0] // 2, 2, values.shape[1])
    if KIND == "max":
        result = tl.max(parts, 1)
    elif KIND == "min":
        result = tl.min(parts, 1)
    else:
        result = tl.sum(parts, 1)
    return result


@triton.jit
def _store_heads(at, first, second, head, HEADS: tl.constexpr, TURNED: tl.constexpr, KIND: tl.constexpr):
    """Store what both halves of each head's rows come to at [heads, D]."""
    WARPS: tl.constexpr = first.shape[0] // 2
    first_channel, second_channel = channels(WARPS, 1, TURNED)
    head = tl.max(head.reshape(WARPS, 2), 1)[:, None]
    at += head * D
    tl.store(at + first_channel, _over_rows(first, KIND), mask=head < HEADS)
    tl.store(at + second_channel, _over_rows(second, KIND), mask=head < HEADS)


@triton.jit
def _key_statistics(
    k, weight, cos, sin, k_sum, k_extrema, group, run, runs, valid,
    HEADS: tl.constexpr, STRIDE: tl.constexpr, TURNED: tl.constexpr, EPS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sum of K over BLOCKS * BLOCK rows, its extrema over BLOCK rows."""
    PACK: tl.constexpr = 2 if k.dtype.element_ty == tl.bfloat16 else 1
    offset = tl.arange(0, ROWS) % 2
    weight_first, weight_second = weights_of(weight, ROWS, TURNED)
    heads = ()  # type: tuple[tl.tensor, ...]
    zeros = ()  # type: tuple[tl.tensor, ...]
    lowest = ()  # type: tuple[tl.tensor, ...]
    highest = ()  # type: tuple[tl.tensor, ...]
    for member in tl.static_range(MEMBERS):
        heads += (_head_of(group, member, MEMBERS, ROWS),)
        for _ in tl.static_range(2):
            zeros += (tl.zeros((ROWS, D // 2), tl.float32),)
            lowest += (tl.full((ROWS, D // 2), float("-inf"), tl.float32),)
            highest += (tl.full((ROWS, D // 2), float("inf"), tl.float32),)
    sums = zeros
    for block in range(tl.minimum(BLOCKS, tl.cdiv(valid - run * BLOCKS * BLOCK, BLOCK))):
        first_row = (run * BLOCKS + block) * BLOCK
        start = first_row + offset
        high = lowest
        low = highest
        for outer in tl.range(0, tl.minimum(BLOCK, valid - first_row), 2 * AHEAD, num_stages=STAGES):
            keys = ()  # type: tuple[tuple[tl.tensor, ...], ...]
            tables = ()  # type: tuple[tuple[tl.tensor, ...], ...]
            for ahead in tl.static_range(AHEAD):
                row = tl.minimum(start + outer + 2 * ahead, valid - 1)
                at_first, at_second = halves_of(k, row, ROWS, STRIDE, TURNED)
                for member in tl.static_range(MEMBERS):
                    column = tl.minimum(heads[member], HEADS - 1)[:, None] * (D // PACK)
                    keys += ((tl.load(at_first + column), tl.load(at_second + column)),)
                tables += (tables_of(cos, sin, row, ROWS, TURNED),)
            for ahead in tl.static_range(AHEAD):
                factors = factors_of(weight_first, weight_second, tables[ahead], TURNED)
                inside = start + outer + 2 * ahead < valid
                new_sums = ()  # type: tuple[tl.tensor, ...]
                new_high = ()  # type: tuple[tl.tensor, ...]
                new_low = ()  # type: tuple[tl.tensor, ...]
                for member in tl.static_range(MEMBERS):
                    key = keys[ahead * MEMBERS + member]
                    first, second, inverse = turned(key, factors, weight, TURNED, EPS)
                    halves = (first, second)
                    counted = tl.where(inside, inverse, 0.0)[:, None]
                    for half in tl.static_range(2):
                        y = halves[half]
                        new_sums += (sums[2 * member + half] + y * counted,)
                        y *= inverse[:, None]
                        new_high += (tl.maximum(high[2 * member + half], y),)
                        new_low += (tl.minimum(low[2 * member + half], y),)
                sums = new_sums
                high = new_high
                low = new_low
        if k_extrema is not None:
            at = k_extrema + (run * BLOCKS + block).to(tl.int64) * (HEADS * D)
            at_low = at + runs.to(tl.int64) * (BLOCKS * HEADS * D)
            for member in tl.static_range(MEMBERS):
                head = heads[member]
                _store_heads(at, high[2 * member], high[2 * member + 1], head, HEADS, TURNED, "max")
                _store_heads(at_low, low[2 * member], low[2 * member + 1], head, HEADS, TURNED, "min")
    if k_sum is not None:
        at = k_sum + run.to(tl.int64) * (HEADS * D)
        for member in tl.static_range(MEMBERS):
            _store_heads(at, sums[2 * member], sums[2 * member + 1], heads[member], HEADS, TURNED, "sum")


@triton.jit
def _value_statistics(
    v, v_amax, group, run, valid,
    HEADS: tl.constexpr, STRIDE: tl.constexpr, RUN: tl.constexpr,
    MEMBERS: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Amax of V over RUN rows."""
    PACK: tl.constexpr = 2 if v.dtype.element_ty == tl.bfloat16 else 1
    KIND: tl.constexpr = tl.uint32 if PACK == 2 else tl.float32
    WARPS: tl.constexpr = ROWS // 2
    start = run * RUN + tl.arange(0, ROWS) % 2
    if PACK == 2:
        v = v.to(tl.pointer_type(tl.uint32), bitcast=True)
    v += tl.arange(0, D // PACK)[None, :]
    for member in tl.static_range(MEMBERS):
        head = _head_of(group, member, MEMBERS, ROWS)
        column = tl.minimum(head, HEADS - 1)[:, None] * (D // PACK)
        low = tl.zeros((ROWS, D // PACK), KIND)
        high = low
        for outer in range(0, tl.minimum(RUN, valid - run * RUN), 2 * AHEAD):
            values = ()  # type: tuple[tl.tensor, ...]
            for ahead in tl.static_range(AHEAD):
                row = tl.minimum(start + outer + 2 * ahead, valid - 1)
                values += (tl.load(v + row.to(tl.int64)[:, None] * (STRIDE // PACK) + column),)
            for ahead in tl.static_range(AHEAD):
                if PACK == 2:
                    # Magnitudes are ordered as integers are. A shift takes the sign of either half away; the
                    # lower half is lesser digits of the upper one, and is dropped in the end.
                    low = tl.maximum(low, values[ahead] << 17)
                    high = tl.maximum(high, values[ahead] << 1)
                else:
                    high = tl.maximum(high, tl.abs(values[ahead].to(tl.float32)))
        largest = _over_rows(high, "max")
        if PACK == 2:
            lower = (_over_rows(low, "max") >> 1).to(tl.float32, bitcast=True)
            largest = tl.interleave(lower, ((largest >> 1) & 0xFFFF0000).to(tl.float32, bitcast=True))
        head = tl.max(head.reshape(WARPS, 2), 1)[:, None]
        at = v_amax + run.to(tl.int64) * (HEADS * D) + head * D + tl.arange(0, D)[None, :]
        tl.store(at, largest, mask=head < HEADS)


@triton.jit
def statistics_kernel(
    k, v, k_weight, cos, sin, k_sum, k_extrema, v_amax, valid,
    HEADS: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, TURNED: tl.constexpr,
    EPS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, MEMBERS: tl.constexpr, WARPS: tl.constexpr,
    STAGES: tl.constexpr, K_AHEAD: tl.constexpr, V_AHEAD: tl.constexpr,
):  # fmt: skip
    """Sum of K and amax of V over runs of BLOCKS * BLOCK rows, extrema of K over BLOCK rows.

    k_sum and v_amax FP32 [runs, heads, D]; k_extrema FP32 [2, runs * BLOCKS, heads, D], maxima first. A
    warp, one of WARPS, has MEMBERS heads of its own, two rows of each at a time: warps exchange nothing, and
    the rows of the tables, which are the same for all, come from the L1 cache after the first.
    Grid (parts * ceil(heads / (MEMBERS * WARPS)), runs): the even programs take K and the odd ones V, which
    keeps the memory busy while the others compute; with neither sums nor extrema there is only V.
    """
    KEYS: tl.constexpr = k_sum is not None or k_extrema is not None
    run = tl.program_id(1)
    if KEYS:
        group = tl.program_id(0) // 2
        of_keys = tl.program_id(0) % 2 == 0
    else:
        group = tl.program_id(0)
        of_keys = False
    if of_keys:
        _key_statistics(
            k, k_weight, cos, sin, k_sum, k_extrema, group, run, tl.num_programs(1), valid,
            HEADS, K_STRIDE, TURNED, EPS, BLOCKS, BLOCK, MEMBERS, 2 * WARPS, K_AHEAD, STAGES,
        )  # fmt: skip
    else:
        _value_statistics(
            v, v_amax, group, run, valid,
            HEADS, V_STRIDE, BLOCKS * BLOCK, MEMBERS, 2 * WARPS, V_AHEAD,
        )  # fmt: skip


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
def _of_head(at_first, at_second, scales, member, blocks, row, BLOCK: tl.constexpr, GIVEN: tl.constexpr):
    """Both halves of a head's rows and, if given, their scale."""
    PACK: tl.constexpr = 2 if at_first.dtype.element_ty == tl.uint32 else 1
    at = member * (D // PACK)
    parts = (tl.load(at_first + at), tl.load(at_second + at))  # type: tuple[tl.tensor, ...]
    if GIVEN:
        parts += (tl.load(scales + member * blocks + row // BLOCK),)
    return parts


@triton.jit
def _store_rows(at, first, second, factor, inside, TURNED: tl.constexpr):
    """Store both halves of rows, times a factor a row, in the eight bits of ``at``."""
    INT8: tl.constexpr = at.dtype.element_ty == tl.int8
    first_channel, second_channel = channels(first.shape[0], 1, TURNED)
    tl.store(at + first_channel, _eight_bits(first * factor[:, None], INT8), mask=inside)
    tl.store(at + second_channel, _eight_bits(second * factor[:, None], INT8), mask=inside)


@triton.jit
def quantize_kernel(
    x, weight, cos, sin, shift, values, scales, rows, valid,
    STRIDE: tl.constexpr, TURNED: tl.constexpr, EPS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, GIVEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """values [heads, rows, D] in eight bits; grid (heads / GROUP, ceil(rows / ROWS)).

    BLOCK rows have one of the scales FP32 [heads, ceil(rows / BLOCK)]: they are read if GIVEN, else written,
    where BLOCK is 1 or ROWS. What is read of a head is requested AHEAD heads before it is computed.
    """
    tl.static_assert(GIVEN or BLOCK == 1 or BLOCK == ROWS, "a program holds one block, or is given its scale")
    HELD: tl.constexpr = not GIVEN and BLOCK > 1
    LARGEST: tl.constexpr = INT8_MAX if values.dtype.element_ty == tl.int8 else E4M3_MAX
    group = tl.program_id(0) * GROUP
    index = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.maximum(tl.minimum(index, valid - 1), 0)
    at_first, at_second = halves_of(x + group * D, row, ROWS, STRIDE, TURNED)
    blocks = tl.cdiv(rows, BLOCK)
    scales += group.to(tl.int64) * blocks
    xs = ()  # type: tuple[tuple[tl.tensor, ...], ...]
    for member in tl.static_range(GROUP):
        if member < AHEAD:
            xs += (_of_head(at_first, at_second, scales, member, blocks, row, BLOCK, GIVEN),)
    weight_first, weight_second = weights_of(weight, ROWS, TURNED)
    factors = factors_of(weight_first, weight_second, tables_of(cos, sin, row, ROWS, TURNED), TURNED)
    first_channel, second_channel = channels(ROWS, 1, TURNED)
    inside = (index < rows)[:, None]
    target = values + (group.to(tl.int64) * rows + index)[:, None] * D
    made = ()  # type: tuple[tl.tensor, ...]
    held = ()  # type: tuple[tuple[tl.tensor, ...], ...]
    for member in tl.static_range(GROUP):
        if member + AHEAD < GROUP:
            xs += (_of_head(at_first, at_second, scales, member + AHEAD, blocks, row, BLOCK, GIVEN),)
        first, second, inverse = turned(xs[member], factors, weight, TURNED, EPS)
        inverse = tl.where(index < valid, inverse, 0.0)
        if shift is not None:
            # Padding, which becomes the shift, is zeroed below.
            at = shift + (group + member) * D
            first = first * inverse[:, None] + tl.load(at + first_channel)
            second = second * inverse[:, None] + tl.load(at + second_channel)
            inverse = tl.where(index < valid, 1.0, 0.0)
        if GIVEN:
            factor = inverse * _reciprocal(xs[member][2])
            _store_rows(target + member * rows * D, first, second, factor, inside, TURNED)
        else:
            scale = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1) * inverse
            scale = tl.maximum(scale, SMALLEST_AMAX) * (1 / LARGEST)
            made += (scale,)
            if HELD:
                held += ((first, second, inverse),)
            else:
                factor = inverse * _reciprocal(scale)
                _store_rows(target + member * rows * D, first, second, factor, inside, TURNED)
    if not GIVEN:
        # Of all heads at once: an exchange between threads for every head would hold each of them up.
        SIZE: tl.constexpr = triton.next_power_of_2(GROUP)
        for _ in tl.static_range(GROUP, SIZE):
            made += (made[0],)
        members = tl.arange(0, SIZE)
        side_by_side = _side_by_side(made)
        if HELD:
            block_scales = tl.max(side_by_side, 0)
            tl.store(scales + members * blocks + tl.program_id(1), block_scales, mask=members < GROUP)
            for member in tl.static_range(GROUP):
                scale = tl.sum(tl.where(members == member, block_scales, 0.0), 0)
                first, second, inverse = held[member]
                factor = inverse * _reciprocal(scale)
                _store_rows(target + member * rows * D, first, second, factor, inside, TURNED)
        else:
            at = scales + members[None, :] * rows + index[:, None]
            tl.store(at, side_by_side, mask=inside & (members < GROUP)[None, :])


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
