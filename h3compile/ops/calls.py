"""A call of every operator, at any size: what the report of kernels compiles and the tests run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from h3compile.ops.exchange_groups import RING, ULYSSES
from h3compile.ops.numerics import FP8
from h3compile.ops.operator import Operand
from h3compile.ops.sage_quantized import QK_TYPES
from h3compile.ops.sage_scales import K_BLOCKS, WHOLE

__all__ = ["RELEASE", "Call", "Sizes", "calls"]

_EPS = 1e-5
_TABLE_ROWS = 6


@dataclass(frozen=True)
class Sizes:
    """The widths of a model, in channels; ``turned`` is how many of a head's are rotated."""

    hidden: int
    inner: int
    heads: int
    head_dim: int
    turned: int
    text: int


RELEASE = Sizes(hidden=5376, inner=14336, heads=56, head_dim=128, turned=96, text=5120)


@dataclass(frozen=True)
class Call:
    """Operands of the operator ``operator``, with a word on what they are."""

    operator: str
    label: str
    operands: tuple[Operand, ...]


def calls(sizes: Sizes, rows: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Iterator[Call]:
    """The calls of a block of ``sizes`` on ``rows`` rows, random operands; fake ones under a fake mode."""

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device) + 0.5

    hidden, inner = sizes.hidden, sizes.inner
    x, branch = normal(1, rows, hidden), normal(1, rows, hidden)
    table = normal(_TABLE_ROWS, 6 * hidden)
    index = torch.randint(0, _TABLE_ROWS, (rows,), device=device)
    modulation = (normal(hidden), table, index)
    static = scales(1)
    yield Call("norm_modulate.default", "", (x, *modulation, 0, 1, _EPS))
    yield Call("norm_modulate.fp8", "", (x, *modulation, 0, 1, _EPS))
    yield Call("norm_modulate.fp8", "static scale", (x, *modulation, 0, 1, _EPS, static))
    yield Call("gate_norm_modulate.default", "", (x, branch, *modulation, 2, 3, 4, _EPS))
    yield Call("gate_norm_modulate.fp8", "", (x, branch, *modulation, 2, 3, 4, _EPS))
    yield Call("gate_norm_modulate.fp8", "static scale", (x, branch, *modulation, 2, 3, 4, _EPS, static))
    yield Call("gate_residual.default", "", (x, branch, table, index, 5))
    halves = normal(1, rows, 2 * inner)
    yield Call("swiglu.default", "value first", (halves, False))
    yield Call("swiglu.default", "gate first", (halves, True))
    yield Call("swiglu.fp8", "", (halves, False))
    yield Call("swiglu.fp8", "static scale", (halves, False, static))
    attended = sizes.heads * sizes.head_dim
    for width in dict.fromkeys((hidden, attended, inner, sizes.text)):
        yield Call("quantize_rows.default", str(width), (normal(1, rows, width),))
    yield Call("quantize_rows.default", "static scale", (normal(1, rows, attended), static))
    yield Call("quantize_rows.default", "heads", (normal(1, rows, sizes.heads, sizes.head_dim),))
    linears = ((3 * attended, hidden), (hidden, attended), (2 * inner, hidden), (hidden, inner))
    for n, k in (*linears, (hidden, sizes.text)):
        bias = normal(n) if k == sizes.text else None
        operands = (normal(1, rows, k, dtype=FP8), scales(1, rows, 1), normal(n, k, dtype=FP8), scales(n))
        yield Call("linear_fp8.default", f"{n} x {k}", (*operands, bias, dtype))
    yield from _attention(sizes, rows, dtype, device)
    # A rank alone: exchanges of several are tested with several.
    yield Call("rows_to_heads.default", "", (normal(1, rows, 3 * attended), rows - 1, 3, 1, ULYSSES))
    yield Call("heads_to_rows.default", "", (normal(1, rows, attended), rows, 1, ULYSSES))
    yield Call("gather_rows.default", "", (normal(1, rows, hidden), rows - 1, 1, ULYSSES))


def _attention(sizes: Sizes, rows: int, dtype: torch.dtype, device: torch.device | str) -> Iterator[Call]:
    heads, width = sizes.heads, sizes.head_dim
    qkv = torch.randn(1, rows, 3 * heads * width, device=device).to(dtype)
    weights = [torch.randn(width, device=device).to(dtype) for _ in range(2)]
    tables = [torch.randn(rows, sizes.turned, device=device).to(dtype) for _ in range(2)]
    joint: dict[str, tuple[Operand, ...]] = {
        "rotary": (qkv, *weights, *tables, heads, _EPS),
        "no rotary": (qkv, *weights, None, None, heads, _EPS),
    }
    for label, operands in joint.items():
        yield Call("qk_norm_rope.default", label, operands)
    parts = qkv.view(1, rows, 3, heads, width).unbind(2)
    valid = rows - 1
    yield Call("attention.default", "", (*parts, None))
    yield Call("attention.default", "padded", (*parts, valid))
    yield Call("attention.skip", "", (*parts, 1.0, valid))
    yield Call("ring_attention.default", "", (*parts, valid, 1, RING))
    for qk in QK_TYPES:
        for block in (*K_BLOCKS, WHOLE) if qk == "fp8_e4m3" else K_BLOCKS:
            options: tuple[Operand, ...] = (qk, block, True, valid)
            label = f"{qk}, one scale a tensor" if block == WHOLE else f"{qk}, {block} keys a scale"
            yield Call("sage_prepare.default", label, (*joint["rotary"], *options))
            yield Call("sage_prepare.separate", label, (*parts, *options))
            quantized = torch.ops.h3compile.sage_prepare.separate(*parts, *options)
            yield Call("sage_attention.default", label, (*quantized, block, dtype, valid))
            yield Call("sage_attention.skip", label, (*quantized, block, dtype, 1.0, valid))
        yield Call("sage_prepare.default", f"{qk}, no rotary", (*joint["no rotary"], qk, 64, True, valid))
        yield Call("sage_prepare.default", f"{qk}, not smoothed", (*joint["rotary"], qk, 64, False, valid))
        yield Call("sage_prepare.separate", f"{qk}, not smoothed", (*parts, qk, 64, False, valid))
