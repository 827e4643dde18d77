"""RMS norm of every query and key head and partial rotary embedding, from the joint qkv projection."""

from __future__ import annotations

import torch

from h3compile.ops.launch import Run, ceil_div
from h3compile.ops.memory import empty
from h3compile.ops.numerics import normalized, wide
from h3compile.ops.operator import Cost, Provider, define
from h3compile.ops.rows import contiguous, launch, power_of_two, unsupported

__all__ = ["QK_NORM_ROPE", "normed_and_rotated", "rotated"]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the first ``cos.shape[-1]`` channels, halves paired: x [..., rows, heads, D]."""
    turned = cos.shape[-1]
    head, tail = x[..., :turned], x[..., turned:]
    first, second = head.chunk(2, -1)
    cos, sin = wide(cos).unsqueeze(-2), wide(sin).unsqueeze(-2)
    return torch.cat((head * cos + torch.cat((-second, first), -1) * sin, tail), -1)


def normed_and_rotated(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Norm over the last dimension, then rotation where there are tables; in the wide dtype."""
    normed = normalized(x, weight, eps)
    return normed if cos is None or sin is None else rotated(normed, cos, sin)


def _reference(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, _ = qkv.view(*qkv.shape[:-1], 3, heads, -1).unbind(-3)
    return (
        normed_and_rotated(query, q_weight, cos, sin, eps).to(qkv.dtype),
        normed_and_rotated(key, k_weight, cos, sin, eps).to(qkv.dtype),
    )


def _fake(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*qkv.shape[:-1], heads, qkv.shape[-1] // (3 * heads))
    return qkv.new_empty(shape), qkv.new_empty(shape)


def _illegal(
    arch: str,
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *_: object,
) -> str | None:
    if qkv.shape[0] != 1:
        return "it takes one document, not a batch"
    return unsupported(arch, (qkv, q_weight, k_weight, cos, sin))


# Eight columns a thread. Of the numbers of tiles that a program may take, the first that leaves no tile over
# is the fastest; seven of float32 do not fit in registers.
_WARPS, _COLUMNS, _TILES = 2, 8, (7, 4, 2, 1)


def _launch(
    run: Run,
    arch: str,
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = qkv.shape[1], qkv.shape[2] // (3 * heads)
    if qkv.stride(2) != 1:
        raise ValueError(f"qk_norm_rope needs rows of qkv contiguous, not with stride {qkv.stride(2)}")
    query, key = (empty(qkv, (1, rows, heads, width)) for _ in range(2))
    operands = {"q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin}
    contiguous("qk_norm_rope", operands)
    columns = power_of_two(width)
    tile = max(1, _WARPS * 32 * _COLUMNS // columns)
    needed = ceil_div(heads, tile)
    fitting = _TILES if qkv.element_size() == 2 else _TILES[1:]
    tiles = next(count for count in fitting if needed % count == 0)
    launch(
        run,
        "qk_norm_rope:qk_norm_rope_kernel",
        (rows, needed // tiles, 1),
        {"qkv": qkv, **operands, "query": query, "key": key},
        {
            "STRIDE": qkv.stride(1),
            "HEADS": heads,
            "WIDTH": width,
            "TURNED": 0 if cos is None else cos.shape[-1],
            "EPS": eps,
            "TILE": tile,
            "TILES": tiles,
            "COLUMNS": columns,
        },
        warps=_WARPS,
    )
    return query, key


def _cost(qkv: torch.Tensor, *_: object) -> Cost:
    touched = 2 * qkv.numel() // 3
    return Cost({"float32": 8 * touched}, 2 * touched * qkv.element_size())


# qkv [1, rows, 3*heads*D] (all query heads, all key heads, all value heads), weights [D], cos and sin
# [rows, R] with R <= D even, or none; returns query and key [1, rows, heads, D]. Computed in float32 and
# rounded once.
QK_NORM_ROPE = define(
    "qk_norm_rope",
    "(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor? cos, Tensor? sin, int heads, float eps)"
    " -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    cost=_cost,
    providers=(Provider("triton", _illegal, _launch),),
)
