"""Patterns over graphs: a small tree of operators and variables, matched upwards from one node."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

__all__ = ["Found", "Op", "Pattern", "Var", "equivalent", "match"]

aten = torch.ops.aten

_COMMUTATIVE = frozenset({aten.add.Tensor, aten.mul.Tensor})

# Views and tuple parts: another reader of one does not keep the computation behind it alive.
_FREE = frozenset(
    {
        operator.getitem,
        aten.chunk.default,
        aten.flatten.using_ints,
        aten.permute.default,
        aten.slice.Tensor,
        aten.unflatten.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)


@dataclass(frozen=True)
class Var:
    """Anything: a node or a constant. The same name stands for one value everywhere in a pattern."""

    name: str


@dataclass(frozen=True, init=False)
class Op:
    """A call of ``target`` whose arguments match; operands of a sum or product in either order.

    Arguments are patterns or constants, in lists where the operator takes a list. ``name`` binds the
    node itself; ``shared`` lets it have readers outside the match, for which the rewrite must provide.
    Keyword arguments never match: what they would change is not what the pattern means.
    """

    target: object
    arguments: tuple[Pattern, ...]
    name: str | None
    shared: bool

    def __init__(
        self, target: object, *arguments: Pattern, name: str | None = None, shared: bool = False
    ) -> None:
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "arguments", arguments)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "shared", shared)


Pattern = Op | Var | int | float | bool | None | list["Pattern"]


@dataclass(frozen=True)
class Found:
    """A match: what the variables stand for, the nodes of the pattern's operators, and the shared ones."""

    values: Mapping[str, fx.node.Argument]
    nodes: frozenset[fx.Node]
    shared: frozenset[fx.Node]

    def node(self, name: str) -> fx.Node:
        """The node bound to ``name``."""
        value = self.values[name]
        assert isinstance(value, fx.Node), name
        return value

    def integer(self, name: str) -> int:
        """The integer bound to ``name``."""
        value = self.values[name]
        assert isinstance(value, int), name
        return value

    def number(self, name: str) -> float:
        """The number bound to ``name``."""
        value = self.values[name]
        assert isinstance(value, int | float), name
        return float(value)


def match(pattern: Op, root: fx.Node) -> Found | None:
    """How ``pattern`` matches the graph that ends in ``root``, or ``None``.

    A match in which a computed intermediate has a reader outside does not count: a fused operator would
    not give that value. Views may be read from anywhere.
    """
    for found in _match(pattern, root, Found({}, frozenset(), frozenset())):
        if all(_contained(node, root, found.nodes) for node in found.nodes - found.shared):
            return found
    return None


def _contained(node: fx.Node, root: fx.Node, inside: frozenset[fx.Node]) -> bool:
    return node is root or node.target in _FREE or inside.issuperset(node.users)


def _match(pattern: Pattern, value: object, found: Found) -> Iterator[Found]:
    match pattern:
        case Var(name):
            if name not in found.values:
                yield Found({**found.values, name: value}, found.nodes, found.shared)  # type: ignore[dict-item]
            elif equivalent(found.values[name], value):
                yield found
        case Op():
            if isinstance(value, fx.Node) and value.target == pattern.target and not value.kwargs:
                yield from _match_node(pattern, value, found)
        case list():
            if isinstance(value, list | tuple) and len(value) == len(pattern):
                yield from _match_all(pattern, list(value), found)
        case _:
            # Numbers by value: the graph says 1.0 where a person says 1.
            if not isinstance(value, fx.Node) and value == pattern:
                yield found


def _match_node(pattern: Op, node: fx.Node, found: Found) -> Iterator[Found]:
    if len(node.args) != len(pattern.arguments):
        return
    values = dict(found.values)
    if pattern.name is not None and values.setdefault(pattern.name, node) is not node:
        return
    shared = found.shared | {node} if pattern.shared else found.shared
    inside = Found(values, found.nodes | {node}, shared)
    yield from _match_all(list(pattern.arguments), list(node.args), inside)
    if pattern.target in _COMMUTATIVE:
        first, second, *rest = node.args
        yield from _match_all(list(pattern.arguments), [second, first, *rest], inside)


def _match_all(patterns: list[Pattern], values: list[object], found: Found) -> Iterator[Found]:
    if not patterns:
        yield found
        return
    for partial in _match(patterns[0], values[0], found):
        yield from _match_all(patterns[1:], values[1:], partial)


def equivalent(first: object, second: object) -> bool:
    """Whether two arguments are one value: one node, equal constants, or equal operators on such."""
    if isinstance(first, fx.Node) and isinstance(second, fx.Node):
        if first is second:
            return True
        alike = first.op == second.op == "call_function" and first.target == second.target
        return alike and equivalent((first.args, first.kwargs), (second.args, second.kwargs))
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(equivalent(one, other) for one, other in pairs)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(equivalent(first[key], second[key]) for key in first)
    return type(first) is type(second) and first == second
