"""Cutting: a piece gets everything it needs, and its ports say where it came from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from h3compile.program.cut import closure, computed, cut, is_tensor, leaving, returned
from h3compile.program.program import Program
from h3compile.program.region import Port

aten = torch.ops.aten


@pytest.fixture
def made(toys: SimpleNamespace) -> Program:
    def body(op, a, w):  # type: ignore[no-untyped-def]
        rows = op(aten.sym_size.int, a, 0)
        zeros = op(aten.new_zeros.default, a, [rows, 8])
        parts = op(aten.chunk.default, a, 2, 1)
        import operator

        half = op(operator.getitem, parts, 1)
        product = op(aten.linear.default, op(aten.add.Tensor, a, zeros), w)
        return product, op(aten.neg.default, half)

    region = toys.region("r", (toys.wide("a"),), (toys.wide("up.weight", 8),), body)
    return toys.program((region,), (toys.call("r", 0, "x", "w", "u v"),), ("u", "v"))


def nodes_of(made: Program) -> dict[str, torch.fx.Node]:
    return {node.name: node for node in made.regions["r"].graph.nodes}


def test_lengths_and_tuples_cannot_cross(made: Program) -> None:
    nodes = nodes_of(made)
    names = [n.name for n in computed(made.regions["r"].graph) if not is_tensor(n)]
    assert names == ["sym_size_int", "chunk_default"]
    assert [n.name for n in closure([nodes["new_zeros_default"]])] == ["sym_size_int", "new_zeros_default"]
    assert [n.name for n in closure([nodes["getitem"]])] == ["chunk_default", "getitem"]
    assert [n.name for n in closure([nodes["neg_default"]])] == ["neg_default"]
    assert closure([]) == []


def test_what_is_duplicable_is_taken_along(made: Program) -> None:
    nodes = nodes_of(made)
    taken = closure(
        [nodes["add_tensor" if "add_tensor" in nodes else "add_Tensor"]], lambda n: "zeros" in n.name
    )
    assert [n.name.split("_")[0] for n in taken] == ["sym", "new", "add"]


def test_leaving(made: Program) -> None:
    nodes = nodes_of(made)
    order = computed(made.regions["r"].graph)
    early, late = order[:4], order[4:]
    assert [n.name for n in leaving(early, [late])] == ["new_zeros_default", "getitem"]
    assert leaving(early, [[*early, *late]]) == []
    assert leaving(late, [early]) == []
    assert nodes["chunk_default"] not in leaving(early[:3], [early[3:]])  # a tuple does not leave


def test_a_piece(made: Program) -> None:
    nodes = nodes_of(made)
    add = next(n for n in nodes.values() if n.target is aten.add.Tensor)
    linear = nodes["linear_default"]
    slots = {nodes["up_weight"]: Port("weight", torch.float32, (8, 8))}
    piece = cut("p", [add, linear], [linear], slots)
    assert piece.inputs == (nodes["a"], nodes["new_zeros_default"])
    assert piece.weights == (nodes["up_weight"],)
    assert piece.outputs == (linear,)
    assert [str(p) for p in piece.region.inputs] == [
        "a: float32[rows, 8]",
        "new_zeros_default: float32[rows, 8]",
    ]
    assert piece.region.weights == (Port("weight", torch.float32, (8, 8)),)
    assert [n.name for n in piece.region.graph.nodes][:3] == ["a", "new_zeros_default", "weight"]
    x, w = torch.randn(3, 8), torch.randn(8, 8)
    (value,) = piece.region.module()(x, torch.ones(3, 8), w)
    assert torch.equal(value, torch.nn.functional.linear(x + 1, w))
    assert len(returned(made.regions["r"].graph)) == 2  # the original is as it was
