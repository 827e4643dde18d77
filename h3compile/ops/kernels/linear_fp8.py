"""A linear on E4M3 operands: a scale for each row of the input, one for each output channel."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["linear_fp8_kernel"]


@triton.jit
def _place(tile, rows, N: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile: GROUP tiles down, then one right, so that both operands stay in L2."""
    down = tl.cdiv(rows, TILE_M)
    across: tl.constexpr = (N + TILE_N - 1) // TILE_N
    group = tile // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    inside = tile % (GROUP * across)
    return (group * GROUP + inside % height) * TILE_M, inside // height * TILE_N


@triton.jit
def _store(
    tiles, row, column, values, TILE_M: tl.constexpr, TILE_N: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """Store a tile in SPLIT parts: each needs its own size of shared memory, which is worth a stage."""
    if SPLIT == 1:
        tiles.store([row, column], values)
    else:
        halves = tl.permute(tl.reshape(values, (TILE_M, 2, TILE_N // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        _store(tiles, row, column, left, TILE_M, TILE_N // 2, SPLIT // 2)
        _store(tiles, row, column + TILE_N // 2, right, TILE_M, TILE_N // 2, SPLIT // 2)


@triton.jit
def linear_fp8_kernel(
    x, x_scale, weight, weight_scale, bias, out, rows,
    N: tl.constexpr, K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP: tl.constexpr, PERSISTENT: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out = (x weight^T) * x_scale * weight_scale + bias; the programs share the tiles.

    x [rows, K] and weight [N, K] E4M3, K and the bytes of an output row multiples of 16; x_scale float32
    [rows], weight_scale float32 [N], bias [N] or none, out [rows, N].
    """
    x_tiles = tl.make_tensor_descriptor(x, [rows, K], [K, 1], [TILE_M, TILE_K])
    weight_tiles = tl.make_tensor_descriptor(weight, [N, K], [K, 1], [TILE_N, TILE_K])
    out_tiles = tl.make_tensor_descriptor(out, [rows, N], [N, 1], [TILE_M, TILE_N // SPLIT])
    tiles = tl.cdiv(rows, TILE_M) * ((N + TILE_N - 1) // TILE_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=PERSISTENT):
        first_row, first_column = _place(tile, rows, N, TILE_M, TILE_N, GROUP)
        sums = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k in tl.range(0, K, TILE_K, num_stages=STAGES):
            a = x_tiles.load([first_row, k])
            b = weight_tiles.load([first_column, k])
            sums = tl.dot(a, b.T, sums)
        row = first_row + tl.arange(0, TILE_M)
        column = first_column + tl.arange(0, TILE_N)
        row_scale = tl.load(x_scale + row, mask=row < rows, other=0.0)
        column_scale = tl.load(weight_scale + column, mask=column < N, other=0.0)
        result = sums * row_scale[:, None] * column_scale[None, :]
        if bias is not None:
            result += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
        _store(out_tiles, first_row, first_column, result.to(out.dtype.element_ty), TILE_M, TILE_N, SPLIT)
