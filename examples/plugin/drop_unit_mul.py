"""`drop-unit-mul`: multiplications by one leave the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from h3compile.pipeline.base import Match, Pass, Rewrite, Tier
from h3compile.program.facts import ModelFacts
from h3compile.program.program import Program
from h3compile.program.region import Port, Region
from h3compile.targets import Target

__all__ = ["DropUnitMul"]


@dataclass(frozen=True)
class DropUnitMul(Pass):
    """Remove ``mul(x, 1)`` where the product has the dtype of x: it is x.

    H3 has one: Diffusers scales the angles of the timestep embedding by a factor that is 1.
    """

    name: ClassVar[str] = "drop-unit-mul"
    tier: ClassVar[Tier] = Tier.EXACT
    # Regions are small once the blocks are outlined, and one edit then counts for all blocks.
    after: ClassVar[tuple[str, ...]] = ("canonicalize", "outline")

    def apply(self, program: Program, target: Target) -> Rewrite:
        matches: list[Match] = []
        regions = {name: _without(region, matches) for name, region in program.regions.items()}
        return Rewrite(program.evolve(regions=regions), tuple(matches))

    def expects(self, facts: ModelFacts) -> Mapping[str, int]:
        return {"multiplication": 1}


def _without(region: Region, matches: list[Match]) -> Region:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in region.graph.nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], copies.__getitem__))
        elif _by_one(node):
            matches.append(Match("multiplication", f"{region.name}/{node.name}"))
            copies[node] = copies[node.args[0]]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return replace(region, graph=graph)


def _by_one(node: fx.Node) -> bool:
    """Whether ``node`` multiplies a tensor by the number one and keeps its dtype."""
    if node.target is not torch.ops.aten.mul.Tensor or isinstance(node.args[1], fx.Node):
        return False
    if node.args[1] != 1 or any(user.op == "output" for user in node.users):
        return False  # a region must compute what it returns
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before, after = source.meta["port"], node.meta["port"]
    assert isinstance(before, Port) and isinstance(after, Port)
    return before.dtype == after.dtype
