"""A linear on FP8 operands, quantized where its input is made."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from h3compile.errors import BuildError
from h3compile.program.edit import Editor
from h3compile.program.region import Port

__all__ = ["Quantized", "quantize_linear"]

aten, ours = torch.ops.aten, torch.ops.h3compile

# Tensor cores take E4M3 rows in whole 16-byte pieces.
_MULTIPLE = 16

# Operators that can give their result quantized: the FP8 form, and how many results come before it.
_QUANTIZING: Mapping[object, tuple[torch._ops.OpOverload, int]] = {
    ours.norm_modulate.default: (ours.norm_modulate.fp8, 0),
    ours.gate_norm_modulate.default: (ours.gate_norm_modulate.fp8, 1),
    ours.swiglu.default: (ours.swiglu.fp8, 0),
}


@dataclass(frozen=True)
class Quantized:
    """A weight that was quantized: its port before, and the ports of values, scales and input scale."""

    weight: Port
    values: Port
    scales: Port
    input_scale: Port | None


def quantize_linear(edit: Editor, linear: fx.Node, *, static: bool) -> Quantized:
    """Replace ``linear``, whose weight is one of the region's, by `linear_fp8`.

    Its input comes quantized from the operator that makes it where that can and nothing else reads it,
    else from `quantize_rows`; with ``static`` by a calibrated scale, a new weight of one number.

    Raises `BuildError` when a side of the matrix is no multiple of 16.
    """
    port = edit.weight_of(linear.args[1])
    assert port is not None, linear
    rows, width = port.shape
    if not isinstance(rows, int) or not isinstance(width, int) or rows % _MULTIPLE or width % _MULTIPLE:
        raise BuildError(
            f"{port.name} is {rows} by {width}: FP8 needs multiples of {_MULTIPLE}",
            "build without fp8, or keep it with fp8(keep=...)",
        )
    stem = port.name.removesuffix(".weight")
    values = edit.retype_weight(port, torch.float8_e4m3fn)
    scales = Port(f"{stem}.weight_scale", torch.float32, (rows,))
    scale_node = edit.add_weight(scales, values)
    input_scale = Port(f"{stem}.input_scale", torch.float32, (1,)) if static else None
    static_node = None if input_scale is None else edit.add_weight(input_scale, scales)
    found = Quantized(port, values, scales, input_scale)
    x, x_scale = _quantized_input(edit, linear, static_node)
    bias = linear.args[2] if len(linear.args) > 2 else None
    operands = (x, x_scale, linear.args[1], scale_node, bias, _dtype(linear))
    edit.replace(linear, ours.linear_fp8.default, *operands, name="product")
    edit.sweep()
    return found


def _dtype(node: fx.Node) -> torch.dtype:
    port = node.meta["port"]
    assert isinstance(port, Port)
    return port.dtype


def _quantized_input(edit: Editor, linear: fx.Node, static: fx.Node | None) -> tuple[fx.Node, fx.Node]:
    source = linear.args[0]
    assert isinstance(source, fx.Node)
    maker = source.args[0] if source.target is operator.getitem else source
    assert isinstance(maker, fx.Node)
    form = _QUANTIZING.get(maker.target)
    if form is None or set(source.users) != {linear}:
        both = edit.add(linear, ours.quantize_rows.default, source, static, name="quantized")
        return _results(edit, linear, both, 0)
    target, at = form
    both = edit.add(maker, target, *maker.args, static, name=f"{_stem(maker)}_fp8")
    for reader in list(maker.users):
        # Results in front of the quantized one, such as the residual, keep their place.
        if reader.target is operator.getitem and reader is not source:
            reader.args = (both, reader.args[1])
    return _results(edit, linear, both, at)


def _stem(node: fx.Node) -> str:
    return node.name.rstrip("0123456789").rstrip("_")


def _results(edit: Editor, before: fx.Node, both: fx.Node, at: int) -> tuple[fx.Node, fx.Node]:
    values = edit.result(before, both, at, name="values")
    return values, edit.result(before, both, at + 1, name="scales")
