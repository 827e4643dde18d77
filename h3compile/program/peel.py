"""Peeling: the work of an earlier stage leaves the regions that run in the step.

`hoist` peels the request stage and `fold-schedule` the schedule stage; both are this one rewrite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from h3compile.errors import BuildError
from h3compile.program.analysis import execution_stages, mark
from h3compile.program.cut import Piece, closure, computed, cut, leaving, returned
from h3compile.program.merge import merge_calls, share_equal
from h3compile.program.program import Call, Program
from h3compile.program.region import Region
from h3compile.program.stages import Stage

__all__ = ["Peeled", "peel"]

aten = torch.ops.aten

# Operators that only move or rename data. At the edge of what is peeled they stay in the step: there
# they cost nothing, while peeling them would keep their result, often larger than its source, in memory.
_MOVEMENT = frozenset(
    {
        aten.chunk.default,
        aten.expand.default,
        aten.flatten.using_ints,
        aten.index_copy.default,
        aten.index_select.default,
        aten.new_zeros.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.dim,
        aten.sym_size.int,
        aten.transpose.int,
        aten.unbind.int,
        aten.unflatten.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)


@dataclass(frozen=True)
class Peeled:
    """The rewritten program, and the values that later stages now read instead of computing."""

    program: Program
    values: tuple[str, ...]


def peel(program: Program, stage: Stage) -> Peeled:
    """Move all work of ``stage`` into calls of its own, which run before the step.

    Work that is the same in every call of a region (it reads neither weights nor anything that differs
    between the calls) is done once. Calls of one stage are merged where their order allows it. Raises
    `BuildError` when such work lies in a region with variants: all of them would have to lose it alike.
    """
    marks = mark(program)
    for name in program.regions:
        if set(marks.nodes[name].values()) <= {stage, Stage.BUILD}:
            continue  # the whole region is of this stage already
        shared = share_equal(program, name)
        taken = _taken(shared.regions[name], marks.nodes[name], stage)
        if taken and program.base_of(name) in program.variants:
            raise BuildError(f"the {stage.value} work of {name} cannot leave it once there are variants")
        if taken:
            program = _Splitter(shared, shared.regions[name], marks.nodes[name], taken, stage).run()
    program = merge_calls(program)
    return Peeled(program, _crossing(program, stage))


def _taken(region: Region, marks: Mapping[str, Stage], stage: Stage) -> set[fx.Node]:
    nodes = computed(region.graph)
    taken = {node for node in nodes if marks[node.name] is stage}
    # Back from the edge: what only moves data, and is read only by what stays, stays.
    for node in reversed(nodes):
        if node in taken and _moves(node) and not any(user in taken for user in node.users):
            taken.remove(node)
    return taken


def _moves(node: fx.Node) -> bool:
    return node.target in _MOVEMENT or getattr(node.target, "__module__", "") == "_operator"


class _Splitter:
    """Splits one region in three: peeled once for all calls, peeled for each call, and the rest."""

    def __init__(
        self,
        program: Program,
        region: Region,
        marks: Mapping[str, Stage],
        taken: set[fx.Node],
        stage: Stage,
    ) -> None:
        self.program = program
        self.region = region
        self.taken = taken
        self.stage = stage
        self.own = program.calls_of(region.name)
        placeholders = [node for node in region.graph.nodes if node.op == "placeholder"]
        self.inputs = placeholders[: len(region.inputs)]
        self.slots = placeholders[len(region.inputs) :]
        self.returned = returned(region.graph)
        self.values = {port.name for port in program.inputs}
        self.values |= {value for call in program.calls for value in call.outputs}
        self.constant: Callable[[fx.Node], bool] = lambda node: marks[node.name] is Stage.BUILD

    def run(self) -> Program:
        varying = self._varying()
        nodes = computed(self.region.graph)
        common = closure([node for node in self.taken if node not in varying], self.constant)
        each = closure([node for node in self.taken if node in varying], self.constant)
        rest = closure(
            [
                node
                for node in nodes
                if node not in self.taken and (node in self.returned or not self.constant(node))
            ],
            self.constant,
        )
        stays = [node for node in self.returned if node in set(rest)]
        ports = dict(zip(self.slots, self.region.weights, strict=True))

        # For every call, the program-wide name of each value its pieces exchange.
        names: list[dict[fx.Node, str]] = [
            dict(zip((*self.inputs, *self.returned), (*call.inputs, *call.outputs), strict=True))
            for call in self.own
        ]
        prefix = f"{self.region.name}.{self.stage.value}"
        regions = dict(self.program.regions)
        # What runs before each call: its own piece, and before the first the one that serves all.
        before: list[list[Call]] = [[] for _ in self.own]
        if outputs := leaving(common, (each, rest)):
            piece = cut(f"{prefix}.common", common, outputs, ports)
            for node in outputs:
                value = self._fresh(f"{self.region.name}.{node.name}")
                for known in names:
                    known.setdefault(node, value)
            regions[piece.region.name] = piece.region
            before[0].append(self._call(piece, 0, names))
        outputs = leaving(each, (common, rest))
        outputs += [node for node in self.returned if node in set(each) and node not in outputs]
        if outputs:
            piece = cut(prefix, each, outputs, ports)
            for call, known in zip(self.own, names, strict=True):
                for node in outputs:
                    if node not in known:
                        known[node] = self._fresh(f"{call.name}.{node.name}")
            regions[prefix] = piece.region
            for i, pieces in enumerate(before):
                pieces.append(self._call(piece, i, names))

        remainder = cut(self.region.name, rest, stays, ports)
        regions[self.region.name] = remainder.region
        split = {call: (*before[i], self._call(remainder, i, names)) for i, call in enumerate(self.own)}
        calls = [piece for call in self.program.calls for piece in split.get(call, (call,))]
        return self.program.evolve(regions=regions, calls=tuple(calls))

    def _fresh(self, name: str) -> str:
        """``name``, or with a number where the program has it: nodes are counted anew in every region."""
        unique, count = name, 1
        while unique in self.values:
            count += 1
            unique = f"{name}_{count}"
        self.values.add(unique)
        return unique

    def _varying(self) -> set[fx.Node]:
        """The nodes that differ between the calls of the region."""
        if len(self.own) == 1:
            # Nothing to share: one piece, and it may return what the region returned.
            return set(computed(self.region.graph))
        varying = set(self.slots) | set(self.returned)
        for i, node in enumerate(self.inputs):
            if len({call.inputs[i] for call in self.own}) > 1:
                varying.add(node)
        for node in computed(self.region.graph):
            if any(source in varying for source in node.all_input_nodes):
                varying.add(node)
        return varying

    def _call(self, piece: Piece, index: int, names: Sequence[Mapping[fx.Node, str]]) -> Call:
        weights = dict(zip(self.slots, self.own[index].weights, strict=True))
        return Call(
            piece.region.name,
            index,
            tuple(names[index][node] for node in piece.inputs),
            tuple(weights[node] for node in piece.weights),
            tuple(names[index][node] for node in piece.outputs),
        )


def _crossing(program: Program, stage: Stage) -> tuple[str, ...]:
    """The values made by calls of ``stage`` and read by calls of another, in program order."""
    stages = execution_stages(program)
    read = {value for call in program.calls if stages[call.name] is not stage for value in call.inputs}
    return tuple(
        value
        for call in program.calls
        if stages[call.name] is stage
        for value in call.outputs
        if value in read
    )
