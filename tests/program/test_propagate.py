"""Propagation: every length stays free, and an operator that pins one is named."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import fx

from h3compile.program.facts import Dim
from h3compile.program.propagate import DimSpecialized, propagate
from h3compile.program.region import Port, Region

aten = torch.ops.aten
DIMS = (Dim("rows", hint=6), Dim("timesteps", hint=2), Dim("others", hint=6))


@pytest.fixture
def body(toys: SimpleNamespace) -> Callable[..., Region]:
    """A function from a body to a region over a [rows, 8], b [others, 8] and t [timesteps]."""

    def of(make: Callable[..., tuple[fx.Node, ...]]) -> Region:
        ports = (toys.wide("a"), toys.wide("b", "others"), Port("t", torch.float32, ("timesteps",)))
        return toys.region("r", ports, (), make)

    return of


def test_shapes_in_names(body: Callable[..., Region]) -> None:
    def make(op, a, b, t):  # type: ignore[no-untyped-def]
        column = op(aten.unsqueeze.default, t, 1)
        return (
            op(aten.cat.default, [a, b], 0),
            op(aten.expand.default, column, [-1, 3]),
            op(aten.flatten.using_ints, op(aten.expand.default, column, [-1, 3]), 0, 1),
            op(aten.to.dtype, a, torch.bfloat16),
            op(aten.slice.Tensor, a, 0, 2, 2**63 - 1),
        )

    outputs = propagate(body(make), DIMS).outputs
    assert [port.shape for port in outputs[1:4]] == [("timesteps", 3), ("3*timesteps",), ("rows", 8)]
    assert outputs[3].dtype is torch.bfloat16
    assert set(str(outputs[0].shape[0]).replace(" ", "").split("+")) == {"rows", "others"}
    assert outputs[4].shape[0] in ("rows - 2", "-2 + rows")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda op, a, b, t: (op(aten.view.default, a, [6, 8]),), r"view.* fixes the length rows to 6"),
        (
            lambda op, a, b, t: (op(aten.add.Tensor, a, b),),
            r"add.* fixes the length (rows to others|others to rows)",
        ),
        (
            lambda op, a, b, t: (op(aten.view.default, a, [-1, 2, 8]),),
            r"view.* does not work for rows = 3: it takes Eq\(Mod\(8\*rows, 16\), 0\)",
        ),
        (
            lambda op, a, b, t: (op(aten.linear.default, a, op(aten.slice.Tensor, b, 0, 0, 8)),),
            r"does not work for others|fixes the length",
        ),
    ],
)
def test_a_length_that_is_pinned(
    body: Callable[..., Region], make: Callable[..., tuple[fx.Node, ...]], reason: str
) -> None:
    with pytest.raises(DimSpecialized, match=reason):
        propagate(body(make), DIMS)


def test_a_range_is_a_promise(body: Callable[..., Region]) -> None:
    """What only works for even lengths is legal where the facts say that no others come."""
    region = body(lambda op, a, b, t: (op(aten.view.default, a, [-1, 2, 8]),))
    (out,) = propagate(region, (Dim("rows", hint=2, smallest=2, largest=2), *DIMS[1:])).outputs
    assert out.shape[0] == "(rows//2)"


def test_the_graph_given_is_not_edited(body: Callable[..., Region]) -> None:
    region = body(lambda op, a, b, t: (op(aten.relu.default, a),))
    names = [node.name for node in region.graph.nodes]
    after = propagate(region, DIMS)
    assert [node.name for node in region.graph.nodes] == names
    assert all("val" not in node.meta for node in region.graph.nodes)
    assert all("val" in n.meta for n in after.graph.nodes if n.op != "output")


def test_lengths_and_tuples_have_values_but_no_port(body: Callable[..., Region]) -> None:
    def make(op, a, b, t):  # type: ignore[no-untyped-def]
        size = op(aten.sym_size.int, a, 0)
        half = op(operator.getitem, op(aten.chunk.default, a, 2, 1), 0)
        return op(aten.new_zeros.default, a, [op(operator.mul, size, 2), 8]), half

    region = propagate(body(make), DIMS)
    assert [port.shape for port in region.outputs] == [("2*rows", 8), ("rows", 4)]
    bare = {n.name for n in region.graph.nodes if n.op == "call_function" and "port" not in n.meta}
    assert bare == {"sym_size_int", "chunk_default", "mul"}


def test_symbols_are_spelled_by_name_even_when_a_name_looks_like_one(toys: SimpleNamespace) -> None:
    """Dimensions may be called what PyTorch would call a symbol."""
    dims = [Dim(f"s{i}", hint=6 + i) for i in range(30)]
    ports = tuple(toys.wide(f"p{i}", f"s{i}") for i in range(30))
    region = toys.region("r", ports, (), lambda op, *nodes: tuple(op(aten.neg.default, n) for n in nodes))
    assert [port.shape[0] for port in propagate(region, dims).outputs] == [dim.name for dim in dims]
