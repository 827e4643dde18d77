"""The pass harness: a pass that the verifier accepts and the numbers refuse is caught, in every tier."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import fx

from h3compile.pipeline.base import Match, Pass, Rewrite, Tier
from h3compile.pipeline.manager import Manager
from h3compile.pipeline.testing import ROUNDING_BOUND, Case, check_pass, distance, weight_source
from h3compile.program.peel import peel
from h3compile.program.program import Program
from h3compile.program.stages import Stage
from h3compile.targets import Target, find_target

aten = torch.ops.aten
Edit = Callable[[fx.Graph, dict[str, fx.Node]], None]


def drop_the_one(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    """``hidden * scale`` where ``hidden * (1 + scale)`` was."""
    one = next(n for n in nodes.values() if n.target is aten.add.Tensor and n.args[1] == 1.0)
    one.replace_all_uses_with(one.args[0])
    graph.erase_node(one)


def silu_to_relu(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    for node in nodes.values():
        if node.target is aten.silu.default:
            node.target = aten.relu.default


def exchange_weights(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    """Two weights of one shape change places: nothing but the numbers shows it."""
    for node in nodes.values():
        if node.target is aten.linear.default and node.args[1] in (nodes["mod_weight"], nodes["own_weight"]):
            other = "own_weight" if node.args[1] is nodes["mod_weight"] else "mod_weight"
            node.args = (node.args[0], nodes[other])


def one_bit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    """1.0 becomes the next float32."""
    one = next(n for n in nodes.values() if n.target is aten.add.Tensor and n.args[1] == 1.0)
    one.args = (one.args[0], 1.0 + 2**-23)


def regroup(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    """(a + b) + c becomes a + (b + c): another rounding of the same sum."""
    *_, last = (n for n in nodes.values() if n.target is aten.add.Tensor)
    left, right = last.args
    with graph.inserting_before(last):
        inner = graph.call_function(aten.add.Tensor, (left.args[1], right))
    last.args = (left.args[0], inner)


def nothing(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None: ...


@pytest.fixture
def case(toys: SimpleNamespace) -> Case:
    program = toys.toy()
    inputs = [toys.inputs(rows, times, seed=rows) for rows, times in ((5, 2), (1, 1), (37, 3))]
    return Case(program, weight_source(toys.tensors(program)), inputs)


@pytest.fixture
def planted(toys: SimpleNamespace) -> Callable[..., Pass]:
    """A function from an edit of a region and a tier to the pass."""

    def of(edit: Edit, held_to: Tier, name_of_region: str = "block") -> Pass:
        @dataclass(frozen=True)
        class Plant(Pass):
            name: ClassVar[str] = "plant"
            tier: ClassVar[Tier] = held_to

            def apply(self, program: Program, target: Target) -> Rewrite:
                region, nodes = toys.copied(program.regions[name_of_region])
                edit(region.graph, nodes)
                edited = program.evolve(regions={**program.regions, region.name: region})
                return Rewrite(edited, (Match(region.name, region.name),))

        return Plant()

    return of


WRONG = [drop_the_one, silu_to_relu, exchange_weights]


@pytest.mark.parametrize("edit", [*WRONG, one_bit, regroup])
def test_the_verifier_does_not_see_it(case: Case, planted: Callable[..., Pass], edit: Edit) -> None:
    """Otherwise the tests below would show nothing about the harness."""
    Manager([planted(edit, Tier.EXACT)]).run(case.program, find_target("cpu"))


@pytest.mark.parametrize("edit", WRONG)
@pytest.mark.parametrize(
    ("tier", "bound", "reason"),
    [
        (Tier.EXACT, None, r"plant, input \d, result: \d+ elements differ"),
        (Tier.ROUNDING, None, r"plant, input \d, result: \S+ from float64, the reference \S+"),
        (Tier.LOSSY, 0.02, r"plant, input \d, result: \S+ from float64, the bound is 2.000e-02"),
    ],
)
def test_wrong_numbers_are_caught(
    case: Case, planted: Callable[..., Pass], edit: Edit, tier: Tier, bound: float | None, reason: str
) -> None:
    with pytest.raises(AssertionError, match=reason):
        check_pass(planted(edit, tier), case, bound=bound)


@pytest.mark.parametrize("edit", [one_bit, regroup])
def test_one_bit_is_not_exact(case: Case, planted: Callable[..., Pass], edit: Edit) -> None:
    with pytest.raises(AssertionError, match="elements differ"):
        check_pass(planted(edit, Tier.EXACT), case)


def test_another_rounding_is_no_error_where_it_is_allowed(case: Case, planted: Callable[..., Pass]) -> None:
    """As close to float64 as before, give or take; the bound is for sums of the model's size."""
    large = replace(case, inputs=case.inputs[2:])
    outcome = check_pass(planted(regroup, Tier.ROUNDING), large)
    ((was, now),) = (errors["result"] for errors in outcome.errors)
    assert 0 < now <= ROUNDING_BOUND * was < 1e-5
    check_pass(planted(regroup, Tier.LOSSY), large, bound=1e-6)


@pytest.mark.parametrize("tier", [Tier.EXACT, Tier.ROUNDING, Tier.LOSSY])
def test_a_pass_that_keeps_its_tier(case: Case, planted: Callable[..., Pass], tier: Tier) -> None:
    bound = 1e-6 if tier is Tier.LOSSY else None
    outcome = check_pass(planted(nothing, tier), case, bound=bound)
    assert outcome.run.matches == {"block": 1}
    assert len(outcome.errors) == len(case.inputs)
    assert all(was == now for errors in outcome.errors for was, now in errors.values())


def test_zero_and_minus_zero_are_not_equal_bits(
    case: Case, planted: Callable[..., Pass], toys: SimpleNamespace
) -> None:
    weights = {name: torch.zeros_like(value) for name, value in toys.tensors(case.program).items()}

    def negate(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        output = next(iter(reversed(graph.nodes)))
        (result,) = output.args[0]
        with graph.inserting_before(output):
            output.args = ((graph.call_function(aten.neg.default, (result,)),),)

    silent = replace(case, source=weight_source(weights))
    # Every result is a zero, because every weight is; its sign is a bit.
    with pytest.raises(AssertionError, match="elements differ"):
        check_pass(planted(negate, Tier.EXACT, "leave"), silent)
    check_pass(planted(negate, Tier.ROUNDING, "leave"), silent)


def test_a_result_of_zeros_may_be_judged(
    case: Case, planted: Callable[..., Pass], toys: SimpleNamespace
) -> None:
    weights = {name: torch.zeros_like(value) for name, value in toys.tensors(case.program).items()}
    silent = replace(case, source=weight_source(weights))
    for tier in (Tier.ROUNDING, Tier.LOSSY):
        outcome = check_pass(planted(nothing, tier), silent, bound=0.0 if tier is Tier.LOSSY else None)
        assert outcome.errors[0]["result"] == (0.0, 0.0)


def test_a_pass_is_judged_on_what_those_before_it_left(case: Case, planted: Callable[..., Pass]) -> None:
    """The error of an earlier pass is not charged to this one."""
    earlier = planted(drop_the_one, Tier.EXACT)

    @dataclass(frozen=True)
    class Later(Pass):
        name: ClassVar[str] = "later"
        tier: ClassVar[Tier] = Tier.EXACT
        requires: ClassVar[tuple[str, ...]] = ("plant",)

        def apply(self, program: Program, target: Target) -> Rewrite:
            peeled = peel(program, Stage.REQUEST)
            return Rewrite(peeled.program, tuple(Match("value", v) for v in peeled.values))

    outcome = check_pass(Later(), case, after=[earlier])
    assert outcome.run.name == "later"
    assert len(outcome.before.calls) < len(outcome.after.calls)


@dataclass(frozen=True)
class Fold(Pass):
    name: ClassVar[str] = "fold"
    tier: ClassVar[Tier] = Tier.EXACT

    def apply(self, program: Program, target: Target) -> Rewrite:
        peeled = peel(program, Stage.SCHEDULE)
        matches = tuple(Match("table", v) for v in peeled.values)
        return Rewrite(peeled.program.evolve(tables=peeled.values), matches)


def test_tables_are_held_to_each_timestep_alone(case: Case) -> None:
    assert check_pass(Fold(), case).run.matches == {"table": 2}


def test_a_bound_belongs_to_a_lossy_pass(case: Case, planted: Callable[..., Pass]) -> None:
    with pytest.raises(ValueError, match="plant is lossy"):
        check_pass(planted(nothing, Tier.LOSSY), case)
    for tier in (Tier.EXACT, Tier.ROUNDING):
        with pytest.raises(ValueError, match=f"plant is {tier}: a bound is for lossy passes"):
            check_pass(planted(nothing, tier), case, bound=0.1)


def test_a_case_needs_inputs(case: Case, planted: Callable[..., Pass]) -> None:
    with pytest.raises(ValueError, match="a case without inputs shows nothing"):
        check_pass(planted(nothing, Tier.EXACT), replace(case, inputs=[]))


def values() -> Iterator[tuple[list[float], list[float], float]]:
    yield [1.0, 2.0], [1.0, 2.0], 0.0
    yield [3.0, 4.0], [0.0, 5.0], math.sqrt(10) / 5
    yield [0.0, 0.0], [0.0, 0.0], 0.0
    yield [1.0, 0.0], [0.0, 0.0], math.inf
    yield [math.nan, 0.0], [0.0, 1.0], math.inf
    yield [math.inf, 0.0], [0.0, 1.0], math.inf
    yield [2.0, 0.0], [1.0, 0.0], 1.0


@pytest.mark.parametrize(("value", "exact", "expected"), values())
def test_distance(value: list[float], exact: list[float], expected: float) -> None:
    found = distance(torch.tensor(value), torch.tensor(exact, dtype=torch.float64))
    assert found == pytest.approx(expected, rel=1e-12)
