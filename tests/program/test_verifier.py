"""The verifier: programs broken one rule at a time, each refused for that rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from h3compile.program.peel import peel
from h3compile.program.program import Call, Level, Program
from h3compile.program.region import Port, Region
from h3compile.program.stages import Stage
from h3compile.program.verifier import VerificationError, verify
from h3compile.program.weights import Load

aten = torch.ops.aten


@pytest.fixture
def toy(toys: SimpleNamespace) -> Program:
    return toys.toy()


def test_a_legal_program_comes_back_with_fresh_ports(toys: SimpleNamespace, toy: Program) -> None:
    region = toy.regions["leave"]
    stale = replace(region, outputs=tuple(replace(port, shape=(1,)) for port in region.outputs))
    after = verify(toy.evolve(regions={**toy.regions, "leave": stale}))
    assert after.port_of("result").shape == ("rows", 8)
    assert after.calls == toy.calls


def refuse(broken: Program, reason: str) -> None:
    with pytest.raises(VerificationError, match=reason):
        verify(broken)


Edit = Callable[[Region, dict[str, torch.fx.Node]], Region]


def edit_block(toys: SimpleNamespace, toy: Program, edit: Edit) -> Program:
    region, nodes = toys.copied(toy.regions["block"])
    return toy.evolve(regions={**toy.regions, "block": edit(region, nodes)})


def retarget(name: str, target: object) -> Edit:
    def edit(region: Region, nodes: dict[str, torch.fx.Node]) -> Region:
        nodes[name].target = target  # type: ignore[assignment]
        return region

    return edit


def arguments(name: str, *changed: object) -> Edit:
    def edit(region: Region, nodes: dict[str, torch.fx.Node]) -> Region:
        nodes[name].args = tuple(
            nodes[argument] if isinstance(argument, str) else argument for argument in changed
        )
        return region

    return edit


def returns(*names: str) -> Edit:
    def edit(region: Region, nodes: dict[str, torch.fx.Node]) -> Region:
        output = next(iter(reversed(region.graph.nodes)))
        output.args = (tuple(nodes[name] for name in names),)
        return replace(region, outputs=tuple(Port(name, torch.float32, ()) for name in names))

    return edit


def ports(**changed: object) -> Edit:
    def edit(region: Region, nodes: dict[str, torch.fx.Node]) -> Region:
        return replace(region, **changed)

    return edit


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (retarget("silu_default", torch.nn.functional.silu), "block/silu_default: .* is not an operator"),
        (retarget("silu_default", torch.ops.prims.neg.default), "block/silu_default: .* is not an operator"),
        (retarget("silu_default", aten.relu_.default), "relu_.default changes its operands"),
        (retarget("silu_default", aten.rand_like.default), "rand_like.default draws random numbers"),
        (retarget("silu_default", aten.empty_like.default), "leaves its memory as it was"),
        (arguments("linear_default", "silu_default", "index"), "region block does not propagate"),
        (arguments("linear_default", "silu_default", "hidden"), "does not propagate|fixes the length"),
        (arguments("mul_tensor", "context", 1j), "is not a graph constant"),
        (arguments("silu_default", "add_tensor"), "region block does not lint"),
        (returns("hidden"), "region block returns hidden, which it does not compute"),
        (returns("add_tensor", "add_tensor"), "region block returns add_tensor twice"),
        (ports(outputs=()), "region block returns 1 values for 0 ports"),
        (ports(name="black"), "region black is filed under block"),
    ],
)
def test_a_broken_graph(toys: SimpleNamespace, toy: Program, edit: Edit, reason: str) -> None:
    refuse(edit_block(toys, toy, edit), reason)


def test_a_length_that_is_specialized(toys: SimpleNamespace, toy: Program) -> None:
    def edit(region: Region, nodes: dict[str, torch.fx.Node]) -> Region:
        with region.graph.inserting_before(nodes["mul_tensor"]):
            view = region.graph.call_function(aten.view.default, (nodes["context"], [6, 8]))
        nodes["mul_tensor"].args = (view, 2.0)
        return region

    refuse(
        edit_block(toys, toy, edit), r"region block: view\w* \(aten.view.default\) fixes the length rows to 6"
    )


def test_placeholders_are_the_ports_in_order(toys: SimpleNamespace, toy: Program) -> None:
    block = toy.regions["block"]
    mod, own, up = block.weights
    # All three have one shape: nothing but the name tells that the wrong one is used.
    swapped = replace(block, weights=(own, mod, up))
    refuse(
        toy.evolve(regions={**toy.regions, "block": swapped}),
        "region block has placeholder mod_weight where its port is own_weight",
    )
    short = replace(block, weights=(mod, own))
    refuse(toy.evolve(regions={**toy.regions, "block": short}), "region block has 7 placeholders for 6 ports")


def test_two_ports_of_one_name(toys: SimpleNamespace, toy: Program) -> None:
    def edit(region: Region, nodes: dict[str, torch.fx.Node]) -> Region:
        nodes["own_weight"].target = "mod_weight"
        mod, _, up = region.weights
        return replace(region, weights=(mod, mod, up))

    refuse(edit_block(toys, toy, edit), "region block has two ports of one name|does not lint")


def test_a_result_that_is_no_tuple(toys: SimpleNamespace, toy: Program) -> None:
    def edit(region: Region, nodes: dict[str, torch.fx.Node]) -> Region:
        output = next(iter(reversed(region.graph.nodes)))
        output.args = (output.args[0][0],)
        return region

    refuse(edit_block(toys, toy, edit), "region block does not return a tuple")


def calls(toy: Program, at: int, **changed: object) -> Program:
    listed = list(toy.calls)
    listed[at] = replace(listed[at], **changed)  # type: ignore[arg-type]
    return toy.evolve(calls=tuple(listed))


@pytest.mark.parametrize(
    ("at", "changed", "reason"),
    [
        (0, {"region": "nothing"}, "nothing.0 calls a region that is not there"),
        (1, {"index": 1}, "block.1 is call number 0 of its region"),
        (1, {"inputs": ("h2", "emb", "context", "index")}, "block.0 reads h2 before it is computed"),
        (1, {"inputs": ("h9", "emb", "context", "index")}, "block.0 reads h9 before it is computed"),
        (1, {"inputs": ("h0", "emb", "context")}, "block.0 has 3 inputs for 4 ports"),
        (1, {"inputs": ("h0", "context", "emb", "index")}, r"block.0 reads .*: float32\[rows, 8\] as emb"),
        (
            1,
            {"inputs": ("index", "emb", "context", "index")},
            r"block.0 reads index: int64\[rows\] as hidden",
        ),
        (1, {"weights": ("m0", "c0")}, "block.0 has 2 weights for 3 ports"),
        (1, {"weights": ("m0", "c0", "w9")}, "block.0 binds w9, which is not in the weight table"),
        (1, {"weights": ("m0", "c0", "entry.w")}, r"block.0 binds entry.w torch.float32 \(8, 1\) as up"),
        (1, {"weights": ("m0", "c0", "c0")}, "weight w0 is bound by no call"),
        (1, {"outputs": ("h1", "more")}, "block.0 has 2 outputs for 1 ports"),
        (1, {"outputs": ("h0",)}, "block.0 defines h0 a second time"),
        (1, {"outputs": ("x",)}, "block.0 defines x a second time"),
        (3, {"outputs": ("other",)}, "output result is never computed"),
    ],
)
def test_a_broken_call(toy: Program, at: int, changed: dict[str, object], reason: str) -> None:
    refuse(calls(toy, at, **changed), reason)


def test_calls_out_of_order(toy: Program) -> None:
    first, *rest = toy.calls
    refuse(toy.evolve(calls=(*rest, first)), "block.0 reads h0 before it is computed")


def test_a_region_that_nobody_calls(toys: SimpleNamespace, toy: Program) -> None:
    extra = replace(toy.regions["leave"], name="extra")
    refuse(toy.evolve(regions={**toy.regions, "extra": extra}), "region extra is never called")


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (None, "block.1 binds w1, which is not in the weight table"),
        (
            Load("w1", (8, 9), torch.float32),
            r"block.1 binds w1 torch.float32 \(8, 9\) as up: float32\[8, 8\]",
        ),
        (Load("w1", (8, 8), torch.bfloat16), r"block.1 binds w1 torch.bfloat16 \(8, 8\) as up"),
    ],
)
def test_a_broken_weight(toy: Program, weight: Load | None, reason: str) -> None:
    weights = {name: entry for name, entry in toy.weights.items() if name != "w1"}
    refuse(toy.evolve(weights=weights if weight is None else {**weights, "w1": weight}), reason)


def test_a_weight_that_nobody_binds(toy: Program) -> None:
    weights = {**toy.weights, "spare": Load("spare", (1,), torch.float32)}
    refuse(toy.evolve(weights=weights), "weight spare is bound by no call")


def test_several_problems_are_counted(toy: Program) -> None:
    weights = {**toy.weights, "a": Load("a", (1,), torch.float32), "b": Load("b", (1,), torch.float32)}
    refuse(toy.evolve(weights=weights), r"is bound by no call \(and 1 more\)")


def folded(toy: Program) -> Program:
    peeled = peel(toy, Stage.SCHEDULE)
    return peeled.program.evolve(tables=peeled.values)


def test_tables(toy: Program) -> None:
    program = folded(toy)
    assert len(program.tables) == 2
    assert verify(program).tables == program.tables


def test_a_schedule_value_in_the_step_that_is_no_table(toy: Program) -> None:
    program = folded(toy)
    refuse(
        program.evolve(tables=program.tables[:1]),
        r"block.1 reads .*, a schedule value that is not a table",
    )


@pytest.mark.parametrize("value", ["h1", "context", "t", "nothing"])
def test_a_table_that_no_schedule_call_computes(toy: Program, value: str) -> None:
    program = folded(toy)
    refuse(
        program.evolve(tables=(*program.tables, value)), f"table {value} is not computed by a schedule call"
    )


def test_what_only_a_trace_may_hold(toys: SimpleNamespace) -> None:
    region = toys.region("r", (toys.wide("x"),), (), lambda op, x: (op(aten.dropout.default, x, 0.0, False),))
    call = Call("r", 0, ("x",), (), ("y",))
    made = toys.program((region,), (call,), ("y",), level=Level.TRACED)
    refuse(made.evolve(level=Level.CANONICAL), "r/dropout_default: aten.dropout.default should have left")
