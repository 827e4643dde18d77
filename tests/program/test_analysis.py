"""Stage analysis: marks follow the inputs, through calls, to a fixed point."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from h3compile.program.analysis import execution_stages, mark
from h3compile.program.stages import Stage

aten = torch.ops.aten


def test_every_node_of_the_toy(toys: SimpleNamespace) -> None:
    marks = mark(toys.toy()).nodes
    by_op = {
        (name, str(node.target)): marks[name][node.name]
        for name, region in toys.toy().regions.items()
        for node in region.graph.nodes
        if node.op == "call_function"
    }
    assert by_op["entry", "aten.neg.default"] is Stage.STEP
    assert by_op["entry", "aten.linear.default"] is Stage.SCHEDULE
    assert by_op["entry", "aten.silu.default"] is Stage.REQUEST
    # A gather of schedule rows by step indices is step work.
    assert by_op["block", "aten.index_select.default"] is Stage.STEP
    linears = [n for n in toys.toy().regions["block"].graph.nodes if n.target is aten.linear.default]
    assert [marks["block"][n.name] for n in linears] == [Stage.SCHEDULE, Stage.REQUEST, Stage.STEP]


def test_values_and_calls(toys: SimpleNamespace) -> None:
    program = toys.toy()
    marks = mark(program)
    assert {name: marks.values[name] for name in ("h0", "emb", "context", "h2")} == {
        "h0": Stage.STEP,
        "emb": Stage.SCHEDULE,
        "context": Stage.REQUEST,
        "h2": Stage.STEP,
    }
    assert marks.call(program.calls[0]) is Stage.STEP  # the entry computes something of every stage


def test_a_region_is_marked_with_the_join_over_its_calls(toys: SimpleNamespace) -> None:
    """Called once on the text and once on the latents, its nodes are step work in both."""
    body = toys.region("f", (toys.wide("a"),), (), lambda op, a: (op(aten.relu.default, a),))
    program = toys.program(
        (body,), (toys.call("f", 0, "text", "", "u"), toys.call("f", 1, "x", "", "v")), ("u", "v")
    )
    assert mark(program).nodes["f"]["relu_default"] is Stage.STEP
    assert mark(program).values["u"] is Stage.STEP


def test_the_join_reaches_earlier_calls_through_a_chain(toys: SimpleNamespace) -> None:
    """A later call of g raises a region it shares with a chain that begins earlier: a second round."""
    f = toys.region("f", (toys.wide("a"),), (), lambda op, a: (op(aten.relu.default, a),))
    g = toys.region("g", (toys.wide("a"),), (), lambda op, a: (op(aten.neg.default, a),))
    program = toys.program(
        (f, g),
        (
            toys.call("f", 0, "text", "", "a"),
            toys.call("g", 0, "a", "", "b"),
            toys.call("f", 1, "x", "", "c"),
        ),
        ("b", "c"),
    )
    assert mark(program).values["b"] is Stage.STEP


def test_work_on_weights_alone_is_build_work(toys: SimpleNamespace) -> None:
    body = toys.region(
        "f",
        (toys.wide("a"),),
        (toys.wide("w", 8),),
        lambda op, a, w: (op(aten.linear.default, a, op(aten.neg.default, w)),),
    )
    marks = mark(toys.program((body,), (toys.call("f", 0, "text", "w", "r"),), ("r",))).nodes["f"]
    assert (marks["neg_default"], marks["linear_default"]) == (Stage.BUILD, Stage.REQUEST)


def test_a_call_waits_for_what_it_reads(toys: SimpleNamespace) -> None:
    """The entry runs in the step, and so does whatever reads the request value it computes."""
    late = toys.region("late", (toys.wide("a"),), (), lambda op, a: (op(aten.relu.default, a),))
    toy = toys.toy()
    program = toys.program(
        (*toy.regions.values(), late),
        (*toy.calls, toys.call("late", 0, "context", "", "r2")),
        ("result", "r2"),
    )
    assert mark(program).call(program.calls[-1]) is Stage.REQUEST
    assert execution_stages(program)["late.0"] is Stage.STEP
