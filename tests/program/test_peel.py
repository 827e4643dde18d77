"""Peeling: work of a stage leaves the step, once where it is shared and once a call where it is not."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from h3compile.program.analysis import execution_stages, mark
from h3compile.program.interpreter import Interpreter
from h3compile.program.peel import peel
from h3compile.program.program import Program
from h3compile.program.region import Port
from h3compile.program.stages import Stage
from h3compile.program.verifier import verify

aten = torch.ops.aten


@pytest.fixture
def peeled(toys: SimpleNamespace):  # type: ignore[no-untyped-def]
    """A function that peels a stage, verifies the result and asserts that it computes the same bits."""

    def of(before: Program, stage: Stage) -> tuple[Program, tuple[str, ...]]:
        result = peel(before, stage)
        after = verify(result.program)
        source = toys.Tensors(toys.tensors(before))
        for rows, times in ((1, 1), (5, 2), (3, 4)):
            inputs = toys.inputs(rows, times)
            was, now = Interpreter(before, source)(inputs), Interpreter(after, source)(inputs)
            assert all(torch.equal(was[name], now[name]) for name in before.outputs)
        return after, result.values

    return of


def ops(program: Program, stage: Stage) -> Counter[str]:
    """Operators run in a stage: those of a region count once a call."""
    stages = execution_stages(program)
    return Counter(
        str(node.target)
        for call in program.calls
        if stages[call.name] is stage
        for node in program.regions[call.region].graph.nodes
        if node.op == "call_function"
    )


def test_shared_work_once_and_own_work_a_call(toys: SimpleNamespace, peeled) -> None:  # type: ignore[no-untyped-def]
    after, values = peeled(toys.toy(), Stage.REQUEST)
    assert ops(after, Stage.REQUEST) == {
        "aten.silu.default": 1,  # of the entry
        "aten.mul.Tensor": 1,  # twice: shared by both blocks
        "aten.linear.default": 2,  # own: one a block
    }
    assert len(values) == 3
    # Each block reads its own value, and both the shared one.
    reads = [set(call.inputs) & set(values) for call in after.calls_of("block")]
    assert len(reads[0] & reads[1]) == 1 and len(reads[0] | reads[1]) == 3


def test_each_stage_leaves_only_its_own(toys: SimpleNamespace, peeled) -> None:  # type: ignore[no-untyped-def]
    once, _ = peeled(toys.toy(), Stage.REQUEST)
    twice, values = peeled(once, Stage.SCHEDULE)
    assert ops(twice, Stage.SCHEDULE) == {
        "aten.unsqueeze.default": 1,
        "aten.linear.default": 3,
        "aten.silu.default": 1,  # silu(emb) reads no weight: shared
    }
    assert ops(twice, Stage.REQUEST) == ops(once, Stage.REQUEST)
    marks = mark(twice).nodes
    stages = execution_stages(twice)
    for call in twice.calls:
        if stages[call.name] is Stage.STEP:
            assert all(
                marks[call.region][node.name] is Stage.STEP
                for node in twice.regions[call.region].graph.nodes
                if node.op == "call_function"
            )
    assert len(values) == 2  # mod of either block


def test_the_order_of_peeling_does_not_matter(toys: SimpleNamespace, peeled) -> None:  # type: ignore[no-untyped-def]
    one, _ = peeled(peeled(toys.toy(), Stage.REQUEST)[0], Stage.SCHEDULE)
    other, _ = peeled(peeled(toys.toy(), Stage.SCHEDULE)[0], Stage.REQUEST)
    for stage in Stage:
        assert ops(one, stage) == ops(other, stage)


def test_peeling_again_finds_nothing_new(toys: SimpleNamespace, peeled) -> None:  # type: ignore[no-untyped-def]
    once, values = peeled(toys.toy(), Stage.REQUEST)
    again, same = peeled(once, Stage.REQUEST)
    assert values == same
    assert [c.name for c in again.calls] == [c.name for c in once.calls]


def single(toys: SimpleNamespace, body: object, inputs: str = "x text", weights: str = "") -> Program:
    ports = {
        "x": toys.wide("x"),
        "text": toys.wide("text"),
        "index": Port("index", torch.int64, ("rows",)),
        "t": Port("t", torch.float32, ("timesteps",)),
        "w": toys.wide("w", 8),
    }
    region = toys.region(
        "r", tuple(ports[n] for n in inputs.split()), tuple(ports[n] for n in weights.split()), body
    )
    results = " ".join(f"r{i}" for i in range(len(region.outputs)))
    return toys.program((region,), (toys.call("r", 0, inputs, weights, results),), tuple(results.split()))


def test_movement_at_the_edge_stays(toys: SimpleNamespace, peeled) -> None:  # type: ignore[no-untyped-def]
    """An unsqueeze of a request value costs nothing in the step; the one inside is needed to get there."""

    def body(op, x, text):  # type: ignore[no-untyped-def]
        inner = op(aten.silu.default, op(aten.unsqueeze.default, text, 0))
        outer = op(aten.slice.Tensor, op(aten.view.default, inner, [-1, 8]), 1, 0, 4)
        return (op(aten.mul.Tensor, op(aten.slice.Tensor, x, 1, 0, 4), outer),)

    after, values = peeled(single(toys, body), Stage.REQUEST)
    assert ops(after, Stage.REQUEST) == {"aten.unsqueeze.default": 1, "aten.silu.default": 1}
    assert ops(after, Stage.STEP) == {"aten.view.default": 1, "aten.slice.Tensor": 2, "aten.mul.Tensor": 1}
    assert len(values) == 1


def test_a_stage_of_movement_alone_is_not_peeled(toys: SimpleNamespace, peeled) -> None:  # type: ignore[no-untyped-def]
    def body(op, x, text):  # type: ignore[no-untyped-def]
        return (
            op(aten.mul.Tensor, x, op(aten.permute.default, op(aten.permute.default, text, [1, 0]), [1, 0])),
        )

    before = single(toys, body)
    after, values = peeled(before, Stage.REQUEST)
    assert values == () and after.calls == before.calls


def test_constants_are_computed_where_they_are_read(toys: SimpleNamespace, peeled) -> None:  # type: ignore[no-untyped-def]
    def body(op, x, text, w):  # type: ignore[no-untyped-def]
        negated = op(aten.neg.default, w)
        return (
            op(aten.mul.Tensor, op(aten.linear.default, x, negated), op(aten.linear.default, text, negated)),
        )

    after, _ = peeled(single(toys, body, weights="w"), Stage.REQUEST)
    assert ops(after, Stage.REQUEST)["aten.neg.default"] == 1
    assert ops(after, Stage.STEP)["aten.neg.default"] == 1
    assert [call.weights for call in after.calls] == [("w",), ("w",)]


def test_lengths_are_computed_where_they_are_read(toys: SimpleNamespace, peeled) -> None:  # type: ignore[no-untyped-def]
    def body(op, x, text):  # type: ignore[no-untyped-def]
        rows = op(aten.sym_size.int, text, 0)
        zeros = op(aten.new_zeros.default, text, [rows, 8])
        kept = op(aten.silu.default, op(aten.add.Tensor, text, zeros))
        return (op(aten.add.Tensor, op(aten.mul.Tensor, x, kept), op(aten.new_zeros.default, x, [rows, 8])),)

    after, values = peeled(single(toys, body), Stage.REQUEST)
    assert ops(after, Stage.REQUEST)["aten.sym_size.int"] == 1
    assert ops(after, Stage.STEP)["aten.sym_size.int"] == 1
    assert len(values) == 1  # a length is no value


def test_what_the_peeled_stage_returned_it_still_returns(toys: SimpleNamespace, peeled) -> None:  # type: ignore[no-untyped-def]
    def body(op, x, text):  # type: ignore[no-untyped-def]
        kept = op(aten.silu.default, text)
        return kept, op(aten.mul.Tensor, x, kept), op(aten.view.default, kept, [-1, 4])

    after, values = peeled(single(toys, body), Stage.REQUEST)
    assert values == ("r0",)
    early, late = after.calls
    assert (early.outputs, set(late.inputs), late.outputs) == (("r0",), {"r0", "x"}, ("r1", "r2"))


def test_a_returned_constant_stays_returned(toys: SimpleNamespace, peeled) -> None:  # type: ignore[no-untyped-def]
    def body(op, x, text, w):  # type: ignore[no-untyped-def]
        return op(aten.mul.Tensor, x, op(aten.silu.default, text)), op(aten.neg.default, w)

    after, _ = peeled(single(toys, body, weights="w"), Stage.REQUEST)
    assert [call.outputs[-1] for call in after.calls][-1] == "r1"


def test_equal_results_survive_the_split(toys: SimpleNamespace, peeled) -> None:  # type: ignore[no-untyped-def]
    """Two results of a repeated region turn out equal: readers of both must still find them."""

    def body(op, x, text):  # type: ignore[no-untyped-def]
        kept = op(aten.silu.default, text)
        return op(aten.mul.Tensor, x, kept), op(aten.mul.Tensor, x, op(aten.silu.default, text))

    f = toys.region("f", (toys.wide("x"), toys.wide("text")), (), body)
    last = toys.region(
        "last", (toys.wide("a"), toys.wide("b")), (), lambda op, a, b: (op(aten.add.Tensor, a, b),)
    )
    before = toys.program(
        (f, last),
        (
            toys.call("f", 0, "x text", "", "a b"),
            toys.call("f", 1, "b text", "", "c d"),
            toys.call("last", 0, "c d", "", "e"),
        ),
        ("e",),
    )
    after, _ = peeled(before, Stage.REQUEST)
    assert ops(after, Stage.REQUEST) == {"aten.silu.default": 1}
    assert ops(after, Stage.STEP) == {"aten.mul.Tensor": 2, "aten.add.Tensor": 1}


def test_a_piece_waits_for_what_it_reads(toys: SimpleNamespace, peeled) -> None:  # type: ignore[no-untyped-def]
    """The second call's request work reads a value that is made between the two calls."""
    f = toys.region(
        "f",
        (toys.wide("x"), toys.wide("text")),
        (),
        lambda op, x, text: (op(aten.mul.Tensor, x, op(aten.silu.default, text)),),
    )
    between = toys.region("between", (toys.wide("p"),), (), lambda op, p: (op(aten.neg.default, p),))
    before = toys.program(
        (f, between),
        (
            toys.call("f", 0, "x text", "", "a"),
            toys.call("between", 0, "text", "", "other"),
            toys.call("f", 1, "a other", "", "b"),
        ),
        ("b",),
    )
    after, values = peeled(before, Stage.REQUEST)
    assert ops(after, Stage.REQUEST) == {"aten.silu.default": 2, "aten.neg.default": 1}
    assert len(values) == 2
