"""Rows for heads and back, as they are or in FP8: a scale for every row and head goes along."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from h3compile.ops.exchange_groups import ULYSSES
from h3compile.program.edit import Editor
from h3compile.program.parallel import Parallel
from h3compile.program.region import Port

__all__ = ["heads_to_rows", "rows_to_heads"]

aten, ours = torch.ops.aten, torch.ops.h3compile

# A new operator behind all those made so far.
_Add = Callable[..., fx.Node]


def rows_to_heads(
    edit: Editor, source: fx.Node, rows: fx.Node, parts: int, width: int, parallel: Parallel
) -> fx.Node:
    """All ``rows`` of this rank's heads, of ``width`` channels, from all heads of its own rows.

    ``source`` [1, L, parts*H*width] has ``parts`` of all heads, one behind the other.
    """
    if parallel.ulysses == 1:
        return source
    add = _behind(edit, source)
    common = (rows, parts, parallel.ulysses, ULYSSES)
    if parallel.exchange == "plain":
        return add(ours.rows_to_heads.default, source, *common, name="heads")
    values, scales = (
        add(ours.rows_to_heads.default, sent, *common, name="heads")
        for sent in _quantized(add, source, width)
    )
    return _restored(add, source, values, scales, width)


def heads_to_rows(edit: Editor, source: fx.Node, local: fx.Node, width: int, parallel: Parallel) -> fx.Node:
    """All heads of this rank's ``local`` rows, from all rows of its own heads, ``source`` [1, rows, W]."""
    if parallel.ulysses == 1:
        return source
    add = _behind(edit, source)
    common = (local, parallel.ulysses, ULYSSES)
    if parallel.exchange == "plain":
        return add(ours.heads_to_rows.default, source, *common, name="attended")
    values, scales = (
        add(ours.heads_to_rows.default, sent, *common, name="attended")
        for sent in _quantized(add, source, width)
    )
    return _restored(add, source, values, scales, width)


def _behind(edit: Editor, source: fx.Node) -> _Add:
    before = source.next

    def add(target: Callable[..., object], *arguments: fx.node.Argument, name: str) -> fx.Node:
        return edit.add(before, target, *arguments, name=name, origin=source)

    return add


def _quantized(add: _Add, source: fx.Node, width: int) -> tuple[fx.Node, fx.Node]:
    """E4M3 values in the shape of ``source`` [1, R, n*width], and their scales [1, R, n]."""
    heads = add(aten.unflatten.int, source, -1, [-1, width], name="by_head")
    both = add(ours.quantize_rows.default, heads, None, name="quantized")
    values, scales = (
        add(operator.getitem, both, place, name=("values", "scales")[place]) for place in (0, 1)
    )
    return (
        add(aten.flatten.using_ints, values, 2, 3, name="sent"),
        add(aten.flatten.using_ints, scales, 2, 3, name="sent_scales"),
    )


def _restored(add: _Add, source: fx.Node, values: fx.Node, scales: fx.Node, width: int) -> fx.Node:
    """``values`` [1, R, n*width] times ``scales`` [1, R, n], in the dtype of ``source``."""
    port = source.meta["port"]
    assert isinstance(port, Port)
    heads = add(aten.unflatten.int, values, -1, [-1, width], name="by_head")
    numbers = add(aten.to.dtype, heads, torch.float32, name="numbers")
    each = add(aten.unsqueeze.default, scales, -1, name="each")
    product = add(aten.mul.Tensor, numbers, each, name="scaled")
    rounded = add(aten.to.dtype, product, port.dtype, name="restored")
    return add(aten.flatten.using_ints, rounded, 2, 3, name="heads")
