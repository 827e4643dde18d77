"""Editing a region: on a copy, with its ports kept in step."""

from __future__ import annotations

import operator

import torch
from torch import fx

from h3compile.program.edit import Editor
from h3compile.program.facts import Dim
from h3compile.program.propagate import propagate
from h3compile.program.region import Port, Region
from h3compile.program.serialize import region_from_json, region_to_json

aten = torch.ops.aten
DIMS = (Dim("rows", hint=8),)


def region() -> Region:
    """Two linears of one input, their sum returned."""
    graph = fx.Graph()
    x, a, b = (graph.placeholder(name) for name in ("x", "a_weight", "b_weight"))
    one, two = (graph.call_function(aten.linear.default, (x, weight)) for weight in (a, b))
    graph.output((graph.call_function(aten.add.Tensor, (one, two)),))
    weights = tuple(Port(f"{name}.weight", torch.float32, (4, 4)) for name in "ab")
    ports = (Port("x", torch.float32, ("rows", 4)),), weights, (Port("y", torch.float32, ("rows", 4)),)
    return propagate(Region("r", graph, *ports), DIMS)


def test_the_region_that_is_edited_stays_as_it_is() -> None:
    before = region()
    text = region_to_json(before)
    edit = Editor(before)
    _, two, total = edit.nodes()
    edit.replace(total, aten.neg.default, two, name="negated")
    after = edit.finish("other")
    assert region_to_json(before) == text
    assert after.name == "other"
    assert [str(n.target) for n in after.graph.nodes if n.op == "call_function"] == [
        "aten.linear.default",
        "aten.neg.default",
    ]


def test_weights_are_added_where_they_are_wanted_and_dropped() -> None:
    edit = Editor(region())
    first, second = edit.weights
    one, _, total = edit.nodes()
    scale = Port("a.weight_scale", torch.float32, (4,))
    front = Port("front", torch.float32, (4,))
    node = edit.add_weight(scale, first)
    top = edit.add_weight(front, None)
    edit.replace(
        total, aten.mul.Tensor, edit.add(total, aten.mul.Tensor, one, node, name="scaled"), top, name="out"
    )
    edit.sweep()
    edit.drop_weights([second])
    after = propagate(edit.finish(), DIMS)
    assert [port.name for port in after.weights] == ["front", "a.weight", "a.weight_scale"]
    assert [n.target for n in after.graph.nodes if n.op == "placeholder"] == [
        "x",
        "front",
        "a_weight",
        "a_weight_scale",
    ]
    assert region_to_json(region_from_json(region_to_json(after))) == region_to_json(after)


def test_a_retyped_weight_keeps_its_place_and_name() -> None:
    edit = Editor(region())
    first, second = edit.weights
    retyped = edit.retype_weight(second, torch.bfloat16)
    assert edit.weights == [first, retyped] and retyped.name == second.name
    linear = list(edit.nodes())[1]
    assert edit.weight_of(linear.args[1]) == retyped
    assert edit.weight_of(linear) is None and edit.weight_of(3) is None


def test_results_and_outputs_are_appended() -> None:
    edit = Editor(region())
    *_, total = edit.nodes()
    parts = edit.add(total, aten.chunk.default, total.args[0], 2, -1, name="parts")
    edit.add_output(edit.result(total, parts, 1, name="second"), Port("second", torch.float32, ("rows", 2)))
    after = propagate(edit.finish(), DIMS)
    assert [(port.name, port.shape) for port in after.outputs] == [
        ("y", ("rows", 4)),
        ("second", ("rows", 2)),
    ]
    assert after.graph.find_nodes(op="call_function", target=operator.getitem)


def test_provenance_follows_what_is_replaced() -> None:
    edit = Editor(region())
    *_, total = edit.nodes()
    total.meta["origin"] = "blocks.0"
    node = edit.replace(total, aten.neg.default, total.args[0], name="negated")
    assert node.meta["origin"] == "blocks.0" and node.meta["port"] == total.meta["port"]
