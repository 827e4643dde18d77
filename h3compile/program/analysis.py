"""Stage analysis: one forward walk that follows the inputs through every region."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from h3compile.program.cut import returned
from h3compile.program.program import Call, Program
from h3compile.program.region import Region
from h3compile.program.stages import Stage, join

__all__ = ["Marks", "execution_stages", "mark"]


@dataclass(frozen=True)
class Marks:
    """The stage of every node and every value of a program.

    A region called several times has one mark a node: the join over its calls. A variant is marked as if
    it were called wherever the region is that it stands in for.
    """

    nodes: Mapping[str, Mapping[str, Stage]]
    values: Mapping[str, Stage]
    forms: Mapping[str, tuple[str, ...]]  # region -> itself and its variants

    def call(self, call: Call) -> Stage:
        """When a call runs: the join over everything it computes, in whichever form."""
        return join(stage for form in self.forms[call.region] for stage in self.nodes[form].values())


def mark(program: Program) -> Marks:
    """The stages of ``program``, a fixed point over its calls."""
    values: dict[str, Stage] = dict(program.input_stages)
    entering: dict[str, list[Stage]] = {
        name: [Stage.BUILD] * len(region.inputs) for name, region in program.regions.items()
    }
    nodes = {name: _walk(region, entering[name]) for name, region in program.regions.items()}
    forms = {name: program.forms_of(name) for name in program.regions}
    changed = True
    while changed:
        changed = False
        for call in program.calls:
            joined = [
                stage | values[value] for stage, value in zip(entering[call.region], call.inputs, strict=True)
            ]
            if joined != entering[call.region]:
                entering[call.region] = joined
                nodes |= {form: _walk(program.regions[form], joined) for form in forms[call.region]}
                changed = True
            for form in forms[call.region]:
                for value, source in zip(call.outputs, returned(program.regions[form].graph), strict=True):
                    # Joined, so that the walk ends also where a broken program defines a value twice.
                    stage = values.get(value, Stage.BUILD) | nodes[form][source.name]
                    if values.get(value) is not stage:
                        values[value] = stage
                        changed = True
    return Marks(nodes, values, forms)


def execution_stages(program: Program) -> dict[str, Stage]:
    """When each call runs, by call name.

    That is its own stage, or a later one where it waits for a value of a later call: the refiner is
    request work, but until `hoist` its input is computed by a region that runs in the step.
    """
    marks = mark(program)
    values: dict[str, Stage] = {port.name: Stage.BUILD for port in program.inputs}
    stages: dict[str, Stage] = {}
    for call in program.calls:
        stage = join((marks.call(call), *(values[value] for value in call.inputs)))
        stages[call.name] = stage
        values |= dict.fromkeys(call.outputs, stage)
    return stages


def _walk(region: Region, inputs: list[Stage]) -> dict[str, Stage]:
    feed = iter(inputs)
    marks: dict[str, Stage] = {}
    for node in region.graph.nodes:
        if node.op == "placeholder":
            marks[node.name] = next(feed, Stage.BUILD)  # weights come after the inputs
        elif node.op == "call_function":
            marks[node.name] = join(marks[source.name] for source in node.all_input_nodes)
    return marks
