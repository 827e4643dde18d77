"""Merging: calls of one stage that need not be apart become one region."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import fx

from h3compile.program.analysis import execution_stages
from h3compile.program.cut import computed, returned
from h3compile.program.program import Call, Program
from h3compile.program.region import Port, Region
from h3compile.program.stages import Stage

__all__ = ["deduplicate", "merge_calls", "share_equal"]


def merge_calls(program: Program) -> Program:
    """``program`` with calls ordered by stage, and single calls of one stage merged.

    A call moves up to an earlier one of its stage when everything it reads is there by then. The merged
    region is named after its stage, or in the step after the later of the two. Operations that two
    merged regions share are computed once. Regions with variants stay as they are.
    """
    program = _by_stage(program)
    while (pair := _mergeable(program)) is not None:
        program = _merge(program, *pair)
    return _name_by_stage(program)


def _by_stage(program: Program) -> Program:
    stages = execution_stages(program)
    ordered = sorted(program.calls, key=lambda call: stages[call.name].rank)
    return program.evolve(calls=tuple(ordered))


def _mergeable(program: Program) -> tuple[Call, Call] | None:
    stages = execution_stages(program)
    counts: dict[str, int] = {}
    for call in program.calls:
        counts[call.region] = counts.get(call.region, 0) + 1
    available = {port.name for port in program.inputs}
    for i, early in enumerate(program.calls):
        available |= set(early.outputs)
        if counts[early.region] > 1 or early.region in program.variants:
            continue  # every variant would have to be merged alike
        for late in program.calls[i + 1 :]:
            same = stages[late.name] is stages[early.name]
            single = counts[late.region] == 1 and late.region not in program.variants
            if same and single and available >= set(late.inputs):
                return early, late
    return None


def _merge(program: Program, early: Call, late: Call) -> Program:
    graph = fx.Graph()
    calls = (early, late)
    regions = [program.regions[call.region] for call in calls]
    values: dict[str, fx.Node] = {}
    weights: dict[str, fx.Node] = {}
    inputs: dict[str, Port] = {}
    slots: dict[str, Port] = {}
    for call, region in zip(calls, regions, strict=True):
        for value, port in zip(call.inputs, region.inputs, strict=True):
            if value not in early.outputs:
                inputs.setdefault(value, port)
        for weight, port in zip(call.weights, region.weights, strict=True):
            slots.setdefault(weight, Port(weight, port.dtype, port.shape))
    for value, port in inputs.items():
        values[value] = node = graph.placeholder(port.name)
        # Two regions may call different values by one name: the graph has made it unique.
        node.target = node.name
        inputs[value] = node.meta["port"] = Port(node.name, port.dtype, port.shape)
    for weight, port in slots.items():
        weights[weight] = graph.placeholder(weight.replace(".", "_"))
        weights[weight].meta["port"] = port

    ports: dict[str, Port] = {}
    for call, region in zip(calls, regions, strict=True):
        results = _inline(graph, region, [values[v] for v in call.inputs], [weights[w] for w in call.weights])
        for value, port, node in zip(call.outputs, region.outputs, results, strict=True):
            values[value] = node
            ports[value] = port

    read = {value for call in program.calls if call not in calls for value in call.inputs}
    kept = [value for value in ports if value in read or value in _wanted(program)]
    graph.output(tuple(values[value] for value in kept))
    name = late.region
    merged = Region(name, graph, tuple(inputs.values()), tuple(slots.values()), tuple(ports[v] for v in kept))
    call = Call(name, 0, tuple(inputs), tuple(slots), tuple(kept))
    remaining = {key: region for key, region in program.regions.items() if key != early.region}
    rewritten = tuple(call if old is early else old for old in program.calls if old is not late)
    return share_equal(program.evolve(regions={**remaining, name: merged}, calls=rewritten), name)


def share_equal(program: Program, name: str) -> Program:
    """``program`` in which the region ``name`` computes equal things once, and returns them once.

    Whoever read one of two equal results of a call now reads the one that is left.
    """
    region, own = program.regions[name], program.calls_of(name)
    graph = deduplicate(region.graph)
    results = returned(graph)
    # The program's own outputs and measures keep their names.
    final = [any(call.outputs[i] in _wanted(program) for call in own) for i in range(len(results))]
    left: dict[fx.Node, int] = {}
    for i in sorted(range(len(results)), key=lambda i: not final[i]):
        left.setdefault(results[i], i)
    kept = [i for i, node in enumerate(results) if left[node] == i or final[i]]
    names = {
        call.outputs[i]: call.outputs[left[node]]
        for call in own
        for i, node in enumerate(results)
        if i not in kept
    }
    next(iter(reversed(graph.nodes))).args = (tuple(results[i] for i in kept),)
    region = replace(region, graph=graph, outputs=tuple(region.outputs[i] for i in kept))
    calls = [
        replace(
            call,
            inputs=tuple(names.get(value, value) for value in call.inputs),
            outputs=tuple(value for value in call.outputs if value not in names),
        )
        for call in program.calls
    ]
    return program.evolve(regions={**program.regions, name: region}, calls=tuple(calls))


def _wanted(program: Program) -> tuple[str, ...]:
    """The values that are wanted though no call may read them."""
    return (*program.outputs, *program.measures)


def _inline(
    graph: fx.Graph, region: Region, inputs: Sequence[fx.Node], weights: Sequence[fx.Node]
) -> list[fx.Node]:
    placeholders = [node for node in region.graph.nodes if node.op == "placeholder"]
    mapping = dict(zip(placeholders, (*inputs, *weights), strict=True))
    for node in computed(region.graph):
        mapping[node] = graph.node_copy(node, mapping.__getitem__)
    return [mapping[node] for node in returned(region.graph)]


def deduplicate(graph: fx.Graph) -> fx.Graph:
    """A copy of ``graph`` in which equal operations on equal operands are done once.

    Exact: every operator of a program is a pure function of its operands.
    """
    copy = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    seen: dict[Hashable, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            copy.output(tuple(mapping[source] for source in node.args[0]))
            continue
        if node.op == "placeholder":
            mapping[node] = copy.node_copy(node, mapping.__getitem__)
            continue
        args = fx.node.map_arg((node.args, node.kwargs), mapping.__getitem__)
        key = (node.target, repr(args))  # node names are unique, so equal text means equal operands
        if key not in seen:
            seen[key] = copy.node_copy(node, mapping.__getitem__)
        mapping[node] = seen[key]
    return copy


def _name_by_stage(program: Program) -> Program:
    """Single calls of an early stage are named after it: ``request``, ``request_2``, ..."""
    stages = execution_stages(program)
    names: dict[str, str] = {}
    for stage in (Stage.SCHEDULE, Stage.REQUEST):
        single = [
            call.region
            for call in program.calls
            if stages[call.name] is stage and len(program.calls_of(call.region)) == 1
        ]
        for i, region in enumerate(single):
            names[region] = stage.value if i == 0 else f"{stage.value}_{i + 1}"
    regions = {
        names.get(name, name): region.renamed(names.get(name, name))
        for name, region in program.regions.items()
    }
    calls = tuple(
        Call(names.get(call.region, call.region), call.index, call.inputs, call.weights, call.outputs)
        for call in program.calls
    )
    return program.evolve(regions=regions, calls=calls)
