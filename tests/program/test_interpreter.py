"""The interpreter: the same numbers as the plain sum of its operators, in any dtype, tables included."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear, silu

from h3compile.program.interpreter import Interpreter
from h3compile.program.peel import peel
from h3compile.program.program import Program
from h3compile.program.region import Port
from h3compile.program.stages import Stage
from h3compile.program.verifier import verify

aten = torch.ops.aten


def by_hand(w: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> torch.Tensor:
    hidden, emb = -given["x"], linear(given["t"].unsqueeze(1), w["entry.w"])
    twice = silu(given["text"]) * 2.0
    for m, c, u in (("m0", "c0", "w0"), ("m1", "c1", "w1")):
        scale = linear(silu(emb), w[m]).index_select(0, given["index"]) + 1.0
        hidden = (silu(linear(hidden * scale, w[u])) + linear(twice, w[c])) + (twice + hidden)
    return linear(hidden, w["leave.w"])


@pytest.fixture
def folded(toys: SimpleNamespace) -> Program:
    peeled = peel(toys.toy(), Stage.SCHEDULE)
    return verify(peeled.program.evolve(tables=peeled.values))


def test_the_toy_by_hand(toys: SimpleNamespace) -> None:
    program = toys.toy()
    weights, given = toys.tensors(program), toys.inputs()
    result = Interpreter(program, toys.Tensors(weights))(given)
    assert list(result) == ["result"]
    assert torch.equal(result["result"], by_hand(weights, given))


def test_float64_throughout(toys: SimpleNamespace) -> None:
    program = toys.toy()
    weights, given = toys.tensors(program), toys.inputs()
    result = Interpreter(program, toys.Tensors(weights), dtype=torch.float64)(given)["result"]
    doubled = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    assert result.dtype is torch.float64
    assert torch.equal(result, by_hand({k: v.double() for k, v in weights.items()}, doubled))


def test_casts_and_created_tensors_follow_the_dtype(toys: SimpleNamespace) -> None:
    def body(op, x):  # type: ignore[no-untyped-def]
        low = op(aten.to.dtype, x, torch.bfloat16)
        grid = op(aten.arange.start, 0, 8, dtype=torch.float32, device=torch.device("cpu"))
        return (op(aten.to.dtype, op(aten.mul.Tensor, low, op(aten.div.Tensor, grid, 7.0)), torch.float32),)

    region = toys.region("r", (toys.wide("x"),), (), body)
    program = toys.program((region,), (toys.call("r", 0, "x", "", "y"),), ("y",))
    given = toys.inputs()
    exact = Interpreter(program, toys.Tensors({}), dtype=torch.float64)(given)["y"]
    assert torch.equal(exact, given["x"].double() * (torch.arange(8).double() / 7))
    assert not torch.equal(Interpreter(program, toys.Tensors({}))(given)["y"].double(), exact)


def test_inputs_are_cast_as_declared(toys: SimpleNamespace) -> None:
    program = toys.toy()
    source, given = toys.Tensors(toys.tensors(program)), toys.inputs()
    wide = {k: v.double() if v.is_floating_point() else v.int() for k, v in given.items()}
    run = Interpreter(program, source)
    assert torch.equal(run(given)["result"], run(wide)["result"])


@pytest.mark.parametrize("times", [1, 2, 3, 5])
def test_tables_have_the_bits_of_each_timestep_alone(
    toys: SimpleNamespace, folded: Program, times: int
) -> None:
    program = toys.toy()
    weights, given = toys.tensors(program), toys.inputs(rows=7, times=times)
    source = toys.Tensors(weights)
    alone = Interpreter(program, source, alone=True)(given)["result"]
    assert torch.equal(Interpreter(folded, source)(given)["result"], alone)
    # The same row, whichever other timesteps are asked for.
    for i in range(times):
        rows = (given["index"] == i).nonzero().flatten()
        single = {**given, "t": given["t"][i : i + 1], "index": torch.zeros_like(given["index"])}
        assert torch.equal(Interpreter(folded, source)(single)["result"][rows], alone[rows])


def test_alone_means_every_operator_not_only_products(toys: SimpleNamespace) -> None:
    """A vectorized silu may round the end of a buffer otherwise than its middle."""
    shapes: list[tuple[int, ...]] = []

    @torch.library.custom_op("h3compile::spy_on_rows", mutates_args=())
    def spy(x: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return x.clone()

    spy.register_fake(torch.empty_like)

    def body(op, x, t):  # type: ignore[no-untyped-def]
        seen = op(torch.ops.h3compile.spy_on_rows.default, op(aten.unsqueeze.default, t, 1))
        return (op(aten.mul.Tensor, x, op(aten.sum.default, seen)),)

    region = toys.region("r", (toys.wide("x"), Port("t", torch.float32, ("timesteps",))), (), body)
    program = toys.program((region,), (toys.call("r", 0, "x t", "", "y"),), ("y",))
    shapes.clear()
    Interpreter(program, toys.Tensors({}))(toys.inputs(times=3))
    Interpreter(program, toys.Tensors({}), alone=True)(toys.inputs(times=3))
    assert shapes == [(3, 1), (1, 1), (1, 1), (1, 1)]


def test_weights_are_read_when_a_call_runs(toys: SimpleNamespace) -> None:
    program = toys.toy()
    source = toys.Tensors(toys.tensors(program))
    run = Interpreter(program, source)
    assert source.reads == []
    run(toys.inputs())
    assert source.reads == [weight for call in program.calls for weight in call.weights]
