"""SAGE: attention on quantized operands, dense or with Skip-Softmax."""

from __future__ import annotations

import math
from functools import partial

import torch

from h3compile.ops.attention import (
    Tiles,
    attention_cost,
    launch_tiles,
    nothing_skipped,
    unsupported_heads,
)
from h3compile.ops.launch import Run
from h3compile.ops.memory import empty
from h3compile.ops.numerics import FP8, wide
from h3compile.ops.online_softmax import K_TILE, Q_TILE, Attended, tiled_attention
from h3compile.ops.operator import Cost, Operand, Provider, define
from h3compile.ops.rows import FLOATS, contiguous, unsupported
from h3compile.ops.sage_cudnn import CUDNN
from h3compile.ops.sage_flashinfer import FLASHINFER, FLASHINFER_SKIP
from h3compile.ops.sage_quantized import key_order
from h3compile.ops.sage_scales import K_BLOCKS, WHOLE, kernel_block, spread
from h3compile.targets.keys import WITHOUT_INT8

__all__ = ["SAGE_ATTENTION", "SAGE_SKIP_ATTENTION"]


def _tiles(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    k_block: int,
    valid: int | None,
    threshold: float,
    kind: torch.dtype,
) -> Attended:
    heads, rows, width = q.shape
    # Integers and E4M3 products are exact in either dtype; sums of 128 of them nearly so.
    q, k = q.to(kind), k.to(kind)
    q_scale, k_scale = spread(q_scale, k_scale, heads, rows, k_block)
    k_rows = k_scale.repeat_interleave(kernel_block(k_block), 1)[:, None, :rows].to(kind)
    q_rows = (q_scale[..., None] * (width**-0.5 * math.log2(math.e))).to(kind)
    order = torch.argsort(key_order(v.device))
    values = v.to(kind).reshape(heads, width, -1, 16)[..., order].flatten(2).mT
    tiles = tiled_attention(
        lambda queries, keys: q[:, queries] @ k[:, keys].mT * q_rows[:, queries] * k_rows[..., keys],
        lambda keys: values[:, keys],
        rows=rows,
        valid=rows if valid is None else valid,
        threshold=threshold,
        quantize=True,
    )
    return Attended(tiles.out * v_scale.to(kind), tiles.skipped, tiles.considered)


def _reference(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    k_block: int,
    dtype: torch.dtype,
    valid: int | None = None,
) -> torch.Tensor:
    kind = wide(torch.empty(0, dtype=dtype)).dtype
    tiles = _tiles(q, q_scale, k, k_scale, v, v_scale, k_block, valid, 0.0, kind)
    return tiles.out[None].to(dtype)


def _reference_skip(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    k_block: int,
    dtype: torch.dtype,
    threshold: float,
    valid: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    kind = wide(torch.empty(0, dtype=dtype)).dtype
    tiles = _tiles(q, q_scale, k, k_scale, v, v_scale, k_block, valid, threshold, kind)
    counts = torch.tensor([tiles.skipped, tiles.considered], dtype=torch.int32, device=q.device)
    return tiles.out[None].to(dtype), counts


def _out(q: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    heads, rows, width = q.shape
    return q.new_empty((1, rows, heads, width), dtype=dtype)


def _fake(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    k_block: int,
    dtype: torch.dtype,
    valid: int | None = None,
) -> torch.Tensor:
    return _out(q, dtype)


def _fake_skip(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    k_block: int,
    dtype: torch.dtype,
    threshold: float,
    valid: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _out(q, dtype), q.new_empty((2,), dtype=torch.int32)


# A program of the Gluon kernel has three query tiles, each of which skips by itself.
_HOPPER = Tiles(3 * Q_TILE, K_TILE, warps=4, stages=4, gluon=True)
# With the tensor cores that take operands from registers (sm_89, sm_120a), eight warps spill least.
_DENSE = Tiles(128, K_TILE, warps=8, stages=2)
_SKIP = Tiles(Q_TILE, K_TILE, warps=8, stages=2)
# Three programs a multiprocessor.
_AT_90A = Tiles(Q_TILE, K_TILE, warps=4, stages=2, registers=168)


def _tiles_of(hopper: bool, arch: str, skipping: bool) -> Tiles:
    if hopper:
        return _HOPPER
    if arch == "sm_90a":
        return _AT_90A
    return _SKIP if skipping else _DENSE


def _illegal(
    arch: str,
    q: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    k_block: int,
    dtype: torch.dtype,
    *_: object,
) -> str | None:
    if q.dtype != k.dtype or q.dtype not in (FP8, torch.int8) or v.dtype != FP8:
        return "queries and keys must be E4M3 or int8, values E4M3"
    if any(scale.dtype != torch.float32 for scale in (q_scale, k_scale, v_scale)):
        return "scales must be float32"
    if dtype not in FLOATS:
        return f"no kernel for {str(dtype).removeprefix('torch.')}"
    if k_block not in (WHOLE, *K_BLOCKS):
        return f"no kernel for {k_block} keys a scale"
    if q.dtype == torch.int8 and arch in WITHOUT_INT8:
        return "its tensor cores multiply no integers"
    return unsupported_heads(q.shape[2]) or unsupported(arch, (), fp8=True)


def _illegal_hopper(arch: str, *operands: Operand) -> str | None:
    if arch != "sm_90a":
        return "it is written for sm_90a"
    return _illegal(arch, *operands)  # type: ignore[arg-type]


def _launched(
    hopper: bool,
    run: Run,
    arch: str,
    arguments: dict[str, torch.Tensor],
    k_block: int,
    dtype: torch.dtype,
    valid: int | None,
    counts: torch.Tensor | None = None,
    threshold: float = 0.0,
) -> torch.Tensor:
    heads, rows, _ = arguments["q"].shape
    q_scale, k_scale = spread(arguments["q_scale"], arguments["k_scale"], heads, rows, k_block)
    arguments = {**arguments, "q_scale": q_scale, "k_scale": k_scale}
    contiguous("sage_attention", arguments)
    heads, rows, width = arguments["q"].shape
    out = empty(arguments["q"], (1, rows, heads, width), dtype)
    launch_tiles(
        run,
        "attention_hopper:sage_hopper_kernel" if hopper else "attention:sage_kernel",
        _tiles_of(hopper, arch, counts is not None),
        heads,
        rows,
        {**arguments, "out": out, "counts": counts, "rows": rows, "valid": rows if valid is None else valid},
        {"K_BLOCK": kernel_block(k_block), "THRESHOLD": threshold},
    )
    return out


def _launch(
    hopper: bool,
    run: Run,
    arch: str,
    q: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    k_block: int,
    dtype: torch.dtype,
    valid: int | None = None,
) -> torch.Tensor:
    operands = {"q": q, "q_scale": q_scale, "k": k, "k_scale": k_scale, "v": v, "v_scale": v_scale}
    return _launched(hopper, run, arch, operands, k_block, dtype, valid)


def _launch_skip(
    hopper: bool,
    run: Run,
    arch: str,
    q: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    k_block: int,
    dtype: torch.dtype,
    threshold: float,
    valid: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    operands = {"q": q, "q_scale": q_scale, "k": k, "k_scale": k_scale, "v": v, "v_scale": v_scale}
    if threshold == 0:
        dense = _launched(hopper, run, arch, operands, k_block, dtype, valid)
        heads, rows, _ = q.shape
        return dense, nothing_skipped(q, heads, rows if valid is None else valid, K_TILE)
    counts = q.new_zeros((2,), dtype=torch.int32)
    return _launched(hopper, run, arch, operands, k_block, dtype, valid, counts, threshold), counts


def _cost(q: torch.Tensor, *_: object) -> Cost:
    heads, rows, width = q.shape
    moved = 3 * q.numel() + 2 * q.numel()
    return attention_cost(q, str(q.dtype).removeprefix("torch."), heads, rows, width, moved)


_OPERANDS = (
    "Tensor q, Tensor q_scale, Tensor k, Tensor k_scale, Tensor v, Tensor v_scale, int k_block,"
    " ScalarType dtype"
)

# On the operands `sage_prepare` gives; returns [1, rows, heads, D] in ``dtype``, zero from row ``valid`` on.
SAGE_ATTENTION = define(
    "sage_attention",
    f"({_OPERANDS}, SymInt? valid=None) -> Tensor",
    reference=_reference,
    fake=_fake,
    cost=_cost,
    providers=(
        Provider("gluon", _illegal_hopper, partial(_launch, True)),
        FLASHINFER,
        CUDNN,
        Provider("triton", _illegal, partial(_launch, False)),
    ),
)

# With Skip-Softmax at ``threshold``; also returns the tiles skipped and considered, int32 [2].
SAGE_SKIP_ATTENTION = define(
    "sage_attention.skip",
    f"({_OPERANDS}, float threshold, SymInt? valid=None) -> (Tensor, Tensor)",
    reference=_reference_skip,
    fake=_fake_skip,
    cost=_cost,
    providers=(
        Provider("gluon", _illegal_hopper, partial(_launch_skip, True)),
        FLASHINFER_SKIP,
        Provider("triton", _illegal, partial(_launch_skip, False)),
    ),
)
