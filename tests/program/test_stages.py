"""The stages form a join semilattice, and ranks follow it."""

from __future__ import annotations

import itertools

import pytest

from h3compile.program.stages import Stage, join

PAIRS = list(itertools.product(Stage, repeat=2))


@pytest.mark.parametrize(("a", "b", "c"), itertools.product(Stage, repeat=3))
def test_associative(a: Stage, b: Stage, c: Stage) -> None:
    assert (a | b) | c is a | (b | c)


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_commutative_and_an_upper_bound(a: Stage, b: Stage) -> None:
    both = a | b
    assert both is b | a
    assert both | a is both and both | b is both
    assert both.rank >= max(a.rank, b.rank)


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_the_least_upper_bound(a: Stage, b: Stage) -> None:
    above = [s for s in Stage if s | a is s and s | b is s]
    assert all(s | (a | b) is s for s in above)


@pytest.mark.parametrize("a", Stage)
def test_idempotent_with_a_least_and_a_greatest(a: Stage) -> None:
    assert a | a is a
    assert Stage.BUILD | a is a
    assert Stage.STEP | a is Stage.STEP


def test_what_needs_schedule_and_request_is_known_in_the_step() -> None:
    assert Stage.SCHEDULE | Stage.REQUEST is Stage.STEP


def test_join() -> None:
    assert join(()) is Stage.BUILD
    for stages in itertools.permutations((Stage.BUILD, Stage.REQUEST, Stage.BUILD)):
        assert join(stages) is Stage.REQUEST
    assert [stage.rank for stage in Stage] == [0, 1, 2, 3]
