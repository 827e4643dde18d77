"""Merging: calls of one stage become one, equal work is done once, and the values are the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from h3compile.program.interpreter import Interpreter
from h3compile.program.merge import deduplicate, merge_calls, share_equal
from h3compile.program.printer import count_ops
from h3compile.program.program import Program
from h3compile.program.verifier import verify

aten = torch.ops.aten


@pytest.fixture
def same(toys: SimpleNamespace):  # type: ignore[no-untyped-def]
    """A function that asserts that two programs compute the same bits."""

    def check(before: Program, after: Program) -> Program:
        after = verify(after)
        source, inputs = toys.Tensors(toys.tensors(before)), toys.inputs()
        was, now = Interpreter(before, source)(inputs), Interpreter(after, source)(inputs)
        assert was.keys() == now.keys()
        assert all(torch.equal(was[name], now[name]) for name in was)
        return after

    return check


def test_single_calls_of_a_stage_become_one(toys: SimpleNamespace, same) -> None:  # type: ignore[no-untyped-def]
    a = toys.region("a", (toys.wide("p"),), (), lambda op, p: (op(aten.neg.default, p),))
    b = toys.region("b", (toys.wide("p"),), (), lambda op, p: (op(aten.relu.default, p),))
    c = toys.region("c", (toys.wide("p"), toys.wide("q")), (), lambda op, p, q: (op(aten.mul.Tensor, p, q),))
    before = toys.program(
        (a, b, c),
        (
            toys.call("a", 0, "text", "", "u"),
            toys.call("b", 0, "u", "", "v"),
            toys.call("c", 0, "v x", "", "w"),
        ),
        ("w",),
    )
    after = same(before, merge_calls(before))
    assert [(call.name, call.inputs, call.outputs) for call in after.calls] == [
        ("request.0", ("text",), ("v",)),  # u is no longer a value: nobody else reads it
        ("c.0", ("v", "x"), ("w",)),
    ]
    assert set(after.regions) == {"request", "c"}


def test_a_call_does_not_overtake_what_it_reads(toys: SimpleNamespace, same) -> None:  # type: ignore[no-untyped-def]
    """Of three calls in the step, the repeated one in the middle keeps the outer two apart."""
    toy = toys.toy()
    after = same(toy, merge_calls(toy))
    assert [call.name for call in after.calls] == ["entry.0", "block.0", "block.1", "leave.0"]


def test_two_regions_may_call_different_values_by_one_name(toys: SimpleNamespace, same) -> None:  # type: ignore[no-untyped-def]
    a = toys.region(
        "a", (toys.wide("p"),), (toys.wide("w", 8),), lambda op, p, w: (op(aten.linear.default, p, w),)
    )
    b = toys.region(
        "b", (toys.wide("p"),), (toys.wide("w", 8),), lambda op, p, w: (op(aten.linear.default, p, w),)
    )
    before = toys.program(
        (a, b), (toys.call("a", 0, "text", "one", "u"), toys.call("b", 0, "x", "two", "v")), ("u", "v")
    )
    # Of two stages: made one to be merged.
    facts = before.facts
    step = [type(f)(f.name, f.dtype, f.shape, facts.inputs[0].stage) for f in facts.inputs]
    before = before.evolve(facts=type(facts)(**{**vars(facts), "inputs": tuple(step)}))
    after = same(before, merge_calls(before))
    (call,) = after.calls
    region = after.regions[call.region]
    assert call.inputs == ("text", "x") and call.weights == ("one", "two")
    assert len({port.name for port in region.placeholders}) == 4
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    u, v = region.module()(x, y, torch.eye(8), 2 * torch.eye(8))
    assert torch.equal(u, x) and torch.equal(v, 2 * y)


def test_equal_work_of_merged_calls_is_done_once_and_read_by_all(toys: SimpleNamespace, same) -> None:  # type: ignore[no-untyped-def]
    """Both compute silu(text): one value is left, and who read the other reads it."""
    a, b = (
        toys.region(n, (toys.wide("p"),), (), lambda op, p: (op(aten.silu.default, p),)) for n in ("a", "b")
    )
    c = toys.region(
        "c",
        (toys.wide("p"), toys.wide("q"), toys.wide("x")),
        (),
        lambda op, p, q, x: (op(aten.mul.Tensor, op(aten.add.Tensor, p, q), x),),
    )
    before = toys.program(
        (a, b, c),
        (
            toys.call("a", 0, "text", "", "u"),
            toys.call("b", 0, "text", "", "v"),
            toys.call("c", 0, "u v x", "", "w"),
        ),
        ("w",),
    )
    after = same(before, merge_calls(before))
    assert count_ops(after)["aten.silu.default"] == 1
    assert [(call.inputs, call.outputs) for call in after.calls] == [
        (("text",), ("u",)),
        (("u", "u", "x"), ("w",)),
    ]


def test_an_output_of_the_program_keeps_its_name(toys: SimpleNamespace, same) -> None:  # type: ignore[no-untyped-def]
    a, b = (
        toys.region(n, (toys.wide("p"),), (), lambda op, p: (op(aten.silu.default, p),)) for n in ("a", "b")
    )
    c = toys.region("c", (toys.wide("p"),), (), lambda op, p: (op(aten.neg.default, p),))
    before = toys.program(
        (a, b, c),
        (
            toys.call("a", 0, "text", "", "u"),
            toys.call("b", 0, "text", "", "v"),
            toys.call("c", 0, "u", "", "w"),
        ),
        ("v", "w"),
    )
    after = same(before, merge_calls(before))
    assert after.outputs == ("v", "w")
    assert len(after.calls) == 1


def test_equal_results_of_a_repeated_region(toys: SimpleNamespace, same) -> None:  # type: ignore[no-untyped-def]
    def body(op, p):  # type: ignore[no-untyped-def]
        return op(aten.silu.default, p), op(aten.neg.default, p), op(aten.silu.default, p)

    f = toys.region("f", (toys.wide("p"),), (), body)
    before = toys.program(
        (f,), (toys.call("f", 0, "x", "", "a b c"), toys.call("f", 1, "c", "", "d e g")), ("b", "g")
    )
    after = same(before, share_equal(before, "f"))
    # g is an output of the program, so the third result is the one that is left, in both calls.
    assert [call.outputs for call in after.calls] == [("b", "c"), ("e", "g")]
    assert [call.inputs for call in after.calls] == [("x",), ("c",)]


def test_the_stages_give_their_names(toys: SimpleNamespace, same) -> None:  # type: ignore[no-untyped-def]
    """Work of one stage that a repeated region splits is numbered; the step keeps its names."""
    a = toys.region("a", (toys.wide("p"),), (), lambda op, p: (op(aten.neg.default, p),))
    f = toys.region("f", (toys.wide("p"),), (), lambda op, p: (op(aten.relu.default, p),))
    b = toys.region("b", (toys.wide("p"),), (), lambda op, p: (op(aten.silu.default, p),))
    last = toys.region(
        "last", (toys.wide("p"), toys.wide("q")), (), lambda op, p, q: (op(aten.add.Tensor, p, q),)
    )
    before = toys.program(
        (a, f, b, last),
        (
            toys.call("a", 0, "text", "", "u"),
            toys.call("f", 0, "u", "", "v"),
            toys.call("f", 1, "v", "", "w"),
            toys.call("b", 0, "w", "", "y"),
            toys.call("last", 0, "y x", "", "z"),
        ),
        ("z",),
    )
    after = same(before, merge_calls(before))
    assert [c.name for c in after.calls] == ["request.0", "f.0", "f.1", "request_2.0", "last.0"]


def test_deduplicate_tells_constants_apart(toys: SimpleNamespace) -> None:
    def body(op, p):  # type: ignore[no-untyped-def]
        scaled = [op(aten.mul.Tensor, p, c) for c in (2, 2.0, 2, -0.0, 0.0, True)]
        cast = [op(aten.to.dtype, p, d) for d in (torch.float64, torch.bfloat16, torch.float64)]
        sums = [op(aten.add.Tensor, p, s) for s in (scaled[0], scaled[2])]
        alpha = [op(aten.add.Tensor, p, scaled[0], alpha=k) for k in (1, 2)]
        return (*scaled, *cast, *sums, *alpha)

    graph = deduplicate(toys.region("r", (toys.wide("p"),), (), body).graph)
    assert len([n for n in graph.nodes if n.op == "call_function"]) == 5 + 2 + 1 + 2
    graph.lint()
