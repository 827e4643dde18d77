"""The manager trusts no pass: each of these is broken in one way, and caught for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import fx

from h3compile.errors import BuildError
from h3compile.pipeline.base import Match, Pass, Rewrite, Tier
from h3compile.pipeline.manager import Manager
from h3compile.program.conditions import Noisier, Shorter
from h3compile.program.peel import peel
from h3compile.program.program import Level, Program
from h3compile.program.stages import Stage
from h3compile.program.variants import add_variant
from h3compile.program.verifier import VerificationError
from h3compile.program.weights import Load
from h3compile.targets import Target, find_target

aten = torch.ops.aten
CPU = find_target("cpu")
Broken = Callable[[Program], Program]


def planted(
    rewrite: Broken, matches: tuple[Match, ...] = (Match("kind", "here"),), **declared: object
) -> Pass:
    """A pass named `plant` that does this to the program."""

    @dataclass(frozen=True)
    class Plant(Pass):
        name: ClassVar[str] = "plant"
        tier: ClassVar[Tier] = Tier.EXACT

        def apply(self, program: Program, target: Target) -> Rewrite:
            return Rewrite(rewrite(program), matches)

    for key, value in declared.items():
        setattr(Plant, key, value)
    return Plant()


@pytest.fixture
def toy(toys: SimpleNamespace) -> Program:
    return toys.toy()


@pytest.fixture
def edited(toys: SimpleNamespace) -> Callable[..., Broken]:
    """A function from a region and an edit of its copied graph to the rewrite that makes it."""

    def of(name: str, edit: Callable[[fx.Graph, dict[str, fx.Node]], None]) -> Broken:
        def rewrite(program: Program) -> Program:
            region, nodes = toys.copied(program.regions[name])
            edit(region.graph, nodes)
            return program.evolve(regions={**program.regions, name: region})

        return rewrite

    return of


def caught(toy: Program, item: Pass, reason: str) -> None:
    with pytest.raises(VerificationError, match=reason) as error:
        Manager([item]).run(toy, CPU)
    assert "plant" in str(error.value)


def call(at: int, **changed: object) -> Broken:
    def rewrite(program: Program) -> Program:
        calls = list(program.calls)
        calls[at] = replace(calls[at], **changed)  # type: ignore[arg-type]
        return program.evolve(calls=tuple(calls))

    return rewrite


def insert(graph: fx.Graph, source: fx.Node, target: object, *rest: object) -> None:
    """Everybody who read ``source`` reads ``target(source, *rest)``."""
    with graph.inserting_after(source):
        node = graph.call_function(target, (source, *rest))  # type: ignore[arg-type]
    source.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)


# Graphs


def test_wrong_dtype_between_calls(toy: Program, edited: Callable[..., Broken]) -> None:
    rewrite = edited("entry", lambda g, n: insert(g, n["neg_default"], aten.to.dtype, torch.bfloat16))
    caught(toy, planted(rewrite), r"block.0 reads .*: bfloat16\[rows, 8\] as hidden: float32\[rows, 8\]")


def test_wrong_shape_between_calls(toy: Program, edited: Callable[..., Broken]) -> None:
    rewrite = edited("entry", lambda g, n: insert(g, n["neg_default"], aten.slice.Tensor, 1, 0, 4))
    caught(toy, planted(rewrite), r"block.0 reads .*: float32\[rows, 4\] as hidden: float32\[rows, 8\]")


def test_wrong_dtype_in_a_region(toy: Program, edited: Callable[..., Broken]) -> None:
    rewrite = edited("block", lambda g, n: insert(g, n["silu_default"], aten.to.dtype, torch.float64))
    reason = (
        r"region block does not propagate \(linear_default .* multiplies torch.float64 and torch.float32\)"
    )
    caught(toy, planted(rewrite), reason)


def test_wrong_shape_in_a_region(toy: Program, edited: Callable[..., Broken]) -> None:
    rewrite = edited("block", lambda g, n: insert(g, n["silu_default"], aten.slice.Tensor, 1, 0, 4))
    caught(toy, planted(rewrite), "region block does not propagate")


@pytest.mark.parametrize("change", [(aten.to.dtype, torch.bfloat16), (aten.slice.Tensor, 1, 0, 4)])
def test_the_outputs_changed(toy: Program, edited: Callable[..., Broken], change: tuple[object, ...]) -> None:
    rewrite = edited("leave", lambda g, n: insert(g, n["linear_default"], *change))
    caught(toy, planted(rewrite), r"pass 'plant' changed output result from .*\[rows, 8\] to ")


def test_the_outputs_changed_along_with_the_level(toy: Program, edited: Callable[..., Broken]) -> None:
    """A pass that raises the level is held to the outputs too."""
    rewrite = edited("leave", lambda g, n: insert(g, n["linear_default"], aten.to.dtype, torch.bfloat16))
    item = planted(lambda p: rewrite(p).evolve(level=Level.OUTLINED), level=Level.OUTLINED)
    with pytest.raises(VerificationError, match="changed output result"):
        Manager([item]).run(toy.evolve(level=Level.CANONICAL), CPU)


def test_an_unknown_operator(toy: Program, edited: Callable[..., Broken]) -> None:
    rewrite = edited("block", lambda g, n: insert(g, n["silu_default"], torch.nn.functional.silu))
    caught(toy, planted(rewrite), "block/silu: .* is not an operator a program may hold")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (aten.relu_.default, "relu_.default changes its operands"),
        (aten.rand_like.default, "rand_like.default draws random numbers"),
        (aten.empty_like.default, "empty_like.default leaves its memory as it was"),
        (torch.ops.prims.neg.default, "is not an operator a program may hold"),
    ],
)
def test_an_illegal_operator(
    toy: Program, edited: Callable[..., Broken], target: object, reason: str
) -> None:
    caught(toy, planted(edited("block", lambda g, n: insert(g, n["silu_default"], target))), reason)


def test_an_operator_that_left_with_an_earlier_level(toy: Program, edited: Callable[..., Broken]) -> None:
    rewrite = edited("block", lambda g, n: insert(g, n["silu_default"], aten.dropout.default, 0.0, False))
    caught(toy, planted(rewrite), "aten.dropout.default should have left with canonicalize")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [([6, 8], "fixes the length rows to 6"), ([-1, 2, 8], "does not work for rows = 3")],
)
def test_a_length_that_gets_specialized(
    toy: Program, edited: Callable[..., Broken], shape: list[int], reason: str
) -> None:
    def edit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        insert(graph, nodes["linear_default"], aten.view.default, shape)
        view = next(n for n in graph.nodes if n.target is aten.view.default)
        insert(graph, view, aten.view.default, [-1, 8])

    caught(toy, planted(edited("leave", edit)), rf"region leave: view\w* .*{reason}")


def test_placeholders_in_another_order_than_the_ports(toy: Program) -> None:
    def rewrite(program: Program) -> Program:
        block = program.regions["block"]
        own, mod, up = block.weights
        return program.evolve(regions={**program.regions, "block": replace(block, weights=(mod, own, up))})

    caught(toy, planted(rewrite), "region block has placeholder mod_weight where its port is own_weight")


def test_a_placeholder_too_many(toy: Program, edited: Callable[..., Broken]) -> None:
    def edit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        with graph.inserting_after(nodes["w"]):
            graph.placeholder("more")

    caught(toy, planted(edited("leave", edit)), "region leave has 3 placeholders for 2 ports")


# Calls and weights


@pytest.mark.parametrize(
    ("rewrite", "reason"),
    [
        (call(1, inputs=("h2", "emb", "context", "index")), "block.0 reads h2 before it is computed"),
        (call(1, outputs=("h0",)), "block.0 defines h0 a second time"),
        (call(1, weights=("m0", "c0")), "block.0 has 2 weights for 3 ports"),
        (call(1, weights=("m0", "c0", "entry.w")), r"block.0 binds entry.w torch.float32 \(8, 1\) as up"),
        (call(1, weights=("m0", "c0", "c0")), "weight w0 is bound by no call"),
        (call(2, index=0), "block.0 is call number 1 of its region"),
    ],
)
def test_a_broken_call(toy: Program, rewrite: Broken, reason: str) -> None:
    caught(toy, planted(rewrite), reason)


def test_a_weight_dropped(toy: Program) -> None:
    def rewrite(program: Program) -> Program:
        return program.evolve(weights={k: v for k, v in program.weights.items() if k != "c1"})

    caught(toy, planted(rewrite), "block.1 binds c1, which is not in the weight table")


def test_a_weight_of_a_wrong_shape(toy: Program) -> None:
    def rewrite(program: Program) -> Program:
        return program.evolve(weights={**program.weights, "c1": Load("c1", (8, 4), torch.float32)})

    caught(toy, planted(rewrite), r"block.1 binds c1 torch.float32 \(8, 4\) as own.weight: float32\[8, 8\]")


def test_a_schedule_value_in_the_step_that_is_no_table(toy: Program) -> None:
    def rewrite(program: Program) -> Program:
        peeled = peel(program, Stage.SCHEDULE)
        return peeled.program.evolve(tables=peeled.values[1:])

    caught(toy, planted(rewrite), "block.0 reads .*, a schedule value that is not a table")


# The program as a whole


@pytest.mark.parametrize(
    ("declared", "left", "reason"),
    [
        (None, Level.CANONICAL, "at level CANONICAL, not OUTLINED"),
        (Level.CANONICAL, Level.OUTLINED, "at level OUTLINED, not CANONICAL"),
    ],
)
def test_a_wrong_level(toy: Program, declared: Level | None, left: Level, reason: str) -> None:
    caught(toy, planted(lambda p: p.evolve(level=left), level=declared), reason)


def test_other_outputs(toy: Program) -> None:
    caught(toy, planted(lambda p: p.evolve(outputs=("h2",))), "changed which values the program returns")


def test_other_facts(toy: Program) -> None:
    caught(toy, planted(lambda p: p.evolve(facts=replace(p.facts, name="Other"))), "changed the facts")


def test_a_graph_edited_in_place(toy: Program) -> None:
    """The program after is legal, but whoever still holds the one before would see it change."""

    def rewrite(program: Program) -> Program:
        graph = program.regions["leave"].graph
        node = next(n for n in graph.nodes if n.op == "call_function")
        insert(graph, node, aten.neg.default)
        return program

    caught(toy, planted(rewrite), "pass 'plant' edited the program it was given")


def test_weights_edited_in_place(toy: Program) -> None:
    def rewrite(program: Program) -> Program:
        program.weights["w0"] = Load("w1", (8, 8), torch.float32)  # type: ignore[index]
        return program

    program = toy.evolve(weights=dict(toy.weights))
    caught(program, planted(rewrite), "pass 'plant' edited the program it was given")


def test_variants_edited_in_place(toys: SimpleNamespace) -> None:
    def rewrite(program: Program) -> Program:
        program.variants["block"] = program.variants["block"][:1]  # type: ignore[index]
        return program

    counted = toys.counted()
    program = add_variant(counted, "block", toys.dense(counted), Shorter("rows", 4), Noisier(0.9))
    caught(program, planted(rewrite), "pass 'plant' edited the program it was given")


def test_a_program_that_is_broken_before_any_pass(toy: Program) -> None:
    with pytest.raises(VerificationError, match=r"^the program is broken"):
        Manager([]).run(toy.evolve(calls=toy.calls[:-1]), CPU)


# Matches


def expecting(toy: Program, **counts: int) -> Program:
    return toy.evolve(facts=replace(toy.facts, expected={"plant": counts}))


def unchanged(program: Program) -> Program:
    return program


@pytest.mark.parametrize("found", [0, 1, 3])
def test_a_wrong_number_of_matches(toy: Program, found: int) -> None:
    matches = (Match("block", "here"),) * found + (Match("other", "there"),)
    reason = (
        f"^pass 'plant' matched {found} block, this model has 2: report this, or build with --passes -plant$"
    )
    with pytest.raises(BuildError, match=reason):
        Manager([planted(unchanged, matches)], allow_unmatched=["plant"]).run(expecting(toy, block=2), CPU)


def test_the_right_number_of_matches(toy: Program) -> None:
    matches = (Match("block", "a"), Match("block", "b"), Match("other", "c"))
    _, (run,) = Manager([planted(unchanged, matches)]).run(expecting(toy, block=2), CPU)
    assert run.matches == {"block": 2, "other": 1}


def test_nothing_matched(toy: Program) -> None:
    item = planted(unchanged, ())
    with pytest.raises(
        BuildError, match=r"^pass 'plant' matched nothing: take it out, or allow it with --allow"
    ):
        Manager([item]).run(toy, CPU)
    with pytest.raises(BuildError, match="matched nothing"):
        Manager([item], allow_unmatched=["plants"]).run(toy, CPU)
    program, (run,) = Manager([item], allow_unmatched=["plant"]).run(toy, CPU)
    assert run.matches == {} and program.calls == toy.calls


# What a run tells


def test_a_run(toy: Program) -> None:
    def hoist(program: Program) -> Program:
        return peel(program, Stage.REQUEST).program

    program, (run,) = Manager([planted(hoist)]).run(toy, CPU)
    assert (run.name, run.spelled, run.tier, run.matches) == ("plant", "plant", Tier.EXACT, {"kind": 1})
    assert (run.regions_before, run.regions_after) == (3, len(program.regions)) == (3, 5)
    assert run.ops_before["aten.mul.Tensor"] == run.ops_after["aten.mul.Tensor"] == 2
    assert run.seconds > 0
    assert all("val" in n.meta for r in program.regions.values() for n in r.graph.nodes if n.op != "output")


def test_passes_run_in_order_on_what_the_one_before_left(toy: Program) -> None:
    seen: list[tuple[str, int]] = []

    def watch(name: str) -> Broken:
        def rewrite(program: Program) -> Program:
            seen.append((name, len(program.calls)))
            return peel(program, Stage.REQUEST if name == "a" else Stage.SCHEDULE).program

        return rewrite

    second, first = planted(watch("b"), name="b", after=("a",)), planted(watch("a"), name="a")
    _, runs = Manager([second, first]).run(toy, CPU)
    assert [run.name for run in runs] == ["a", "b"]
    assert seen[0] == ("a", 4) and seen[1][1] > 4
    assert runs[0].ops_after == runs[1].ops_before
