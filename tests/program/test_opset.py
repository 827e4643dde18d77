"""The operator lists: what may stand at which level, each refusal with its reason."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx

from h3compile.program.opset import illegal
from h3compile.program.program import Level

aten = torch.ops.aten


def node(target: Callable[..., object], *args: object, **kwargs: object) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    return graph.call_function(target, (x, *args), kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (node(torch.relu), "is not an operator a program may hold"),
        (node(torch.ops.prims.neg.default), "is not an operator a program may hold"),
        (node(aten.relu_.default), "aten.relu_.default changes its operands"),
        (node(aten.add.out), "aten.add.out changes its operands"),
        (node(aten.rand_like.default), "aten.rand_like.default draws random numbers"),
        (node(aten.bernoulli.p, 0.5), "aten.bernoulli.p draws random numbers"),
        (node(aten.empty_like.default), "aten.empty_like.default leaves its memory as it was"),
        (node(aten.new_empty.default, [2]), "aten.new_empty.default leaves its memory as it was"),
        (node(aten.from_file.default), "aten.from_file.default opens a file"),
        (node(aten.mul.Tensor, 1j), "1j (complex) is not a graph constant"),
    ],
)
@pytest.mark.parametrize("level", Level)
def test_at_no_level(bad: fx.Node, reason: str, level: Level) -> None:
    assert reason in (illegal(bad, level) or "")


@pytest.mark.parametrize(
    "trace_only",
    [
        node(aten.dropout.default, 0.0, False),
        node(aten.type_as.default),
        node(aten._assert_tensor_metadata.default),
        node(aten._assert_async.msg, "no"),
    ],
)
def test_only_in_a_trace(trace_only: fx.Node) -> None:
    assert illegal(trace_only, Level.TRACED) is None
    for level in (Level.CANONICAL, Level.OUTLINED):
        assert "should have left with canonicalize" in (illegal(trace_only, level) or "")


@pytest.mark.parametrize(
    ("dropout", "legal"), [((), True), ((None, 0.0), True), ((None, 0), True), ((None, 0.1), False)]
)
def test_attention_may_not_drop(dropout: tuple[object, ...], legal: bool) -> None:
    graph = fx.Graph()
    q, k, v = (graph.placeholder(name) for name in "qkv")
    attention = graph.call_function(aten.scaled_dot_product_attention.default, (q, k, v, *dropout))
    assert (illegal(attention, Level.OUTLINED) is None) is legal
    if dropout:
        spelled = graph.call_function(
            aten.scaled_dot_product_attention.default, (q, k, v), {"dropout_p": dropout[1]}
        )
        assert (illegal(spelled, Level.OUTLINED) is None) is legal


@pytest.mark.parametrize("target", [aten.silu.default, aten.cos.default, operator.getitem])
@pytest.mark.parametrize("level", Level)
def test_what_computes_is_legal_everywhere(target: Callable[..., object], level: Level) -> None:
    assert illegal(node(target) if target is not operator.getitem else node(target, 0), level) is None


def test_other_kinds_of_nodes() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    method = graph.call_method("relu", (x,))
    assert illegal(method, Level.TRACED) == "call_method nodes are not part of a program"
    assert illegal(x, Level.TRACED) is None
    assert illegal(graph.output((method,)), Level.TRACED) is None
