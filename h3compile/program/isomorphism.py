"""Proof that two pieces of a graph are the same computation on other inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from h3compile.program.region import Port

__all__ = ["NotIsomorphic", "isomorphism"]


class NotIsomorphic(Exception):
    """Two pieces differ; the message says where."""


def isomorphism(reference: Sequence[fx.Node], other: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The map from every node of ``reference``, and every value it reads, to its twin in ``other``.

    Both pieces are in graph order. Proven node by node: equal operator, equal constants, inner operands
    that correspond, outer operands that correspond one to one, equal dtype and shape (or value, of a
    length) of every result and of every outer operand. Raises `NotIsomorphic` at the first difference.
    """
    if len(reference) != len(other):
        raise NotIsomorphic(f"{len(reference)} nodes against {len(other)}")
    inner = set(reference)
    inner_other = set(other)
    forward: dict[fx.Node, fx.Node] = {}
    backward: dict[fx.Node, fx.Node] = {}

    def pair(a: fx.Node, b: fx.Node, at: fx.Node) -> None:
        if (a in inner) != (b in inner_other):
            raise NotIsomorphic(f"at {at.name}: one operand is computed inside, its twin outside")
        if forward.setdefault(a, b) is not b or backward.setdefault(b, a) is not a:
            raise NotIsomorphic(f"at {at.name}: operand {a.name} already corresponds to another value")
        if _signature(a) != _signature(b):
            raise NotIsomorphic(f"at {at.name}: {a.name} is {_signature(a)}, {b.name} is {_signature(b)}")

    def compare(a: object, b: object, at: fx.Node) -> None:
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            pair(a, b, at)
        elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
            if len(a) != len(b):
                raise NotIsomorphic(f"at {at.name}: {len(a)} operands against {len(b)}")
            for left, right in zip(a, b, strict=True):
                compare(left, right, at)
        elif type(a) is not type(b) or repr(a) != repr(b):  # repr tells 0.0 from -0.0
            raise NotIsomorphic(f"at {at.name}: constant {a!r} against {b!r}")

    for a, b in zip(reference, other, strict=True):
        if a.target is not b.target:
            raise NotIsomorphic(f"at {a.name}: operator {a.target} against {b.target}")
        compare(a.args, b.args, a)
        compare(sorted(a.kwargs.items()), sorted(b.kwargs.items()), a)
        pair(a, b, a)
    return forward


def _signature(node: fx.Node) -> tuple[object, ...]:
    port, value = node.meta.get("port"), node.meta.get("val")
    if isinstance(port, Port):
        return (port.dtype, port.shape)
    return (str(value),) if isinstance(value, int | torch.SymInt) else ()
