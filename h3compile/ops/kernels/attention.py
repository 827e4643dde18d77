"""Attention of one document in tiles: 16-bit, or SAGE (8-bit scores, E4M3 values); either with Skip-Softmax.

A program instance owns Q_TILE query rows of one head and walks the keys in tiles of K_TILE with an online
softmax in the log2 domain. Rows from ``valid`` on are padding: they may hold anything, influence nothing,
and their outputs are zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

D: tl.constexpr = tl.constexpr(128)
# Scores to exponents of two: D^-1/2 log2(e).
SCALE: tl.constexpr = tl.constexpr(128**-0.5 * 1.4426950408889634)
# P is multiplied by 2^8 before it is rounded to E4M3 (largest value 448), so that the range is used.
P_SHIFT: tl.constexpr = tl.constexpr(8.0)
# Added to an integer below 2^22 in size this gives a float whose bits are 0x4B400000 plus the integer.
INT_BIAS: tl.constexpr = tl.constexpr(12582912.0)
INT_BIAS_BITS: tl.constexpr = tl.constexpr(0x4B400000)


@triton.jit
def _stored_order(p, M: tl.constexpr, N: tl.constexpr):
    """The columns of P in the key order of the stored values (`sage_prepare.key_order`).

    Of every 16 score columns a thread of a quad holds 2t, 2t+1, 8+2t, 9+2t, and as an FP8 operand the
    columns 4t to 4t+3: with the keys of V stored in the former order no register leaves its thread.
    """
    return p.reshape(M, N // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(M, N)


@triton.jit
def _any(flags):
    """1 where one of ``flags`` [M] is set, else 0.

    Reduced as a column: of scores in tensor memory (sm_100a) Triton 3.6 cannot reduce a vector of rows.
    """
    return tl.max(flags.to(tl.int32)[:, None], 0).item()


@triton.jit
def _column_scaled(raw, scale, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Scores times the scales of their key blocks."""
    return (raw.reshape(M, N // BLOCK, BLOCK) * scale[None, :, None]).reshape(M, N)


@triton.jit
def _scores(q, k, INT8: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """q k^T; for INT8 as floats that are INT_BIAS too large, which spares the conversions."""
    if INT8:
        bias = tl.full((M, N), INT_BIAS_BITS, tl.int32)
        scores = tl.dot(q, k.T, bias, out_dtype=tl.int32).to(tl.float32, bitcast=True)
    else:
        scores = tl.dot(q, k.T)
    return scores


@triton.jit
def _sage_tile(raw, top, m, l, acc, v, rate, BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """One step of the online softmax: raw scores, their row maxima ``top`` (log2), ``rate`` raw -> log2."""
    m_new = tl.maximum(m, top)
    shift = m_new - P_SHIFT
    if BIAS:
        shift += rate * INT_BIAS
    p = tl.exp2(raw * rate[:, None] - shift[:, None])
    alpha = tl.exp2(m - m_new)
    l = l * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    weights = _stored_order(p.to(tl.float8e4nv), M, N)
    return m_new, l, tl.dot(weights, v.T, acc)


@triton.jit
def _sage_step(
    q, k_desc, v_desc, k_scale, start, valid, rate, m, l, acc, kept, row_ok, cutoff,
    INT8: tl.constexpr, K_BLOCK: tl.constexpr, SKIP: tl.constexpr, MASK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Scores of the tile of keys from ``start``, and what follows from them unless it is skipped."""
    k = k_desc.load([start, 0])
    raw = _scores(q, k, INT8, M, N)
    BIAS: tl.constexpr = INT8 and K_BLOCK >= N
    if K_BLOCK >= N:
        rate = rate * tl.load(k_scale + start // K_BLOCK)
    else:
        blocks = start // K_BLOCK + tl.arange(0, N // K_BLOCK)
        if MASK:
            scale = tl.load(k_scale + blocks, mask=blocks * K_BLOCK < valid, other=1.0)
        else:
            scale = tl.load(k_scale + blocks)
        if INT8:
            raw -= INT_BIAS
        raw = _column_scaled(raw, scale, M, N, K_BLOCK)
    if MASK:
        raw = tl.where(start + tl.arange(0, N)[None, :] < valid, raw, float("-inf"))
    top = tl.max(raw, 1)
    if BIAS:
        top -= INT_BIAS
    top *= rate
    if SKIP:
        # The first tile is never dropped: nothing is below minus infinity.
        keep = _any((top >= m + cutoff) & row_ok)
        if keep != 0:
            m, l, acc = _sage_tile(raw, top, m, l, acc, v_desc.load([0, start]), rate, BIAS, M, N)
        kept += keep
    else:
        m, l, acc = _sage_tile(raw, top, m, l, acc, v_desc.load([0, start]), rate, BIAS, M, N)
    return m, l, acc, kept


@triton.jit
def sage_kernel(
    q, q_scale, k, k_scale, v, v_scale, out, counts, rows, valid,
    HEADS: tl.constexpr, K_BLOCK: tl.constexpr, THRESHOLD: tl.constexpr,
    Q_TILE: tl.constexpr, K_TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out = softmax(q k^T * scale) v from quantized operands; grid (ceil(rows / Q_TILE), heads).

    q, k [heads, rows, D] E4M3 or INT8; q_scale [heads, rows], k_scale [heads, ceil(rows / K_BLOCK)] FP32;
    v [heads, D, ceil(rows / 128) * 128] E4M3, keys in stored order, zero from ``valid`` on; v_scale
    [heads, D] FP32; out [rows, heads, D]. With a THRESHOLD (lambda times ``valid``) tiles that cannot
    matter are skipped, and ``counts``, INT32 [2], gains the tiles skipped and considered.
    """
    head = tl.program_id(1)
    first = tl.program_id(0) * Q_TILE
    row = first + tl.arange(0, Q_TILE)
    column = tl.arange(0, D)
    target = out + (row.to(tl.int64)[:, None] * HEADS + head) * D + column[None, :]
    if first >= valid:
        tl.store(target, tl.zeros((Q_TILE, D), out.dtype.element_ty), mask=row[:, None] < rows)
        return
    base = head.to(tl.int64) * rows
    padded = tl.cdiv(rows, 128) * 128
    k_desc = tl.make_tensor_descriptor(k + base * D, [valid, D], [D, 1], [K_TILE, D])
    v_desc = tl.make_tensor_descriptor(
        v + head.to(tl.int64) * D * padded, [D, padded], [padded, 1], [D, K_TILE]
    )
    k_scale += head.to(tl.int64) * tl.cdiv(rows, K_BLOCK)
    INT8: tl.constexpr = q.dtype.element_ty == tl.int8
    row_ok = row < valid
    q_tile = tl.load(q + (base + row)[:, None] * D + column[None, :], mask=row_ok[:, None], other=0.0)
    rate = tl.load(q_scale + base + row, mask=row_ok, other=0.0) * SCALE
    SKIP: tl.constexpr = THRESHOLD > 0
    cutoff = tl.log2(THRESHOLD / valid) if SKIP else 0.0

    m = tl.full((Q_TILE,), float("-inf"), tl.float32)
    l = tl.zeros((Q_TILE,), tl.float32)
    acc = tl.zeros((Q_TILE, D), tl.float32)
    kept = 0
    whole = valid // K_TILE
    for tile in tl.range(0, whole, num_stages=STAGES):
        m, l, acc, kept = _sage_step(
            q_tile, k_desc, v_desc, k_scale, tile * K_TILE, valid, rate, m, l, acc, kept, row_ok, cutoff,
            INT8, K_BLOCK, SKIP, False, Q_TILE, K_TILE,
        )  # fmt: skip
    if whole * K_TILE < valid:
        m, l, acc, kept = _sage_step(
            q_tile, k_desc, v_desc, k_scale, whole * K_TILE, valid, rate, m, l, acc, kept, row_ok, cutoff,
            INT8, K_BLOCK, SKIP, True, Q_TILE, K_TILE,
        )  # fmt: skip
    channel = tl.load(v_scale + head * D + column)
    result = acc * channel[None, :] / l[:, None]
    result = tl.where(row_ok[:, None], result, 0.0)
    tl.store(target, result.to(out.dtype.element_ty), mask=row[:, None] < rows)
    if SKIP:
        considered = tl.cdiv(valid, K_TILE)
        tl.atomic_add(counts, considered - kept)
        tl.atomic_add(counts + 1, considered)


@triton.jit
def _dense_tile(raw, top, m, l, acc, v, rate):
    """As _sage_tile."""
    m_new = tl.maximum(m, top)
    p = tl.exp2(raw * rate - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    l = l * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    return m_new, l, tl.dot(p.to(v.dtype), v, acc)


@triton.jit
def _dense_step(
    q, k_desc, v_desc, start, valid, rate, m, l, acc, kept, row_ok, cutoff,
    SKIP: tl.constexpr, MASK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """As _sage_step."""
    raw = tl.dot(q, k_desc.load([start, 0]).T)
    if MASK:
        raw = tl.where(start + tl.arange(0, N)[None, :] < valid, raw, float("-inf"))
    top = tl.max(raw, 1) * rate
    if SKIP:
        keep = _any((top >= m + cutoff) & row_ok)
        if keep != 0:
            m, l, acc = _dense_tile(raw, top, m, l, acc, v_desc.load([start, 0]), rate)
        kept += keep
    else:
        m, l, acc = _dense_tile(raw, top, m, l, acc, v_desc.load([start, 0]), rate)
    return m, l, acc, kept


@triton.jit
def dense_kernel(
    q, k, v, out, counts, rows, valid,
    HEADS: tl.constexpr, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    THRESHOLD: tl.constexpr, Q_TILE: tl.constexpr, K_TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out = softmax(q k^T * scale) v in 16-bit floats; grid (ceil(rows / Q_TILE), heads).

    q, k, v [rows, heads, D] with the given row strides (in elements, multiples of 8); out [rows, heads,
    D], contiguous; ``counts`` and THRESHOLD as in sage_kernel.
    """
    head = tl.program_id(1)
    first = tl.program_id(0) * Q_TILE
    row = first + tl.arange(0, Q_TILE)
    column = tl.arange(0, D)
    target = out + (row.to(tl.int64)[:, None] * HEADS + head) * D + column[None, :]
    if first >= valid:
        tl.store(target, tl.zeros((Q_TILE, D), out.dtype.element_ty), mask=row[:, None] < rows)
        return
    q_desc = tl.make_tensor_descriptor(q + head * D, [valid, D], [Q_STRIDE, 1], [Q_TILE, D])
    k_desc = tl.make_tensor_descriptor(k + head * D, [valid, D], [K_STRIDE, 1], [K_TILE, D])
    v_desc = tl.make_tensor_descriptor(v + head * D, [valid, D], [V_STRIDE, 1], [K_TILE, D])
    row_ok = row < valid
    rate = SCALE
    SKIP: tl.constexpr = THRESHOLD > 0
    cutoff = tl.log2(THRESHOLD / valid) if SKIP else 0.0
    q_tile = q_desc.load([first, 0])

    m = tl.full((Q_TILE,), float("-inf"), tl.float32)
    l = tl.zeros((Q_TILE,), tl.float32)
    acc = tl.zeros((Q_TILE, D), tl.float32)
    kept = 0
    whole = valid // K_TILE
    for tile in tl.range(0, whole, num_stages=STAGES):
        m, l, acc, kept = _dense_step(
            q_tile, k_desc, v_desc, tile * K_TILE, valid, rate, m, l, acc, kept, row_ok, cutoff,
            SKIP, False, K_TILE,
        )  # fmt: skip
    if whole * K_TILE < valid:
        m, l, acc, kept = _dense_step(
            q_tile, k_desc, v_desc, whole * K_TILE, valid, rate, m, l, acc, kept, row_ok, cutoff,
            SKIP, True, K_TILE,
        )  # fmt: skip
    result = tl.where(row_ok[:, None], acc / l[:, None], 0.0)
    tl.store(target, result.to(out.dtype.element_ty), mask=row[:, None] < rows)
    if SKIP:
        considered = tl.cdiv(valid, K_TILE)
        tl.atomic_add(counts, considered - kept)
        tl.atomic_add(counts + 1, considered)


@triton.jit
def ring_kernel(
    q, k, v, out, state, logs, rows, valid, first_turn, last_turn,
    HEADS: tl.constexpr, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    Q_TILE: tl.constexpr, K_TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of ``rows`` queries to one stretch of keys, merged with that to others; grid as dense_kernel.

    q [rows, heads, D]; k, v [valid, heads, D]; state [rows, heads, D] FP32, the result so far, and logs
    [heads, rows] FP32, the logarithms (base 2) of its sums of exponentials. The first turn, where
    ``first_turn`` is 1, reads neither; the last writes out [rows, heads, D] instead.
    """
    head = tl.program_id(1)
    first = tl.program_id(0) * Q_TILE
    row = first + tl.arange(0, Q_TILE)
    q_desc = tl.make_tensor_descriptor(q + head * D, [rows, D], [Q_STRIDE, 1], [Q_TILE, D])
    k_desc = tl.make_tensor_descriptor(k + head * D, [valid, D], [K_STRIDE, 1], [K_TILE, D])
    v_desc = tl.make_tensor_descriptor(v + head * D, [valid, D], [V_STRIDE, 1], [K_TILE, D])
    there = row < rows
    rate = SCALE
    q_tile = q_desc.load([first, 0])

    m = tl.full((Q_TILE,), float("-inf"), tl.float32)
    l = tl.zeros((Q_TILE,), tl.float32)
    acc = tl.zeros((Q_TILE, D), tl.float32)
    kept = 0
    whole = valid // K_TILE
    for tile in tl.range(0, whole, num_stages=STAGES):
        m, l, acc, kept = _dense_step(
            q_tile, k_desc, v_desc, tile * K_TILE, valid, rate, m, l, acc, kept, there, 0.0,
            False, False, K_TILE,
        )  # fmt: skip
    if whole * K_TILE < valid:
        m, l, acc, kept = _dense_step(
            q_tile, k_desc, v_desc, whole * K_TILE, valid, rate, m, l, acc, kept, there, 0.0,
            False, True, K_TILE,
        )  # fmt: skip
    place = (row.to(tl.int64)[:, None] * HEADS + head) * D + tl.arange(0, D)[None, :]
    logs += head.to(tl.int64) * rows + row
    before = there & (first_turn == 0)
    found = tl.load(state + place, mask=before[:, None], other=0.0)
    log = tl.load(logs, mask=before, other=float("-inf"))
    top = tl.maximum(m, log)
    mine = tl.exp2(m - top)
    theirs = tl.exp2(log - top)
    total = l * mine + theirs
    result = acc * (mine / total)[:, None] + found * (theirs / total)[:, None]
    if last_turn != 0:
        tl.store(out + place, result.to(out.dtype.element_ty), mask=there[:, None])
    else:
        tl.store(state + place, result, mask=there[:, None])
        tl.store(logs, top + tl.log2(total), mask=there)
