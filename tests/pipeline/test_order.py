"""The order of passes: one, whatever the user typed; contradictions are named before anything runs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3compile.errors import BuildError
from h3compile.pipeline.base import Pass, Tier
from h3compile.pipeline.manager import Manager, order


def make(
    name: str,
    *,
    requires: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
    conflicts: tuple[str, ...] = (),
) -> Pass:
    """A pass that declares these and does nothing."""
    declared = {
        "name": name,
        "tier": Tier.EXACT,
        "requires": requires,
        "after": after,
        "conflicts": conflicts,
    }
    return dataclass(frozen=True)(type(name, (Pass,), declared))()


def names(passes: list[Pass]) -> list[str]:
    return [item.name for item in passes]


def test_the_shipped_order() -> None:
    from h3compile.pipeline.registry import Registry

    registry = Registry.default()
    expected = ["canonicalize", "outline", "hoist", "fold-schedule", "fuse", "fp8", "sage", "skip"]
    shipped = [registry.get(name)() for name in expected]
    for typed in itertools.islice(itertools.permutations(shipped), 0, None, 97):
        assert names(order(typed)) == expected


@st.composite
def pipelines(draw: st.DrawFn) -> list[Pass]:
    """Up to seven passes whose declarations point to earlier letters, so that some order exists."""
    letters = "abcdefg"[: draw(st.integers(1, 7))]
    rank = draw(st.permutations(letters))
    passes = []
    for i, letter in enumerate(rank):
        earlier = st.lists(st.sampled_from(rank[:i]), max_size=2, unique=True) if i else st.just([])
        absent = st.lists(st.sampled_from("xyz"), max_size=1)
        passes.append(
            make(
                letter,
                requires=tuple(draw(earlier)),
                after=(*draw(earlier), *draw(absent)),
                conflicts=tuple(draw(absent)),
            )
        )
    return passes


@given(pipelines(), st.randoms(use_true_random=False))
def test_independent_of_how_it_was_typed(passes: list[Pass], random: object) -> None:
    found = names(order(passes))
    typed = list(passes)
    random.shuffle(typed)  # type: ignore[attr-defined]
    assert names(order(typed)) == found
    assert sorted(found) == sorted(item.name for item in passes)
    at = {name: i for i, name in enumerate(found)}
    for item in passes:
        for before in (*item.requires, *item.after):
            assert before not in at or at[before] < at[item.name]


def test_ties_go_by_name() -> None:
    assert names(order([make("c"), make("a"), make("b", after=("c",))])) == ["a", "c", "b"]


def test_after_does_not_demand_presence() -> None:
    assert names(order([make("a", after=("z",))])) == ["a"]


def refuse(passes: list[Pass], reason: str) -> None:
    """Refused for the same reason in every order typed, and by the manager before it runs."""
    messages = set()
    for typed in itertools.permutations(passes):
        with pytest.raises(BuildError, match=reason) as caught:
            Manager(typed)
        messages.add(str(caught.value))
    assert len(messages) == 1, messages


def test_a_missing_requirement() -> None:
    refuse(
        [make("hoist", requires=("outline",)), make("a")],
        "^pass 'hoist' needs 'outline': add outline, or take out hoist$",
    )


@pytest.mark.parametrize("both", [True, False])
def test_a_conflict(both: bool) -> None:
    """It is enough that one of the two declares it."""
    passes = [make("fp8", conflicts=("nvfp4",)), make("nvfp4", conflicts=("fp8",) if both else ())]
    refuse(passes, "^passes 'fp8' and 'nvfp4' exclude each other: take one of them out$")


def test_a_cycle() -> None:
    passes = [make("a", after=("c",)), make("b", after=("a",)), make("c", requires=("b",)), make("d")]
    refuse(passes, "^the passes a -> b -> c each want to run before the next: take one of them out$")


def test_a_pass_after_itself() -> None:
    refuse([make("a", after=("a",))], "^the passes a each want to run before the next")


def test_a_pass_twice() -> None:
    refuse([make("a"), make("b"), make("a")], "^pass 'a' is there twice: name it once$")


def test_of_several_contradictions_the_same_one_is_told() -> None:
    refuse(
        [make("b", requires=("x",)), make("a", requires=("y",)), make("c", conflicts=("a",))],
        "pass 'a' needs 'y'",
    )


def test_nothing_is_run_to_find_out() -> None:
    ran: list[str] = []

    @dataclass(frozen=True)
    class Loud(Pass):
        name: ClassVar[str] = "loud"
        tier: ClassVar[Tier] = Tier.EXACT
        requires: ClassVar[tuple[str, ...]] = ("absent",)

        def apply(self, program, target):  # type: ignore[no-untyped-def]
            ran.append("loud")

    with pytest.raises(BuildError):
        Manager([Loud()])
    assert ran == []
