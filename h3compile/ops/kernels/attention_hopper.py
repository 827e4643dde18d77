"""SAGE attention for sm_90a, written in Gluon: three warpgroups share every tile of keys and values.

A program instance owns 192 query rows of one head, 64 for each of its warpgroups, which keep their scores and
accumulators in registers (168 a thread, all there are) and read K and V from rings in shared memory that the
first of them fills. Each does scores, exponentials and weighted values of a tile one after the other; the
three drift apart, so that the tensor cores work for one while another computes exponentials. A tile is
fetched from L2 once for 192 rows: with one program for every 64 rows, L2 is what bounds the speed.
Arithmetic, operands and what is skipped are those of attention.sage_kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from h3compile.ops.kernels.attention import INT_BIAS, INT_BIAS_BITS, P_SHIFT, SCALE, D

TILE: gl.constexpr = gl.constexpr(128)  # keys
ROWS: gl.constexpr = gl.constexpr(64)  # query rows of a warpgroup
PARTS: gl.constexpr = gl.constexpr(3)  # warpgroups
# A tile is copied when the tile this far behind is used up: by then every warpgroup should be past it.
LAG: gl.constexpr = gl.constexpr(2)
TILE_BYTES: gl.constexpr = gl.constexpr(128 * 128)

TILED: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
BARRIER: gl.constexpr = gl.constexpr(mbarrier.MBarrierLayout())
# Scores and accumulators of a warpgroup, their rows, and probabilities as an operand.
SCORES: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
LANES: gl.constexpr = gl.constexpr(gl.SliceLayout(1, SCORES.value))
WEIGHTS: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, SCORES.value, 4))
# Four partial sums a row, one in each thread of a quad.
SUMS: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
)
SUM_LANES: gl.constexpr = gl.constexpr(gl.SliceLayout(1, SUMS.value))
STORED: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def _copy_tile(desc, buffers, full, empty, row, column, tile, STAGES: gl.constexpr):
    """Copy ``tile`` once its place in the ring is free; the first pass over the ring finds it so."""
    slot = tile % STAGES
    mbarrier.wait(empty.index(slot), (tile // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(slot), TILE_BYTES)
    tma.async_copy_global_to_shared(desc, [row, column], full.index(slot), buffers.index(slot))


@gluon.jit
def _copy(k_desc, v_desc, k_buffers, v_buffers, k_full, k_empty, v_full, v_empty, tile, STAGES: gl.constexpr):
    _copy_tile(k_desc, k_buffers, k_full, k_empty, tile * TILE, 0, tile, STAGES)
    _copy_tile(v_desc, v_buffers, v_full, v_empty, 0, tile * TILE, tile, STAGES)


@gluon.jit
def _scores(q, k, INT8: gl.constexpr):
    """q k^T; for INT8 as floats that are INT_BIAS too large, which spares the conversions."""
    if INT8:
        start = gl.full((ROWS, TILE), INT_BIAS_BITS, gl.int32, SCORES)
        scores = warpgroup_mma(q, k.permute((1, 0)), start, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores]).to(gl.float32, bitcast=True)
    else:
        start = gl.zeros((ROWS, TILE), gl.float32, SCORES)
        scores = warpgroup_mma(q, k.permute((1, 0)), start, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
    return scores


@gluon.jit
def _column_scaled(scores, k_scale, start, valid, BLOCK: gl.constexpr):
    """Scores times the scales of their key blocks."""
    parts = scores.reshape(ROWS, TILE // BLOCK, BLOCK)
    BLOCKS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, parts.type.layout))
    block = start // BLOCK + gl.arange(0, TILE // BLOCK, BLOCKS)
    scale = gl.load(k_scale + block, mask=block * BLOCK < valid, other=1.0)
    return gl.convert_layout((parts * scale[None, :, None]).reshape(ROWS, TILE), SCORES, assert_trivial=True)


@gluon.jit
def _row(x, like):
    """``x`` of every row as a column in the layout of ``like``."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def _weigh_half(scores, rate, shift, l, acc, v):
    """Add the probabilities of half a tile to the sums, and start their product with V."""
    HALF: gl.constexpr = TILE // 2
    p = gl.exp2(scores * _row(rate, scores) - _row(shift, scores))
    sums = gl.sum(gl.sum(p.reshape(ROWS, HALF // 8, 4, 2), 3), 1)
    l += gl.convert_layout(sums, SUMS, assert_trivial=True)
    # The left operand of a product with V in stored key order: no register leaves its thread.
    p = p.to(gl.float8e4nv).reshape(ROWS, HALF // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, HALF)
    weights = gl.convert_layout(p, WEIGHTS, assert_trivial=True)
    return l, warpgroup_mma(weights, v.permute((1, 0)), acc, is_async=True)


@gluon.jit
def _weigh(scores, top, m, l, acc, v, rate, BIASED: gl.constexpr):
    """One step of the online softmax: row maxima ``top`` of the scores (log2), ``rate`` scores -> log2.

    In halves: the exponentials of the second are computed while the first is multiplied.
    """
    m_new = gl.maximum(m, top)
    shift = m_new - P_SHIFT
    if BIASED:
        shift += rate * INT_BIAS
    alpha = gl.exp2(m - m_new)
    l = l * gl.convert_layout(alpha, SUM_LANES, assert_trivial=True)[:, None]
    acc = acc * alpha[:, None]
    HALF: gl.constexpr = TILE // 2
    first, second = gl.split(scores.reshape(ROWS, 2, HALF).permute(0, 2, 1))
    l, acc = _weigh_half(first, rate, shift, l, acc, v.slice(0, HALF, 1))
    l, acc = _weigh_half(second, rate, shift, l, acc, v.slice(HALF, HALF, 1))
    return m_new, l, warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _consumer(part, q_desc, k_desc, v_desc, q_buffers, k_buffers, v_buffers, q_full, k_full, k_empty,
              v_full, v_empty, q_scale, k_scale, v_scale, out, counts, rows, valid, head, first,
              LEADER: gl.constexpr, HEADS: gl.constexpr, K_BLOCK: gl.constexpr, THRESHOLD: gl.constexpr,
              STAGES: gl.constexpr):  # fmt: skip
    """Attention of 64 rows; the LEADER also copies Q, K and V."""
    SKIP: gl.constexpr = THRESHOLD > 0
    INT8: gl.constexpr = q_buffers.dtype == gl.int8
    BIASED: gl.constexpr = INT8 and K_BLOCK == TILE
    tiles = gl.cdiv(valid, TILE)
    if LEADER:
        mbarrier.expect(q_full, PARTS * ROWS * D)
        for other in gl.static_range(PARTS):
            tma.async_copy_global_to_shared(q_desc, [first + other * ROWS, 0], q_full, q_buffers.index(other))
        for tile in gl.static_range(STAGES):
            if tile < tiles:
                _copy(k_desc, v_desc, k_buffers, v_buffers, k_full, k_empty, v_full, v_empty, tile, STAGES)
    row = first + part * ROWS + gl.arange(0, ROWS, LANES)
    row_rate = gl.load(q_scale + row, mask=row < valid, other=0.0) * SCALE
    m = gl.full((ROWS,), float("-inf"), gl.float32, LANES)
    l = gl.zeros((ROWS, 4), gl.float32, SUMS)
    acc = gl.zeros((ROWS, D), gl.float32, SCORES)
    cutoff = gl.log2(THRESHOLD / valid) if SKIP else 0.0
    kept = 0
    q = q_buffers.index(part)
    mbarrier.wait(q_full, 0)
    for tile in range(tiles):
        slot = tile % STAGES
        phase = tile // STAGES & 1
        rate = row_rate
        if K_BLOCK == TILE:
            rate = row_rate * gl.load(k_scale + tile)
        mbarrier.wait(k_full.index(slot), phase)
        scores = _scores(q, k_buffers.index(slot), INT8)
        mbarrier.arrive(k_empty.index(slot))
        if LEADER:
            # Into the place of an older tile: another warpgroup that is further behind is waited for.
            if (tile >= LAG) & (tile - LAG + STAGES < tiles):
                later = tile - LAG + STAGES
                _copy(k_desc, v_desc, k_buffers, v_buffers, k_full, k_empty, v_full, v_empty, later, STAGES)
        if K_BLOCK < TILE:
            if INT8:
                scores -= INT_BIAS
            scores = _column_scaled(scores, k_scale, tile * TILE, valid, K_BLOCK)
        if (tile + 1) * TILE > valid:
            key = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
            scores = gl.where((key < valid)[None, :], scores, float("-inf"))
        if SKIP:
            # Every thread tests maxima of its own, which need not wait for those of the row, against what a
            # row must reach; one instruction tells whether any thread of a warp keeps the tile. The first
            # tile is never dropped: nothing is below minus infinity.
            tops = gl.max(gl.max(scores.reshape(ROWS, TILE // 8, 4, 2), 3), 1)
            tops = gl.convert_layout(tops, SUMS, assert_trivial=True)
            if BIASED:
                tops -= INT_BIAS
            tops *= gl.convert_layout(rate, SUM_LANES, assert_trivial=True)[:, None]
            top = gl.convert_layout(gl.max(tops, 1), LANES, assert_trivial=True)
            least = gl.where(row < valid, m + cutoff, float("inf"))
            least = gl.convert_layout(least, SUM_LANES, assert_trivial=True)[:, None]
            keep = gl.max((tops >= least).to(gl.int32).reshape(ROWS * 4), 0)
            mbarrier.wait(v_full.index(slot), phase)
            if keep != 0:
                m, l, acc = _weigh(scores, top, m, l, acc, v_buffers.index(slot), rate, BIASED)
            kept += keep
        else:
            top = gl.max(scores, 1)
            if BIASED:
                top -= INT_BIAS
            top *= rate
            mbarrier.wait(v_full.index(slot), phase)
            m, l, acc = _weigh(scores, top, m, l, acc, v_buffers.index(slot), rate, BIASED)
        mbarrier.arrive(v_empty.index(slot))

    channel = gl.load(v_scale + gl.arange(0, D, gl.SliceLayout(0, SCORES)))
    total = gl.convert_layout(gl.sum(l, 1), LANES, assert_trivial=True)
    result = (acc * (1.0 / total)[:, None] * channel[None, :]).to(out.dtype.element_ty)
    result = gl.convert_layout(result, STORED)
    row = first + part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
    column = gl.arange(0, D, gl.SliceLayout(0, STORED))
    result = gl.where((row < valid)[:, None], result, gl.zeros_like(result))
    target = out + (row.to(gl.int64)[:, None] * HEADS + head) * D + column[None, :]
    gl.store(target, result, mask=(row < rows)[:, None])
    if SKIP:
        if first + part * ROWS < valid:
            gl.atomic_add(counts, tiles - kept)
            gl.atomic_add(counts + 1, tiles)


@gluon.jit
def sage_hopper_kernel(
    q, q_scale, k, k_scale, v, v_scale, out, counts, rows, valid,
    HEADS: gl.constexpr, K_BLOCK: gl.constexpr, THRESHOLD: gl.constexpr,
    Q_TILE: gl.constexpr, K_TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As attention.sage_kernel; Q_TILE is 192 and K_TILE 128, 4 warps (of the first warpgroup)."""
    gl.static_assert(Q_TILE == PARTS * ROWS)
    gl.static_assert(K_TILE == TILE)
    head = gl.program_id(1)
    first = gl.program_id(0) * Q_TILE
    if first >= valid:
        for part in gl.static_range(PARTS):
            row = first + part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
            column = gl.arange(0, D, gl.SliceLayout(0, STORED))
            target = out + (row.to(gl.int64)[:, None] * HEADS + head) * D + column[None, :]
            zeros = gl.zeros((ROWS, D), out.dtype.element_ty, STORED)
            gl.store(target, zeros, mask=(row < rows)[:, None])
    else:
        base = head.to(gl.int64) * rows
        padded = gl.cdiv(rows, TILE) * TILE
        values = v + head.to(gl.int64) * D * padded
        q_desc = tma.make_tensor_descriptor(q + base * D, [valid, D], [D, 1], [ROWS, D], TILED)
        k_desc = tma.make_tensor_descriptor(k + base * D, [valid, D], [D, 1], [TILE, D], TILED)
        v_desc = tma.make_tensor_descriptor(values, [D, padded], [padded, 1], [D, TILE], TILED)
        q_buffers = gl.allocate_shared_memory(q.dtype.element_ty, [PARTS, ROWS, D], TILED)
        k_buffers = gl.allocate_shared_memory(k.dtype.element_ty, [STAGES, TILE, D], TILED)
        v_buffers = gl.allocate_shared_memory(v.dtype.element_ty, [STAGES, D, TILE], TILED)
        q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        mbarrier.init(q_full, 1)
        for slot in gl.static_range(STAGES):
            mbarrier.init(k_full.index(slot), 1)
            mbarrier.init(k_empty.index(slot), PARTS)
            mbarrier.init(v_full.index(slot), 1)
            mbarrier.init(v_empty.index(slot), PARTS)
        q_scales = q_scale + base
        k_scales = k_scale + head.to(gl.int64) * gl.cdiv(rows, K_BLOCK)
        v_scales = v_scale + head * D
        gl.warp_specialize(
            [
                (_consumer, (0, q_desc, k_desc, v_desc, q_buffers, k_buffers, v_buffers,
                             q_full, k_full, k_empty, v_full, v_empty,
                             q_scales, k_scales, v_scales, out, counts, rows, valid, head, first,
                             True, HEADS, K_BLOCK, THRESHOLD, STAGES)),
                (_consumer, (1, q_desc, k_desc, v_desc, q_buffers, k_buffers, v_buffers,
                             q_full, k_full, k_empty, v_full, v_empty,
                             q_scales, k_scales, v_scales, out, counts, rows, valid, head, first,
                             False, HEADS, K_BLOCK, THRESHOLD, STAGES)),
                (_consumer, (2, q_desc, k_desc, v_desc, q_buffers, k_buffers, v_buffers,
                             q_full, k_full, k_empty, v_full, v_empty,
                             q_scales, k_scales, v_scales, out, counts, rows, valid, head, first,
                             False, HEADS, K_BLOCK, THRESHOLD, STAGES)),
            ],
            [4, 4],
            [168, 168],
        )  # fmt: skip
