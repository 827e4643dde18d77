"""Dense attention becomes SAGE: quantized operands, made from the joint projection where it is there."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from h3compile.program.edit import Editor
from h3compile.program.pattern import Op, Var, match
from h3compile.program.region import Port

__all__ = ["SageOptions", "quantize_attention"]

aten, ours = torch.ops.aten, torch.ops.h3compile

_QUERY_AND_KEY = Op(
    ours.qk_norm_rope.default,
    *(Var(name) for name in ("qkv", "q_weight", "k_weight", "cos", "sin", "heads", "eps")),
    name="both",
    shared=True,
)
_VALUE = Op(
    aten.unflatten.int,
    Op(aten.slice.Tensor, Var("qkv"), -1, Var("start"), Var("end")),
    -1,
    [Var("heads"), -1],
)


@dataclass(frozen=True)
class SageOptions:
    """How operands are quantized: the type of q and k, keys that share a scale (0: all of them, and all
    queries one too), K's mean removed or not."""

    qk: str
    k_block: int
    smooth: bool


def quantize_attention(edit: Editor, node: fx.Node, options: SageOptions) -> fx.Node:
    """Replace the `attention` ``node``; returns the `sage_attention` in its place."""
    chosen = (options.qk, options.k_block, options.smooth)
    joint = _joint(node)
    if joint is not None:
        prepared = edit.add(node, ours.sage_prepare.default, *joint, *chosen, name="prepared")
    else:
        prepared = edit.add(node, ours.sage_prepare.separate, *node.args[:3], *chosen, name="prepared")
    names = ("q", "q_scale", "k", "k_scale", "v", "v_scale")
    parts = [edit.result(node, prepared, place, name=name) for place, name in enumerate(names)]
    port = node.meta["port"]
    assert isinstance(port, Port)
    operands: tuple[fx.node.Argument, ...] = (*parts, options.k_block, port.dtype)
    sage = edit.replace(node, ours.sage_attention.default, *operands, name="attention")
    edit.sweep()
    return sage


def _joint(node: fx.Node) -> tuple[fx.node.Argument, ...] | None:
    """The operands of `sage_prepare` when query, key and value come from one projection, else None."""
    query, key, value = node.args[:3]
    if not all(isinstance(part, fx.Node) for part in (query, key, value)):
        return None
    first = match(Op(operator.getitem, _QUERY_AND_KEY, 0), query)  # type: ignore[arg-type]
    second = match(Op(operator.getitem, _QUERY_AND_KEY, 1), key)  # type: ignore[arg-type]
    third = match(_VALUE, value)  # type: ignore[arg-type]
    if first is None or second is None or third is None:
        return None
    if first.values["both"] is not second.values["both"]:
        return None
    if any(first.values[name] != third.values[name] for name in ("qkv", "heads")):
        return None
    # The third third: what it starts at is twice its width.
    if 3 * third.integer("start") != 2 * third.integer("end"):
        return None
    return tuple(first.values[name] for name in ("qkv", "q_weight", "k_weight", "cos", "sin", "heads", "eps"))
