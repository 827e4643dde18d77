"""`outline`: repeated blocks become one region, called once a block with other weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from h3compile.errors import BuildError
from h3compile.pipeline.base import Match, Pass, Rewrite, Tier
from h3compile.program.cut import closure, computed, cut, is_tensor, returned
from h3compile.program.facts import Repeat
from h3compile.program.isomorphism import NotIsomorphic, isomorphism
from h3compile.program.program import Call, Level, Program
from h3compile.program.region import Port, Region
from h3compile.targets import Target

__all__ = ["Outline"]


@dataclass(frozen=True)
class Outline(Pass):
    """Cut the one traced region into repeated blocks and the segments between them.

    The facts say where repetition is claimed; a block becomes a call only when it is proven isomorphic
    to the first one. Compile cost then does not grow with depth.
    """

    name: ClassVar[str] = "outline"
    tier: ClassVar[Tier] = Tier.EXACT
    requires: ClassVar[tuple[str, ...]] = ("canonicalize",)
    level: ClassVar[Level | None] = Level.OUTLINED
    default: ClassVar[bool] = True

    def apply(self, program: Program, target: Target) -> Rewrite:
        (call,) = program.calls
        return _Outliner(program, program.regions[call.region], call).run()


@dataclass(frozen=True)
class _Group:
    """The instances of one repeat: their nodes, and each one's map from the first."""

    repeat: Repeat
    instances: tuple[tuple[fx.Node, ...], ...]
    twins: tuple[Mapping[fx.Node, fx.Node], ...]
    outputs: tuple[fx.Node, ...]  # of the first instance


class _Outliner:
    def __init__(self, program: Program, region: Region, call: Call) -> None:
        self.program = program
        self.region = region
        nodes = [node for node in region.graph.nodes if node.op == "placeholder"]
        inputs, weights = nodes[: len(region.inputs)], nodes[len(region.inputs) :]
        # The name each node's value has in the whole program.
        self.values = dict(zip(inputs, call.inputs, strict=True))
        self.tables = dict(zip(weights, call.weights, strict=True))
        self.returned = returned(region.graph)

    def run(self) -> Rewrite:
        groups = [self._group(repeat) for repeat in self.program.facts.repeats]
        owner = {
            node: (g, i)
            for g, group in enumerate(groups)
            for i, instance in enumerate(group.instances)
            for node in instance
        }
        levels = self._levels(groups, owner)
        order = computed(self.region.graph)
        final = dict(zip(self.returned, self.program.outputs, strict=True))

        regions: dict[str, Region] = {}
        calls: list[Call] = []
        for level, name in enumerate(self.program.facts.segments):
            nodes = [node for node in order if node not in owner and levels[node] == level]
            self._segment(name, nodes, final, regions, calls)
            if level < len(groups):
                self._repeat(groups[level], regions, calls)
        matches = tuple(
            Match(group.repeat.region, f"{group.repeat.path}.{i}")
            for group in groups
            for i in range(len(group.instances))
        )
        program = self.program.evolve(regions=regions, calls=tuple(calls), level=Level.OUTLINED)
        return Rewrite(program, matches)

    def _group(self, repeat: Repeat) -> _Group:
        found: list[list[fx.Node]] = [[] for _ in range(repeat.count)]
        prefix = f"{repeat.path}."
        for node in computed(self.region.graph):
            origin = str(node.meta.get("origin", ""))
            if origin.startswith(prefix):
                found[int(origin[len(prefix) :].split(".")[0])].append(node)
        twins: list[Mapping[fx.Node, fx.Node]] = []
        for i, instance in enumerate(found):
            try:
                twins.append(isomorphism(found[0], instance))
            except NotIsomorphic as difference:
                raise BuildError(
                    f"{repeat.path}.{i} is not the same computation as {repeat.path}.0 ({difference})"
                ) from difference
        used: dict[fx.Node, None] = {}
        for node in found[0]:
            for instance, twin in zip(found, twins, strict=True):
                inside = set(instance)
                if any(user not in inside for user in twin[node].users):
                    used[node] = None
        return _Group(repeat, tuple(map(tuple, found)), tuple(twins), tuple(used))

    def _levels(
        self, groups: Sequence[_Group], owner: Mapping[fx.Node, tuple[int, int]]
    ) -> dict[fx.Node, int]:
        """For every node outside the groups, its segment: the last one that serves all its readers.

        As late as possible, so that nothing is kept across a group of blocks that need not be.
        """
        last = len(groups)
        levels: dict[fx.Node, int] = {}
        for node in reversed(computed(self.region.graph)):
            readers = [owner[user][0] if user in owner else levels.get(user, last) for user in node.users]
            levels[node] = min(readers, default=last)
            if node in owner:
                group = owner[node][0]
                if any(level < group for level in readers):
                    raise BuildError(f"{groups[group].repeat.path} feeds an earlier repeat")
                levels[node] = group
        for node, level in levels.items():
            for source in node.all_input_nodes:
                if source in owner and node not in owner and owner[source][0] >= level:
                    path = groups[owner[source][0]].repeat.path
                    raise BuildError(f"{node.name} is needed before {path} ends")
        return levels

    def _segment(
        self,
        name: str,
        nodes: Sequence[fx.Node],
        final: Mapping[fx.Node, str],
        regions: dict[str, Region],
        calls: list[Call],
    ) -> None:
        nodes = closure(nodes)
        inside = set(nodes)
        outputs = [
            node
            for node in nodes
            if is_tensor(node) and (node in final or any(user not in inside for user in node.users))
        ]
        if not outputs:
            return
        for node in outputs:
            self.values[node] = final.get(node, node.name)
        ports = {node: self._slot(node, "") for node in self.tables}
        piece = cut(name, nodes, outputs, ports)
        regions[name] = piece.region
        calls.append(
            Call(
                name,
                0,
                tuple(self.values[node] for node in piece.inputs),
                tuple(self.tables[node] for node in piece.weights),
                tuple(self.values[node] for node in outputs),
            )
        )

    def _repeat(self, group: _Group, regions: dict[str, Region], calls: list[Call]) -> None:
        name = group.repeat.region
        slots = {node: self._slot(node, f"{group.repeat.path}.0.") for node in self.tables}
        piece = cut(name, group.instances[0], group.outputs, slots)
        regions[name] = piece.region
        for i, twin in enumerate(group.twins):
            for node in group.outputs:
                self.values[twin[node]] = f"{name}.{i}.{node.name}"
            calls.append(
                Call(
                    name,
                    i,
                    tuple(self.values[twin[node]] for node in piece.inputs),
                    tuple(self.tables[twin[node]] for node in piece.weights),
                    tuple(self.values[twin[node]] for node in group.outputs),
                )
            )

    def _slot(self, node: fx.Node, prefix: str) -> Port:
        port = node.meta["port"]
        assert isinstance(port, Port)
        return Port(self.tables[node].removeprefix(prefix), port.dtype, port.shape)
