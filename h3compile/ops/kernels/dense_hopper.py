"""BF16 attention for sm_90a, written in Gluon: one warp copies keys and values, the warpgroups share them.

A program instance owns Q_TILE query rows of one head, 64 for each accumulator of its warpgroups. On an H200
that works without pause, power is the limit rather than any unit, so what costs energy is spared: a tile is
fetched from L2 once for all rows, queries can stay in registers, sums of a row meet at the end, and a running
maximum is raised (and the accumulators rescaled) only when it falls behind by more than 2^8.
Each warpgroup issues the scores of a tile before it turns those of the previous one into probabilities.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

D: gl.constexpr = gl.constexpr(128)
ROWS: gl.constexpr = gl.constexpr(64)  # query rows of an accumulator
SCALE: gl.constexpr = gl.constexpr(128**-0.5 * 1.4426950408889634)
# How far (log2) scores may exceed the maximum that probabilities are relative to: they are rounded to BF16,
# whose precision does not depend on their size, and summed in FP32.
SLACK: gl.constexpr = gl.constexpr(8.0)
PRODUCER_REGISTERS: gl.constexpr = gl.constexpr(24)

TILED: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
BARRIER: gl.constexpr = gl.constexpr(mbarrier.MBarrierLayout())
ACC: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
LANES: gl.constexpr = gl.constexpr(gl.SliceLayout(1, ACC.value))
OPERAND: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
# Four partial sums a row, one in each thread of a quad.
SUMS: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
)
SUM_LANES: gl.constexpr = gl.constexpr(gl.SliceLayout(1, SUMS.value))
STORED: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


def _rescale_source() -> str:
    """The 64 accumulators of a thread (its rows alternate every two) times their factors, if any is not 1."""
    lines = [
        ".reg .pred p, q;",
        "setp.neu.f32 p, $128, 0f3F800000;",
        "setp.neu.f32 q, $130, 0f3F800000;",
        "or.pred p, p, q;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra DONE;",
        *(f"mul.rn.ftz.f32 ${i}, ${i}, ${128 + i};" for i in range(64)),
        "DONE:",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


RESCALE: gl.constexpr = gl.constexpr(_rescale_source())
RESCALE_OPERANDS: gl.constexpr = gl.constexpr(
    ",".join(["=f"] * 64 + [str(i) for i in range(64)] + ["f"] * 64)
)


@gluon.jit
def _rescaled(acc, alpha, LAZY: gl.constexpr):
    """Accumulators times a factor for each row; with LAZY a warp whose factors are all 1 does nothing."""
    if LAZY:
        factors, _ = gl.broadcast(alpha[:, None], acc)
        return gl.inline_asm_elementwise(
            RESCALE, RESCALE_OPERANDS, [acc, factors], dtype=gl.float32, is_pure=True, pack=64
        )
    else:
        return acc * alpha[:, None]


@gluon.jit
def _partial_sums(p, N: gl.constexpr):
    """Sums of P over the columns that a thread holds."""
    sums = gl.sum(gl.sum(p.reshape(ROWS, N // 8, 4, 2), 3), 1)
    return gl.convert_layout(sums, SUMS, assert_trivial=True)


@gluon.jit
def _row_lanes(x):
    return gl.convert_layout(x, LANES, assert_trivial=True)


@gluon.jit
def _first_softmax(scores, keys, N: gl.constexpr, LAYOUT: gl.constexpr):
    """P, row maxima (log2) and sums of the first tile, of whose columns ``keys`` (at least one) exist."""
    column = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    scores = gl.where((column < keys)[None, :], scores, float("-inf"))
    m = gl.max(scores, 1) * SCALE
    p = gl.exp2(scores * SCALE - m[:, None])
    return p, _row_lanes(m), _partial_sums(p, N)


@gluon.jit
def _softmax(scores, m, l, N: gl.constexpr, LAYOUT: gl.constexpr, LAZY: gl.constexpr):
    """P, row maxima, sums, and what earlier weights must be multiplied by."""
    top = _row_lanes(gl.max(scores, 1)) * SCALE
    if LAZY:
        m_new = gl.where(top > m + SLACK, top, m)
    else:
        m_new = gl.maximum(m, top)
    alpha = gl.exp2(m - m_new)
    shift = gl.convert_layout(m_new, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    p = gl.exp2(scores * SCALE - shift[:, None])
    l = l * gl.convert_layout(alpha, SUM_LANES, assert_trivial=True)[:, None] + _partial_sums(p, N)
    return p, m_new, l, alpha


@gluon.jit
def _packed(p, N: gl.constexpr):
    """P in BF16, two neighbours in an integer: a form that ptxas carries from tile to tile as it is."""
    low, high = p.reshape(ROWS, N // 2, 2).split()
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _operand(packed, N: gl.constexpr):
    """Packed P as the left operand of a product: no register leaves its thread."""
    low = packed.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (packed >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.convert_layout(gl.join(low, high).reshape(ROWS, N), OPERAND, assert_trivial=True)


@gluon.jit
def _start_scores(q, k, N: gl.constexpr, LAYOUT: gl.constexpr):
    start = gl.zeros((ROWS, N), gl.float32, LAYOUT)
    return warpgroup_mma(q, k.permute((1, 0)), start, use_acc=False, is_async=True)


@gluon.jit
def _finish(acc, l, buffer, out_desc, row, valid):
    """Write 64 rows through ``buffer``, the place in shared memory that held their queries."""
    total = _row_lanes(gl.sum(l, 1))
    result = acc * (1.0 / total)[:, None]
    there = (row + gl.arange(0, ROWS, LANES)) < valid
    result = gl.where(there[:, None], result, 0.0).to(gl.bfloat16)
    buffer.store(result)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, 0], buffer)
    tma.store_wait(0)


@gluon.jit
def _turned(acc, out, state, mine, theirs, at, column, rows, first, last, HEADS: gl.constexpr):
    """Columns from ``column`` on of `_finish_turn`, accumulators and earlier result times their factors."""
    LAYOUT: gl.constexpr = acc.type.layout
    at = gl.convert_layout(at, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    mine = gl.convert_layout(mine, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    theirs = gl.convert_layout(theirs, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    there = (at < rows)[:, None]
    columns = column + gl.arange(0, D // 2, gl.SliceLayout(0, LAYOUT))
    place = at.to(gl.int64)[:, None] * (HEADS * D) + columns[None, :]
    found = gl.load(state + place, mask=there & (first == 0), other=0.0)
    result = acc * mine[:, None] + found * theirs[:, None]
    if last != 0:
        gl.store(out + place, result.to(gl.bfloat16), mask=there)
    else:
        gl.store(state + place, result, mask=there)


@gluon.jit
def _finish_turn(acc, m, l, turn, row, HEADS: gl.constexpr):
    """Merge 64 rows with what was found before, and keep them in FP32, or after the last turn write them."""
    # Parameters of the kernel as they are: anything computed from them would hold registers all through.
    out, state, logs, rows, first, last = turn
    head = gl.program_id(1)
    out += head * D
    state += head * D
    logs += head.to(gl.int64) * rows
    at = row + gl.arange(0, ROWS, LANES)
    there = at < rows
    log = gl.load(logs + at, mask=there & (first == 0), other=float("-inf"))
    top = gl.maximum(m, log)
    mine = gl.exp2(m - top)
    theirs = gl.exp2(log - top)
    total = _row_lanes(gl.sum(l, 1)) * mine + theirs
    if last == 0:
        gl.store(logs + at, top + gl.log2(total), mask=there)
    mine = mine / total
    theirs = theirs / total
    # In two halves, because as many registers as the accumulators take are not left.
    left, right = acc.reshape(ROWS, 2, D // 2).permute(0, 2, 1).split()
    _turned(left, out, state, mine, theirs, at, 0, rows, first, last, HEADS)
    _turned(right, out, state, mine, theirs, at, D // 2, rows, first, last, HEADS)


@gluon.jit
def _producer(q_desc, k_desc, v_desc, shared, first, tiles,
              PARTS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Copy Q, then K and V in tiles, the last first: it is the one that may be incomplete."""
    q_buffers, k_buffers, v_buffers, q_full, k_full, k_empty, v_full, v_empty = shared
    mbarrier.expect(q_full, PARTS * ROWS * D * 2)
    for part in gl.static_range(PARTS):
        tma.async_copy_global_to_shared(q_desc, [first + part * ROWS, 0], q_full, q_buffers.index(part))
    for tile in range(tiles):
        slot = tile % STAGES
        # The first pass over the ring finds it free.
        free = (tile // STAGES & 1) ^ 1
        key = (tiles - 1 - tile) * N
        mbarrier.wait(k_empty.index(slot), free)
        mbarrier.expect(k_full.index(slot), N * D * 2)
        tma.async_copy_global_to_shared(k_desc, [key, 0], k_full.index(slot), k_buffers.index(slot))
        mbarrier.wait(v_empty.index(slot), free)
        mbarrier.expect(v_full.index(slot), N * D * 2)
        tma.async_copy_global_to_shared(v_desc, [key, 0], v_full.index(slot), v_buffers.index(slot))


@gluon.jit
def _consumer(part, target, shared, work, N: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
              Q_HELD: gl.constexpr, LAZY: gl.constexpr, RING_HEADS: gl.constexpr = 0):  # fmt: skip
    """Attention of 64 rows. OVERLAP: softmax while P V of the tile before is in flight.

    ``target`` is where results are written; in a ring of RING_HEADS heads what `_finish_turn` needs.
    """
    q_buffers, k_buffers, v_buffers, q_full, k_full, k_empty, v_full, v_empty = shared
    first, valid, tiles = work
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    acc = gl.zeros((ROWS, D), gl.float32, ACC)
    mbarrier.wait(q_full, 0)
    if Q_HELD:
        q = q_buffers.index(part).load(gl.DotOperandLayout(0, LAYOUT, 2))
    else:
        q = q_buffers.index(part)
    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma_wait(0, deps=[_start_scores(q, k_buffers.index(0), N, LAYOUT)])
    mbarrier.arrive(k_empty.index(0))
    p, m, l = _first_softmax(scores, valid - (tiles - 1) * N, N, LAYOUT)
    packed = _packed(p, N)
    for tile in range(1, tiles):
        slot = tile % STAGES
        phase = tile // STAGES & 1
        past = (tile - 1) % STAGES
        past_phase = (tile - 1) // STAGES & 1
        weights = _operand(packed, N)
        if OVERLAP:
            mbarrier.wait(k_full.index(slot), phase)
            scores = _start_scores(q, k_buffers.index(slot), N, LAYOUT)
            mbarrier.wait(v_full.index(past), past_phase)
            acc = warpgroup_mma(weights, v_buffers.index(past), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k_empty.index(slot))
            p, m, l, alpha = _softmax(scores, m, l, N, LAYOUT, LAZY)
            # A branch, which keeps the exponentials on this side of the next wait.
            ahead = tile + 1
            mbarrier.wait(k_full.index(ahead % STAGES), ahead // STAGES & 1, pred=ahead < tiles)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(past))
        else:
            mbarrier.wait(v_full.index(past), past_phase)
            acc = warpgroup_mma(weights, v_buffers.index(past), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(past))
            mbarrier.wait(k_full.index(slot), phase)
            scores = _start_scores(q, k_buffers.index(slot), N, LAYOUT)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(slot))
            p, m, l, alpha = _softmax(scores, m, l, N, LAYOUT, LAZY)
        # Not earlier: these registers are still being read by the product in flight.
        packed = _packed(p, N)
        acc = _rescaled(acc, alpha, LAZY)
    last = (tiles - 1) % STAGES
    mbarrier.wait(v_full.index(last), (tiles - 1) // STAGES & 1)
    acc = warpgroup_mma(_operand(packed, N), v_buffers.index(last), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    row = first + part * ROWS
    if RING_HEADS > 0:
        _finish_turn(acc, m, l, target, row, RING_HEADS)
    else:
        _finish(acc, l, q_buffers.index(part), target, row, valid)


@gluon.jit
def _next_softmax(q, k, k_full, k_phase, k_empty, acc, packed, v, v_full, v_phase, v_empty, m, l, keys,
                  HANDS_ON_K: gl.constexpr, FIRST: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr,
                  OVERLAP: gl.constexpr, LAZY: gl.constexpr):  # fmt: skip
    """Scores of one block of rows (q, m, l) and their softmax, as ``packed`` V of the other adds to ``acc``.

    The last of the two blocks to use K or V hands it back. Returns P, the state and the rescaling factors
    of the first, and the accumulators of the other.
    """
    weights = _operand(packed, N)
    if OVERLAP:
        mbarrier.wait(k_full, k_phase)
        scores = _start_scores(q, k, N, LAYOUT)
        mbarrier.wait(v_full, v_phase)
        acc = warpgroup_mma(weights, v, acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
    else:
        mbarrier.wait(v_full, v_phase)
        acc = warpgroup_mma(weights, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.wait(k_full, k_phase)
        scores = _start_scores(q, k, N, LAYOUT)
        scores = warpgroup_mma_wait(0, deps=[scores])
    if HANDS_ON_K:
        mbarrier.arrive(k_empty)
    if FIRST:
        p, m, l = _first_softmax(scores, keys, N, LAYOUT)
        alpha = gl.full((ROWS,), 1.0, gl.float32, LANES)
    else:
        p, m, l, alpha = _softmax(scores, m, l, N, LAYOUT, LAZY)
    packed = _packed(p, N)
    if OVERLAP:
        # A branch, which keeps the exponentials on this side of the next wait; the phase has passed.
        mbarrier.wait(v_full, v_phase)
        acc = warpgroup_mma_wait(0, deps=[acc])
    if not HANDS_ON_K:
        mbarrier.arrive(v_empty)
    return packed, m, l, alpha, acc


@gluon.jit
def _double_consumer(part, out_desc, shared, work, N: gl.constexpr, STAGES: gl.constexpr,
                     OVERLAP: gl.constexpr, LAZY: gl.constexpr):  # fmt: skip
    """Attention of 128 rows in two blocks, a and b: softmax of one while P V of the other is in flight."""
    q_buffers, k_buffers, v_buffers, q_full, k_full, k_empty, v_full, v_empty = shared
    first, valid, tiles = work
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    acc_a = gl.zeros((ROWS, D), gl.float32, ACC)
    acc_b = gl.zeros((ROWS, D), gl.float32, ACC)
    qa = q_buffers.index(2 * part)
    qb = q_buffers.index(2 * part + 1)
    keys = valid - (tiles - 1) * N
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma_wait(0, deps=[_start_scores(qa, k_buffers.index(0), N, LAYOUT)])
    p, ma, la = _first_softmax(scores, keys, N, LAYOUT)
    packed_a = _packed(p, N)
    packed_b, mb, lb, alpha, acc_a = _next_softmax(
        qb, k_buffers.index(0), k_full.index(0), 0, k_empty.index(0), acc_a, packed_a, v_buffers.index(0),
        v_full.index(0), 0, v_empty.index(0), ma, la, keys, True, True, N, LAYOUT, OVERLAP, LAZY,
    )  # fmt: skip
    for tile in range(1, tiles):
        slot = tile % STAGES
        phase = tile // STAGES & 1
        past = (tile - 1) % STAGES
        past_phase = (tile - 1) // STAGES & 1
        packed_a, ma, la, alpha, acc_b = _next_softmax(
            qa, k_buffers.index(slot), k_full.index(slot), phase, k_empty.index(slot), acc_b, packed_b,
            v_buffers.index(past), v_full.index(past), past_phase, v_empty.index(past), ma, la, keys,
            False, False, N, LAYOUT, OVERLAP, LAZY,
        )  # fmt: skip
        acc_a = _rescaled(acc_a, alpha, LAZY)
        packed_b, mb, lb, alpha, acc_a = _next_softmax(
            qb, k_buffers.index(slot), k_full.index(slot), phase, k_empty.index(slot), acc_a, packed_a,
            v_buffers.index(slot), v_full.index(slot), phase, v_empty.index(slot), mb, lb, keys,
            True, False, N, LAYOUT, OVERLAP, LAZY,
        )  # fmt: skip
        acc_b = _rescaled(acc_b, alpha, LAZY)
    last = (tiles - 1) % STAGES
    acc_b = warpgroup_mma(_operand(packed_b, N), v_buffers.index(last), acc_b, is_async=True)
    acc_b = warpgroup_mma_wait(0, deps=[acc_b])
    row = first + 2 * part * ROWS
    _finish(acc_a, la, qa, out_desc, row, valid)
    _finish(acc_b, lb, qb, out_desc, row + ROWS, valid)


@gluon.jit
def _shared(PARTS: gl.constexpr, GROUPS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr):
    """Room for PARTS tiles of queries and a ring of keys and values, and the barriers of GROUPS consumers."""
    q_buffers = gl.allocate_shared_memory(gl.bfloat16, [PARTS, ROWS, D], TILED)
    k_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, D], TILED)
    v_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, D], TILED)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, 1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), 1)
        mbarrier.init(k_empty.index(slot), GROUPS)
        mbarrier.init(v_full.index(slot), 1)
        mbarrier.init(v_empty.index(slot), GROUPS)
    fence_async_shared()
    return q_buffers, k_buffers, v_buffers, q_full, k_full, k_empty, v_full, v_empty


@gluon.jit
def dense_kernel(
    q, k, v, out, counts, rows, valid,
    HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr,
    THRESHOLD: gl.constexpr, Q_TILE: gl.constexpr, K_TILE: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr = True, Q_HELD: gl.constexpr = False, LAZY: gl.constexpr = False,
):  # fmt: skip
    """As attention.dense_kernel without skipping; Q_TILE is 128, 192 or 256; 4 warps (of the first group)."""
    gl.static_assert(THRESHOLD == 0)
    PARTS: gl.constexpr = Q_TILE // ROWS
    gl.static_assert(PARTS * ROWS == Q_TILE)
    GROUPS: gl.constexpr = 3 if PARTS == 3 else 2
    gl.static_assert(STAGES > 1)
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
        tiles = gl.cdiv(valid, K_TILE)
        q_desc = tma.make_tensor_descriptor(q + head * D, [valid, D], [Q_STRIDE, 1], [ROWS, D], TILED)
        k_desc = tma.make_tensor_descriptor(k + head * D, [valid, D], [K_STRIDE, 1], [K_TILE, D], TILED)
        v_desc = tma.make_tensor_descriptor(v + head * D, [valid, D], [V_STRIDE, 1], [K_TILE, D], TILED)
        out_desc = tma.make_tensor_descriptor(out + head * D, [rows, D], [HEADS * D, 1], [ROWS, D], TILED)
        shared = _shared(PARTS, GROUPS, K_TILE, STAGES)
        work = (first, valid, tiles)
        if PARTS == 2:
            gl.warp_specialize(
                [
                    (_consumer, (0, out_desc, shared, work, K_TILE, STAGES, OVERLAP, Q_HELD, LAZY)),
                    (_consumer, (1, out_desc, shared, work, K_TILE, STAGES, OVERLAP, Q_HELD, LAZY)),
                    (_producer, (q_desc, k_desc, v_desc, shared, first, tiles, PARTS, K_TILE, STAGES)),
                ],
                [4, 1],
                [240, PRODUCER_REGISTERS],
            )  # fmt: skip
        elif PARTS == 3:
            gl.warp_specialize(
                [
                    (_consumer, (0, out_desc, shared, work, K_TILE, STAGES, OVERLAP, Q_HELD, LAZY)),
                    (_consumer, (1, out_desc, shared, work, K_TILE, STAGES, OVERLAP, Q_HELD, LAZY)),
                    (_consumer, (2, out_desc, shared, work, K_TILE, STAGES, OVERLAP, Q_HELD, LAZY)),
                    (_producer, (q_desc, k_desc, v_desc, shared, first, tiles, PARTS, K_TILE, STAGES)),
                ],
                [4, 4, 1],
                [160, 160, PRODUCER_REGISTERS],
            )  # fmt: skip
        else:
            gl.static_assert(PARTS == 4)
            gl.static_assert(not Q_HELD)
            gl.warp_specialize(
                [
                    (_double_consumer, (0, out_desc, shared, work, K_TILE, STAGES, OVERLAP, LAZY)),
                    (_double_consumer, (1, out_desc, shared, work, K_TILE, STAGES, OVERLAP, LAZY)),
                    (_producer, (q_desc, k_desc, v_desc, shared, first, tiles, PARTS, K_TILE, STAGES)),
                ],
                [4, 1],
                [240, PRODUCER_REGISTERS],
            )  # fmt: skip


@gluon.jit
def ring_kernel(
    q, k, v, out, state, logs, rows, valid, first_turn, last_turn,
    HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr,
    Q_TILE: gl.constexpr, K_TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As attention.ring_kernel; Q_TILE is 192; 4 warps (of the first group)."""
    PARTS: gl.constexpr = Q_TILE // ROWS
    gl.static_assert(PARTS == 3)
    head = gl.program_id(1)
    first = gl.program_id(0) * Q_TILE
    tiles = gl.cdiv(valid, K_TILE)
    q_desc = tma.make_tensor_descriptor(q + head * D, [rows, D], [Q_STRIDE, 1], [ROWS, D], TILED)
    k_desc = tma.make_tensor_descriptor(k + head * D, [valid, D], [K_STRIDE, 1], [K_TILE, D], TILED)
    v_desc = tma.make_tensor_descriptor(v + head * D, [valid, D], [V_STRIDE, 1], [K_TILE, D], TILED)
    shared = _shared(PARTS, PARTS, K_TILE, STAGES)
    work = (first, valid, tiles)
    turn = (out, state, logs, rows, first_turn, last_turn)
    gl.warp_specialize(
        [
            (_consumer, (0, turn, shared, work, K_TILE, STAGES, False, False, True, HEADS)),
            (_consumer, (1, turn, shared, work, K_TILE, STAGES, False, False, True, HEADS)),
            (_consumer, (2, turn, shared, work, K_TILE, STAGES, False, False, True, HEADS)),
            (_producer, (q_desc, k_desc, v_desc, shared, first, tiles, PARTS, K_TILE, STAGES)),
        ],
        [4, 4, 1],
        [160, 160, PRODUCER_REGISTERS],
    )  # fmt: skip
