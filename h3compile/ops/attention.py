"""Dense attention over the valid rows of one document, and the same with Skip-Softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from h3compile.ops.launch import Run, ceil_div
from h3compile.ops.memory import empty
from h3compile.ops.numerics import wide
from h3compile.ops.online_softmax import Q_TILE, tiled_attention
from h3compile.ops.operator import Cost, Provider, define
from h3compile.ops.rows import Constant, launch, unsupported

__all__ = [
    "ATTENTION",
    "DENSE_ON_HOPPER",
    "HEAD_DIM",
    "SKIP_ATTENTION",
    "Tiles",
    "attention_cost",
    "dense_tiles",
    "launch_tiles",
    "nothing_skipped",
    "unsupported_dense",
    "unsupported_heads",
    "unsupported_on_hopper",
]

# The head dimension that the kernels are written for.
HEAD_DIM = 128
# Keys of a tile that Skip-Softmax may leave out.
_SKIP_KEYS = 64


def _reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, valid: int | None = None
) -> torch.Tensor:
    rows = query.shape[1]
    count = rows if valid is None else valid
    query, key, value = (part[:, :count].transpose(1, 2) for part in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    padding = out.new_zeros(out.shape[0], rows - count, *out.shape[2:])
    return torch.cat((out, padding), 1)


def _reference_skip(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    threshold: float,
    valid: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (wide(part[0]).transpose(0, 1) for part in (query, key, value))
    rows = query.shape[1]
    factor = q.shape[-1] ** -0.5 * math.log2(math.e)
    tiles = tiled_attention(
        lambda queries, keys: q[:, queries] @ k[:, keys].mT * factor,
        lambda keys: v[:, keys],
        rows=rows,
        valid=rows if valid is None else valid,
        keys=_SKIP_KEYS,
        threshold=threshold,
    )
    counts = torch.tensor([tiles.skipped, tiles.considered], dtype=torch.int32, device=query.device)
    return tiles.out[None].to(query.dtype), counts


def _fake(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape)


def _fake_skip(query: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), query.new_empty((2,), dtype=torch.int32)


@dataclass(frozen=True)
class Tiles:
    """How an attention kernel runs on an architecture: keys of a tile and launch options.

    Where tiles may be skipped ``queries`` is `Q_TILE`, or a multiple when each of them skips by itself.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    gluon: bool = False


_DENSE = Tiles(128, 64, warps=8, stages=2)
_DENSE_AT = {"sm_90a": Tiles(64, 64, warps=4, stages=3)}
_SKIP = Tiles(Q_TILE, _SKIP_KEYS, warps=8, stages=2)
_SKIP_AT = dict.fromkeys(("sm_90a", "sm_100a", "sm_103a"), Tiles(Q_TILE, _SKIP_KEYS, warps=4, stages=2))
# Hopper's own kernel: three warpgroups share a tile of keys, which crosses the L2 cache a third as often.
DENSE_ON_HOPPER = Tiles(192, 128, warps=4, stages=2, gluon=True)


def nothing_skipped(like: torch.Tensor, heads: int, valid: int, keys: int) -> torch.Tensor:
    """The counts of a dense attention: with a threshold of zero that is what runs, to the same bits."""
    counts = like.new_zeros((2,), dtype=torch.int32)
    counts[1:].fill_(heads * ceil_div(valid, Q_TILE) * ceil_div(valid, keys))
    return counts


def unsupported_heads(width: int) -> str | None:
    """Why the kernels cannot take heads of ``width`` channels."""
    return None if width == HEAD_DIM else f"heads have {width} channels, and the kernel takes {HEAD_DIM}"


def launch_tiles(
    run: Run,
    kernel: str,
    tiles: Tiles,
    heads: int,
    rows: int,
    arguments: Mapping[str, torch.Tensor | int | None],
    constants: Mapping[str, Constant],
) -> None:
    """Launch one program for every query tile of every head."""
    sizes = {"Q_TILE": tiles.queries, "K_TILE": tiles.keys, "STAGES": tiles.stages}
    launch(
        run,
        kernel,
        (ceil_div(rows, tiles.queries), heads, 1),
        arguments,
        {"HEADS": heads, **constants, **sizes},
        warps=tiles.warps,
        stages=tiles.stages,
        registers=tiles.registers,
        gluon=tiles.gluon,
    )


def dense_tiles(arch: str) -> Tiles:
    """How the portable kernel of dense attention runs on ``arch``."""
    return _DENSE_AT.get(arch, _DENSE)


def unsupported_dense(
    arch: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object
) -> str | None:
    """Why the portable kernels of 16-bit attention cannot take these operands on ``arch``, or None."""
    operands = (query, key, value)
    for operand in operands:
        if operand.dtype not in (torch.bfloat16, torch.float16):
            return f"no kernel for {str(operand.dtype).removeprefix('torch.')}"
        # Tiles are copied by descriptors, whose strides are multiples of 16 bytes.
        if operand.stride(3) != 1 or operand.stride(2) != operand.shape[3] or operand.stride(1) % 8:
            return "heads of a row must be contiguous, and rows start on 16 bytes"
    if query.shape[0] != 1:
        return "it takes one document, not a batch"
    return unsupported_heads(query.shape[3]) or unsupported(arch, operands)


def _launched(
    run: Run,
    tiles: Tiles,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: int | None,
    counts: torch.Tensor | None = None,
    threshold: float = 0.0,
    **options: Constant,
) -> torch.Tensor:
    _, rows, heads, _ = query.shape
    out = empty(query, query.shape)
    launch_tiles(
        run,
        "dense_hopper:dense_kernel" if tiles.gluon else "attention:dense_kernel",
        tiles,
        heads,
        rows,
        {
            "q": query,
            "k": key,
            "v": value,
            "out": out,
            "counts": counts,
            "rows": rows,
            "valid": rows if valid is None else valid,
        },
        {
            "Q_STRIDE": query.stride(1),
            "K_STRIDE": key.stride(1),
            "V_STRIDE": value.stride(1),
            "THRESHOLD": threshold,
            **options,
        },
    )
    return out


def _launch(
    run: Run, arch: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, valid: int | None = None
) -> torch.Tensor:
    return _launched(run, dense_tiles(arch), query, key, value, valid)


def unsupported_on_hopper(
    arch: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object
) -> str | None:
    """Why Hopper's own kernels of dense attention cannot take these operands on ``arch``, or None."""
    if arch != "sm_90a":
        return "it is written for sm_90a"
    for operand in (query, key, value):
        if operand.dtype != torch.bfloat16:
            return f"no kernel for {str(operand.dtype).removeprefix('torch.')}"
    return unsupported_dense(arch, query, key, value, *rest)


def _launch_gluon(
    run: Run, arch: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, valid: int | None = None
) -> torch.Tensor:
    return _launched(run, DENSE_ON_HOPPER, query, key, value, valid, OVERLAP=False, Q_HELD=False, LAZY=True)


def _launch_skip(
    run: Run,
    arch: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    threshold: float,
    valid: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _, rows, heads, _ = query.shape
    if threshold == 0:
        dense = _launch(run, arch, query, key, value, valid)
        return dense, nothing_skipped(query, heads, rows if valid is None else valid, _SKIP_KEYS)
    counts = query.new_zeros((2,), dtype=torch.int32)
    tiles = _SKIP_AT.get(arch, _SKIP)
    return _launched(run, tiles, query, key, value, valid, counts, threshold), counts


def _by_torch(
    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: int | None,
) -> torch.Tensor:
    """Attention by a function of [batch, heads, rows, D]: padded keys cut off, padded results set to zero."""
    if valid is not None:
        key, value = key[:, :valid], value[:, :valid]
    out = product(*(part.transpose(1, 2) for part in (query, key, value))).transpose(1, 2).contiguous()
    if valid is not None:
        out[:, valid:] = 0
    return out


def _illegal_cudnn(
    arch: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object
) -> str | None:
    for operand in (query, key, value):
        if operand.dtype not in (torch.bfloat16, torch.float16):
            return f"cuDNN has no attention in {str(operand.dtype).removeprefix('torch.')}"
    if query.shape[3] % 8 or query.shape[3] > HEAD_DIM:
        return f"cuDNN takes heads of at most {HEAD_DIM} channels, a multiple of 8"
    return unsupported(arch, (query, key, value))


def _launch_cudnn(
    run: Run, arch: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, valid: int | None = None
) -> torch.Tensor:
    def product(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # No bias, and no sums of exponentials: nothing is trained.
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, None, False
        )[0]
        return out

    return _by_torch(product, query, key, value, valid)


def _legal(arch: str, *_: object) -> str | None:
    return None


def _launch_sdpa(
    run: Run, arch: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, valid: int | None = None
) -> torch.Tensor:
    return _by_torch(torch.nn.functional.scaled_dot_product_attention, query, key, value, valid)


def attention_cost(query: torch.Tensor, kind: str, heads: int, rows: int, width: int, moved: int) -> Cost:
    """Both products of an attention of ``rows`` over ``rows`` in operands of type ``kind``."""
    return Cost({kind: 4 * heads * rows * rows * width}, moved)


def _cost(query: torch.Tensor, *_: object) -> Cost:
    rows, heads, width = query.shape[1:]
    moved = 4 * query.numel() * query.element_size()
    return attention_cost(query, str(query.dtype).removeprefix("torch."), heads, rows, width, moved)


# query, key, value [1, rows, heads, D] with any row stride; returns the same shape, contiguous. Rows from
# ``valid`` on (none when left out) may hold anything: they influence nothing, and their result is zero.
ATTENTION = define(
    "attention",
    "(Tensor query, Tensor key, Tensor value, SymInt? valid=None) -> Tensor",
    reference=_reference,
    fake=_fake,
    cost=_cost,
    providers=(
        Provider("gluon", unsupported_on_hopper, _launch_gluon),
        Provider("cudnn", _illegal_cudnn, _launch_cudnn, library=True),
        Provider("triton", unsupported_dense, _launch),
        Provider("sdpa", _legal, _launch_sdpa, library=True),
    ),
)

# With Skip-Softmax at ``threshold`` (lambda times the number of keys); also returns how many (query tile,
# key tile, head) were skipped and considered, int32 [2].
SKIP_ATTENTION = define(
    "attention.skip",
    "(Tensor query, Tensor key, Tensor value, float threshold, SymInt? valid=None) -> (Tensor, Tensor)",
    reference=_reference_skip,
    fake=_fake_skip,
    cost=_cost,
    providers=(Provider("triton", unsupported_dense, _launch_skip),),
)
