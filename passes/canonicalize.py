"""`canonicalize`: what computes nothing leaves the graph."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from h3compile.pipeline.base import Match, Pass, Rewrite, Tier
from h3compile.program.program import Level, Program
from h3compile.program.region import Port, Region
from h3compile.targets import Target

__all__ = ["Canonicalize"]

aten = torch.ops.aten

# Checks that torch.export adds; they return nothing, and the verifier propagates every shape anyway.
_ASSERTIONS = frozenset(
    {aten._assert_tensor_metadata.default, aten._assert_scalar.default, aten._assert_async.msg}
)

# With one of these given, a cast may copy to another device or layout.
_PLACEMENT = frozenset({"device", "layout", "memory_format"})


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Remove assertions, casts to the same dtype, dropout of an inference graph and whole-range slices."""

    name: ClassVar[str] = "canonicalize"
    tier: ClassVar[Tier] = Tier.EXACT
    level: ClassVar[Level | None] = Level.CANONICAL
    default: ClassVar[bool] = True

    def apply(self, program: Program, target: Target) -> Rewrite:
        matches: list[Match] = []
        regions = {name: _clean(region, matches) for name, region in program.regions.items()}
        return Rewrite(program.evolve(regions=regions, level=Level.CANONICAL), tuple(matches))


def _clean(region: Region, matches: list[Match]) -> Region:
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in region.graph.nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], mapping.__getitem__))
            continue
        kind = _nothing(node)
        if kind is None:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
            continue
        matches.append(Match(kind, f"{region.name}/{node.name}"))
        if kind != "assertion":
            mapping[node] = mapping[node.args[0]]
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            matches.append(Match("dead", f"{region.name}/{node.name}"))
            graph.erase_node(node)
    return Region(region.name, graph, region.inputs, region.weights, region.outputs)


def _nothing(node: fx.Node) -> str | None:
    """What kind of nothing ``node`` computes, or ``None`` when it computes something."""
    if node.op != "call_function":
        return None
    if node.target in _ASSERTIONS:
        return "assertion"
    if node.target is aten.dropout.default:
        _, probability, training = node.args
        return "dropout" if not training or probability == 0.0 else None
    if node.target in (aten.to.dtype, aten._to_copy.default, aten.type_as.default):
        return "cast" if _same_type(node) else None
    if node.target is aten.slice.Tensor:
        start, end = node.args[2:4] if len(node.args) > 3 else (None, None)
        whole = start in (0, None) and end == sys.maxsize and len(node.args) < 5
        return "slice" if whole else None
    return None


def _same_type(node: fx.Node) -> bool:
    if any(node.kwargs.get(key) is not None for key in _PLACEMENT):
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before, after = source.meta.get("port"), node.meta.get("port")
    return isinstance(before, Port) and isinstance(after, Port) and before.dtype == after.dtype
