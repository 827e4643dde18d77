"""Attention, and the norms and rotations in front of it, become operators that read the joint projection."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from h3compile.program.edit import Editor
from h3compile.program.pattern import Found, Op, Pattern, Var, equivalent, match

__all__ = ["fuse_query_and_key", "name_attention"]

aten, ours = torch.ops.aten, torch.ops.h3compile

_HEADS_FIRST = [0, 2, 1, 3]


def _permuted(operand: Pattern) -> Op:
    return Op(aten.permute.default, operand, list(_HEADS_FIRST))


_ATTENTION = _permuted(
    Op(
        aten.scaled_dot_product_attention.default,
        *(_permuted(Var(name)) for name in ("query", "key", "value")),
    )
)

# Rows of one head: a slice of the joint projection, in heads, normed.
_HEADS = Op(
    aten.unflatten.int,
    Op(aten.slice.Tensor, Var("qkv"), -1, Var("start"), Var("end")),
    -1,
    [Var("heads"), -1],
)
_NORMED = Op(aten.rms_norm.default, _HEADS, [Var("width")], Var("weight"), Var("eps"))


def _rotary(name: str) -> Op:
    return Op(aten.unsqueeze.default, Op(aten.unsqueeze.default, Var(name), 0), 2)


_TURNED = Op(aten.slice.Tensor, _NORMED, 3, 0, Var("turned"))
_HALVES = Op(aten.chunk.default, _TURNED, 2, -1)
_CROSSED = Op(
    aten.cat.default,
    [Op(aten.neg.default, Op(operator.getitem, _HALVES, 1)), Op(operator.getitem, _HALVES, 0)],
    -1,
)
_ROTATED = Op(
    aten.cat.default,
    [
        Op(
            aten.add.Tensor,
            Op(aten.mul.Tensor, _TURNED, _rotary("cos")),
            Op(aten.mul.Tensor, _CROSSED, _rotary("sin")),
        ),
        Op(aten.slice.Tensor, _NORMED, 3, Var("turned"), Var("whole")),
    ],
    -1,
)


def name_attention(edit: Editor) -> list[fx.Node]:
    """Scaled dot-product attention between transposes -> `attention`, which takes rows as they lie."""
    named = []
    for root in edit.nodes():
        found = match(_ATTENTION, root)
        if found is None:
            continue
        operands = (found.values[name] for name in ("query", "key", "value"))
        named.append(edit.replace(root, ours.attention.default, *operands, name="attention"))
    edit.sweep()
    return named


@dataclass(frozen=True)
class _Head:
    """A normed (and rotated) query or key: the node that gives it, and what it was made of."""

    node: fx.Node
    found: Found

    @property
    def source(self) -> tuple[object, ...]:
        """What query and key must have in common."""
        values = self.found.values
        return values["qkv"], values["heads"], values["eps"], values.get("cos"), values.get("sin")


def fuse_query_and_key(edit: Editor) -> list[fx.Node]:
    """Norm and rotation of the first two thirds of a joint projection -> `qk_norm_rope`."""
    fused = []
    for attention in edit.nodes():
        if attention.target is not ours.attention.default:
            continue
        query, key = (_head(node) for node in attention.args[:2])
        if query is None or key is None or not _thirds(query, key):
            continue
        values = query.found.values
        both = edit.add(
            attention,
            ours.qk_norm_rope.default,
            values["qkv"],
            values["weight"],
            key.found.values["weight"],
            values.get("cos"),
            values.get("sin"),
            values["heads"],
            values["eps"],
            name="query_and_key",
            origin=query.node,
        )
        for place, head in enumerate((query, key)):
            part = edit.add(
                attention, operator.getitem, both, place, name=("query", "key")[place], origin=head.node
            )
            head.node.replace_all_uses_with(part)
        fused.append(both)
    edit.sweep()
    return fused


def _head(node: object) -> _Head | None:
    if not isinstance(node, fx.Node):
        return None
    found = match(_ROTATED, node) or match(_NORMED, node)
    return None if found is None else _Head(node, found)


def _thirds(query: _Head, key: _Head) -> bool:
    """Whether the two are the first and second third of one projection, treated alike."""
    first, second = query.found, key.found
    width = first.integer("heads") * first.integer("width")
    spans = [(found.integer("start"), found.integer("end")) for found in (first, second)]
    return equivalent(query.source, key.source) and spans == [(0, width), (width, 2 * width)]
