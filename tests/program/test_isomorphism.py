"""Isomorphism: proven node by node, refused at the first difference, with its place."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import fx

from h3compile.program.cut import computed
from h3compile.program.isomorphism import NotIsomorphic, isomorphism
from h3compile.program.region import Port

aten = torch.ops.aten
Op = Callable[..., fx.Node]
Pieces = tuple[list[fx.Node], list[fx.Node]]


@pytest.fixture
def pieces(toys: SimpleNamespace) -> Callable[..., Pieces]:
    """A function that lays two bodies over shared inputs and gives the nodes of each."""

    def of(first: Callable[..., object], second: Callable[..., object], *ports: Port) -> Pieces:
        sizes: list[int] = []

        def body(op: Op, *nodes: fx.Node) -> tuple[fx.Node, ...]:
            start = len(nodes)
            first(op, *nodes)
            graph = nodes[0].graph
            sizes.append(len(graph.nodes) - start)
            second(op, *nodes)
            return (next(iter(reversed(graph.nodes))),)

        ports = ports or (toys.wide("a"), toys.wide("b"))
        made = toys.region("r", ports, (), body)
        program = toys.program((made,), (toys.call("r", 0, "x text", "", "out"),), ("out",))
        nodes = computed(program.regions["r"].graph)
        return nodes[: sizes[0]], nodes[sizes[0] :]

    return of


def gated(op: Op, a: fx.Node, b: fx.Node) -> None:
    op(aten.add.Tensor, op(aten.mul.Tensor, a, b), op(aten.silu.default, a))


def test_twins(pieces: Callable[..., Pieces]) -> None:
    first, second = pieces(gated, gated)
    twins = isomorphism(first, second)
    assert [twins[node] for node in first] == second


def test_with_exchanged_inputs_they_are_twins_too(pieces: Callable[..., Pieces]) -> None:
    first, second = pieces(gated, lambda op, a, b: gated(op, b, a))
    twins = isomorphism(first, second)
    a, b = first[0].args
    assert (twins[a], twins[b]) == (b, a)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            lambda op, a, b: op(aten.add.Tensor, op(aten.mul.Tensor, a, b), op(aten.relu.default, a)),
            "operator aten.silu.default against aten.relu.default",
        ),
        (
            lambda op, a, b: op(aten.add.Tensor, op(aten.mul.Tensor, a, b), op(aten.silu.default, b)),
            "operand a already corresponds",
        ),
        (
            lambda op, a, b: op(aten.add.Tensor, op(aten.silu.default, a), op(aten.mul.Tensor, a, b)),
            "operator aten.mul.Tensor against aten.silu.default",
        ),
        (
            lambda op, a, b: op(aten.mul.Tensor, a, b),
            "3 nodes against 1",
        ),
        (
            lambda op, a, b: op(
                aten.add.Tensor, op(aten.mul.Tensor, a, b), op(aten.silu.default, a), alpha=2
            ),
            "0 operands against 1",
        ),
        (
            lambda op, a, b: op(aten.add.Tensor, op(aten.mul.Tensor, a, 2.0), op(aten.silu.default, a)),
            "constant b against 2.0",
        ),
    ],
)
def test_differences(pieces: Callable[..., Pieces], other: Callable[..., object], reason: str) -> None:
    with pytest.raises(NotIsomorphic, match=reason):
        isomorphism(*pieces(gated, other))


@pytest.mark.parametrize(
    ("one", "two"),
    [(1e-5, 1e-6), (0.0, -0.0), (1, 1.0), (1, True), (2.0, 2)],
)
def test_constants_are_compared_by_bits_and_type(
    pieces: Callable[..., Pieces], one: object, two: object
) -> None:
    first, second = pieces(
        lambda op, a, b: op(aten.mul.Tensor, a, one), lambda op, a, b: op(aten.mul.Tensor, a, two)
    )
    with pytest.raises(NotIsomorphic, match="constant"):
        isomorphism(first, second)


def test_inside_against_outside(pieces: Callable[..., Pieces]) -> None:
    def exchanged(op: Op, a: fx.Node, b: fx.Node) -> None:
        silu = op(aten.silu.default, a)
        op(aten.add.Tensor, silu, op(aten.mul.Tensor, a, b))

    first, second = pieces(gated, exchanged)
    with pytest.raises(NotIsomorphic, match="one operand is computed inside, its twin outside"):
        isomorphism([first[0], first[2]], second[1:])


def test_lists_of_operands(pieces: Callable[..., Pieces]) -> None:
    first, second = pieces(
        lambda op, a, b: op(aten.cat.default, [a, b], 0), lambda op, a, b: op(aten.cat.default, [b, a], 0)
    )
    assert len(isomorphism(first, second)) == 3
    first, second = pieces(
        lambda op, a, b: op(aten.cat.default, [a, b], 0), lambda op, a, b: op(aten.cat.default, [a, a], 0)
    )
    with pytest.raises(NotIsomorphic):
        isomorphism(first, second)


def test_operands_of_another_type(toys: SimpleNamespace) -> None:
    ports = (toys.wide("a"), toys.wide("b", "timesteps"))
    made = toys.region("r", ports, (), lambda op, a, b: (op(aten.relu.default, a), op(aten.relu.default, b)))
    entry = toys.region(
        "e",
        (Port("t", torch.float32, ("timesteps",)),),
        (),
        lambda op, t: (op(aten.expand.default, op(aten.unsqueeze.default, t, 1), [-1, 8]),),
    )
    program = toys.program(
        (entry, made),
        (toys.call("e", 0, "t", "", "wide"), toys.call("r", 0, "x wide", "", "o p")),
        ("o", "p"),
    )
    first, second = computed(program.regions["r"].graph)
    with pytest.raises(NotIsomorphic, match=r"a is .*rows.*, b is .*timesteps"):
        isomorphism([first], [second])


def test_lengths_are_compared(toys: SimpleNamespace) -> None:
    """Two lengths have no dtype or shape: they are equal only where their values are."""

    def body(op: Op, a: fx.Node, t: fx.Node) -> tuple[fx.Node, ...]:
        rows, times = op(aten.sym_size.int, a, 0), op(aten.sym_size.int, t, 0)
        return tuple(op(aten.new_zeros.default, a, [size, 8]) for size in (rows, times))

    made = toys.region("r", (toys.wide("a"), Port("t", torch.float32, ("timesteps",))), (), body)
    program = toys.program((made,), (toys.call("r", 0, "x t", "", "o p"),), ("o", "p"))
    *_, first, second = computed(program.regions["r"].graph)
    with pytest.raises(NotIsomorphic):
        isomorphism([first], [second])
    rows, times = computed(program.regions["r"].graph)[:2]
    with pytest.raises(NotIsomorphic, match=r"rows|s\d+"):
        isomorphism([rows], [times])
