"""What the search finds is what simulating every candidate finds, and it simulates few of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from h3compile.plan.residency import Residency
from h3compile.plan.search import EQUAL, TOLERANCE, Candidate, fastest, frontier, smallest

BLOCKS = ("block.0", "block.1")


def candidate(
    device: int, host: int, bound: float, step: float, calls: list[Candidate] | None = None
) -> Candidate:
    def simulate() -> float:
        if calls is not None:
            calls.append(made)
        return step

    made = Candidate(Residency(BLOCKS, BLOCKS, 0), device, host, bound, simulate)
    return made


# Steps are far enough apart that none are equal within the tolerance, or equal.
steps = st.integers(1, 12).map(lambda power: 1.01**power)
some = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 9), st.floats(0.5, 1.0), steps).map(
        lambda values: candidate(values[0], values[1], values[2] * values[3], values[3])
    ),
    min_size=1,
    max_size=30,
)


@given(some)
def test_the_fastest_is_that_of_brute_force(candidates: list[Candidate]) -> None:
    found = fastest(candidates)
    assert found is not None
    best = min(one.simulate() for one in candidates)
    equal = [one for one in candidates if one.simulate() <= best * (1 + EQUAL)]
    assert found in equal
    assert (found.device, found.host) == min((one.device, one.host) for one in equal)


@given(some, steps)
def test_the_smallest_is_that_of_brute_force(candidates: list[Candidate], limit: float) -> None:
    found = smallest(candidates, limit)
    good = [one.device for one in candidates if one.simulate() <= limit * (1 + 1e-9)]
    assert (found.device if found else None) == min(good, default=None)


@given(some)
def test_the_frontier_is_that_of_brute_force(candidates: list[Candidate]) -> None:
    found = frontier(candidates)
    for one in candidates:
        assert any(
            other.device <= one.device and other.step <= one.simulate() * (1 + 2 * TOLERANCE)
            for other in found
        )
    sizes, times = [one.device for one in found], [one.step for one in found]
    assert sizes == sorted(set(sizes))
    assert times == sorted(set(times), reverse=True)


def test_what_the_bound_rules_out_is_not_simulated() -> None:
    calls: list[Candidate] = []
    # The bound is exact, as it is where copies hide: one simulation settles each question.
    candidates = [candidate(1 + n, 100 - n, 2.0, 2.0, calls) for n in range(100)]
    found = fastest(candidates)
    assert found is not None and found.device == 1
    assert len(calls) <= 2
    calls.clear()
    assert [one.device for one in frontier(candidates)] == [1]
    assert len(calls) <= 1


def test_what_streams_nothing_is_preferred_among_equals() -> None:
    streamed = Candidate(Residency(BLOCKS, (), 1), 1, 1, 2.0, lambda: 2.0)
    whole = candidate(5, 0, 2.0, 2.0)
    assert fastest([streamed, whole]) is whole
    assert fastest([streamed, candidate(5, 0, 2.1, 2.1)]) is streamed


def test_nothing_is_found_in_nothing() -> None:
    assert fastest([]) is None
    assert smallest([], 1.0) is None
    assert frontier([]) == []
