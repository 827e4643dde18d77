"""The printer: a program as text that a person can read and a tool can diff."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import fx

from h3compile.program.analysis import execution_stages, mark
from h3compile.program.program import Call, Program
from h3compile.program.region import Port, Region
from h3compile.program.serialize import dtype_name, op_name
from h3compile.program.stages import Stage

__all__ = ["count_ops", "print_program", "print_region"]


def count_ops(program: Program) -> Counter[str]:
    """How often each operator stands in the regions of ``program``, each region counted once."""
    return Counter(
        op_name(node.target)
        for region in program.regions.values()
        for node in region.graph.nodes
        if node.op == "call_function"
    )


def print_program(program: Program) -> str:
    """The whole program: the calls in order, then every region.

    Runs of calls to one region are folded into one line: what the first reads, what the last returns.
    """
    stages = execution_stages(program)
    lines = [f"program {program.facts.name} level={program.level.name.lower()}"]
    lines += [f"  input  {program.input_stages[port.name].value:8} {port}" for port in program.inputs]
    lines += [f"  output {value}" for value in program.outputs]
    lines += [f"  tables {len(program.tables)}", f"  weights {len(program.weights)}"]
    if program.measures:
        lines.append(f"  measures {len(program.measures)}")
    if program.parallel is not None:
        lines.append(f"  parallel {program.parallel}")
    if program.residency is not None:
        lines.append(f"  residency {program.residency}")
    for name, variants in program.variants.items():
        listed = "; ".join(f"{variant.region} when {variant.when}" for variant in variants)
        lines.append(f"  variants of {name}: {listed}")
    lines.append("")
    for run in _runs(program.calls):
        first, last = run[0], run[-1]
        name = first.name if first is last else f"{first.region}.{first.index}..{last.index}"
        lines.append(
            f"{stages[first.name].value:8} {name}({', '.join(first.inputs)}) -> {', '.join(last.outputs)}"
        )
    marks = mark(program).nodes
    for name, region in program.regions.items():
        lines += ["", print_region(region, marks[name])]
    return "\n".join(lines) + "\n"


def print_region(region: Region, stages: Mapping[str, Stage] | None = None) -> str:
    """One region: its ports, then a line a node with type and the module it came from.

    ``stages``, by node name, puts the stage before each line.
    """
    marks = stages or {}
    lines = [f"region {region.name}"]
    lines += [f"  input  {port}" for port in region.inputs]
    lines += [f"  weight {port}" for port in region.weights]
    lines += [f"  output {port}" for port in region.outputs]
    for node in region.graph.nodes:
        if node.op != "call_function":
            continue
        stage = marks[node.name].value if node.name in marks else ""
        origin = f"  # {node.meta['origin']}" if node.meta.get("origin") else ""
        arguments = [_spell(argument) for argument in node.args]
        arguments += [f"{key}={_spell(value)}" for key, value in node.kwargs.items()]
        text = f"{node.name}{_type(node)} = {op_name(node.target)}({', '.join(arguments)})"
        lines.append(f"  {stage:8} {text}{origin}")
    return "\n".join(lines)


def _type(node: fx.Node) -> str:
    port = node.meta.get("port")
    if not isinstance(port, Port):
        return ""
    return f": {dtype_name(port.dtype)}[{', '.join(map(str, port.shape))}]"


def _spell(value: object) -> str:
    match value:
        case fx.Node():
            return f"%{value.name}"
        case list() | tuple():
            return f"[{', '.join(map(_spell, value))}]"
        case int() if value == 2**63 - 1:
            return "end"
    return str(value).removeprefix("torch.")


def _runs(calls: tuple[Call, ...]) -> Iterator[list[Call]]:
    run: list[Call] = []
    for call in calls:
        if run and call.region != run[-1].region:
            yield run
            run = []
        run.append(call)
    if run:
        yield run
