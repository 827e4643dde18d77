"""Patterns: what matches, what must not, and what a match leaves behind."""

from __future__ import annotations

import torch
from torch import fx

from h3compile.program.pattern import Op, Var, equivalent, match

aten = torch.ops.aten

SCALED_SUM = Op(aten.add.Tensor, Var("x"), Op(aten.mul.Tensor, Var("y"), Var("x")))


def call(graph: fx.Graph, target: object, *arguments: object) -> fx.Node:
    return graph.call_function(target, arguments)  # type: ignore[arg-type]


def inputs(count: int) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    return graph, [graph.placeholder(f"i{n}") for n in range(count)]


def test_operands_of_sums_and_products_in_either_order() -> None:
    for flipped in (False, True):
        graph, (a, b) = inputs(2)
        product = call(graph, aten.mul.Tensor, *((a, b) if flipped else (b, a)))
        root = call(graph, aten.add.Tensor, *((product, a) if flipped else (a, product)))
        found = match(SCALED_SUM, root)
        assert found is not None and found.node("x") is a and found.node("y") is b
        assert found.nodes == {root, product}


def test_other_operators_keep_their_order() -> None:
    graph, (a, b) = inputs(2)
    pattern = Op(aten.sub.Tensor, Op(aten.neg.default, Var("x")), Var("y"))
    negative = call(graph, aten.neg.default, a)
    assert match(pattern, call(graph, aten.sub.Tensor, b, negative)) is None


def test_one_name_is_one_value() -> None:
    graph, (a, b, c) = inputs(3)
    root = call(graph, aten.add.Tensor, a, call(graph, aten.mul.Tensor, b, c))
    assert match(SCALED_SUM, root) is None


def test_a_computed_intermediate_with_another_reader_stays() -> None:
    graph, (a, b) = inputs(2)
    product = call(graph, aten.mul.Tensor, b, a)
    root = call(graph, aten.add.Tensor, a, product)
    assert match(SCALED_SUM, root) is not None
    call(graph, aten.neg.default, product)
    assert match(SCALED_SUM, root) is None
    shared = Op(
        aten.add.Tensor, Var("x"), Op(aten.mul.Tensor, Var("y"), Var("x"), shared=True, name="product")
    )
    found = match(shared, root)
    assert found is not None and found.node("product") is product


def test_a_view_may_be_read_from_anywhere() -> None:
    graph, (a,) = inputs(1)
    view = call(graph, aten.view.default, a, [-1])
    root = call(graph, aten.neg.default, view)
    call(graph, aten.exp.default, view)
    assert match(Op(aten.neg.default, Op(aten.view.default, Var("x"), [-1])), root) is not None


def test_constants_by_value_and_lists_by_length() -> None:
    graph, (a, b) = inputs(2)
    root = call(graph, aten.cat.default, [a, b], -1)
    assert match(Op(aten.cat.default, [Var("x"), Var("y")], -1), root) is not None
    assert match(Op(aten.cat.default, [Var("x")], -1), root) is None
    assert match(Op(aten.cat.default, [Var("x"), Var("y")], 0), root) is None
    assert match(Op(aten.add.Tensor, Var("x"), 1), call(graph, aten.add.Tensor, a, 1.0)) is not None


def test_a_keyword_means_something_the_pattern_does_not() -> None:
    graph, (a, b) = inputs(2)
    root = graph.call_function(aten.add.Tensor, (a, b), {"alpha": 2})
    assert match(Op(aten.add.Tensor, Var("x"), Var("y")), root) is None


def test_equal_operators_on_equal_operands_are_one_value() -> None:
    graph, (a, b) = inputs(2)
    one, two, other = (call(graph, aten.to.dtype, source, torch.float32) for source in (a, a, b))
    assert equivalent(one, two) and not equivalent(one, other)
    assert not equivalent(one, call(graph, aten.to.dtype, a, torch.bfloat16))
    assert not equivalent(1, True)
    root = call(graph, aten.add.Tensor, one, call(graph, aten.mul.Tensor, b, two))
    assert match(SCALED_SUM, root) is not None
