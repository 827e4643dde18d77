"""The tile loop of every attention kernel, in plain torch: what is rounded and skipped depends on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from h3compile.ops.numerics import FP8

__all__ = ["K_TILE", "P_SHIFT", "Q_TILE", "Attended", "tiled_attention"]

# Rows of a query tile, the unit of Skip-Softmax, and keys of a tile, the unit of the online softmax in SAGE.
Q_TILE = 64
K_TILE = 128

# Probabilities are at most 1; times 2^8 they use the upper end of E4M3, which reaches 448.
P_SHIFT = 8.0

# (query rows, key rows) -> scores of all heads in the log2 domain, [heads, queries, keys].
Scores = Callable[[slice, slice], torch.Tensor]
# key rows -> values of all heads, [heads, keys, D].
Values = Callable[[slice], torch.Tensor]


@dataclass(frozen=True)
class Attended:
    """What an attention computed: [rows, heads, D] in the wide dtype, and tiles skipped and considered."""

    out: torch.Tensor
    skipped: int
    considered: int


def tiled_attention(
    scores: Scores,
    values: Values,
    *,
    rows: int,
    valid: int,
    keys: int = K_TILE,
    threshold: float = 0.0,
    quantize: bool = False,
) -> Attended:
    """Attention of ``valid`` rows over ``valid`` keys, in tiles of `Q_TILE` queries and ``keys`` keys.

    A key tile is skipped for a query tile of one head when for each of its valid rows the tile's largest
    score is below the running maximum by more than log2(threshold / valid) (BLASST); never the first.
    With ``quantize`` the probabilities are rounded to E4M3, relative to the running maximum. Rows from
    ``valid`` on are zero.
    """
    tiles = [
        _query_tile(start, keys, scores, values, valid, threshold, quantize)
        for start in range(0, valid, Q_TILE)
    ]
    out = torch.cat([tile.out for tile in tiles])
    padding = out.new_zeros(rows - valid, *out.shape[1:])
    return Attended(
        torch.cat((out, padding)), sum(tile.skipped for tile in tiles), sum(tile.considered for tile in tiles)
    )


def _query_tile(
    start: int,
    key_tile: int,
    scores: Scores,
    values: Values,
    valid: int,
    threshold: float,
    quantize: bool,
) -> Attended:
    queries = slice(start, min(start + Q_TILE, valid))
    limit = math.log2(threshold / valid) if threshold > 0 else -math.inf
    shift = P_SHIFT if quantize else 0.0
    highest = total = out = None
    skipped = considered = 0
    for first in range(0, valid, key_tile):
        keys = slice(first, min(first + key_tile, valid))
        tile = scores(queries, keys)
        value = values(keys)
        top = tile.amax(-1, keepdim=True)
        considered += tile.shape[0]
        if highest is None or total is None or out is None:
            highest = top
            p = torch.exp2(tile - highest + shift)
            total, out = p.sum(-1, keepdim=True), _product(p, value, quantize)
            continue
        keep = ~(top < highest + limit).all(1, keepdim=True)  # [heads, 1, 1]
        skipped += int((~keep).sum())
        higher = torch.where(keep, torch.maximum(highest, top), highest)
        decay = torch.exp2(highest - higher)
        p = torch.where(keep, torch.exp2(tile - higher + shift), 0.0)
        total = total * decay + p.sum(-1, keepdim=True)
        out = out * decay + _product(p, value, quantize)
        highest = higher
    assert out is not None and total is not None
    return Attended((out / total).transpose(0, 1), skipped, considered)


def _product(p: torch.Tensor, value: torch.Tensor, quantize: bool) -> torch.Tensor:
    return (p.to(FP8).to(value.dtype) if quantize else p) @ value
