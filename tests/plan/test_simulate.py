"""The event simulation: against closed forms, against the longest path, and what it says of residents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h3compile.plan.residency import Mode, Residency, prefix, spaced
from h3compile.plan.schedule import Compute, Copy, Gather, Operation, Record, Schedule, Wait
from h3compile.plan.simulate import Seconds, simulate, steady_step_seconds


def blocks_of(count: int) -> tuple[str, ...]:
    return tuple(f"block.{index}" for index in range(count))


def durations(compute: float, copy: float, gather: float = 0.0, other: float = 0.0) -> Seconds:
    """Of a block's call, copy and gather, and of any other call."""

    def seconds(operation: Compute | Copy | Gather) -> float:
        if isinstance(operation, Compute):
            return compute if operation.call.startswith("block") else other
        return copy if isinstance(operation, Copy) else gather

    return seconds


def step_seconds(residency: Residency, seconds: Seconds) -> float:
    return steady_step_seconds(("embed", *residency.blocks, "head"), residency, seconds)


def several(residency: Residency, steps: int = 3, loaded: bool = False) -> list[Operation]:
    schedule = Schedule(("embed", *residency.blocks, "head"), (), residency, loaded=loaded)
    return [operation for _ in range(steps) for operation in schedule.step()]


def test_a_timeline_by_hand() -> None:
    residency = Residency(("block.0", "block.1"), (), 1)
    timeline = simulate(several(residency, 1), durations(compute=2.0, copy=3.0, other=1.0))
    assert [(str(span.operation), span.start, span.end) for span in timeline.spans] == [
        ("compute embed", 0, 1),
        ("copy block.0 into slot 0", 0, 3),
        ("compute block.0 from slot 0", 3, 5),
        ("copy block.1 into slot 0", 5, 8),
        ("compute block.1 from slot 0", 8, 10),
        ("copy block.0 into slot 0", 10, 13),
        ("compute head", 10, 11),
    ]
    assert timeline.makespan == 13
    assert timeline.busy("compute") == 6 and timeline.idle("compute") == 7
    assert timeline.busy("copy") == 9 and timeline.idle("copy") == 4
    assert timeline.busy("collective") == 0 and timeline.on("collective") == ()
    assert [str(span.operation) for span in timeline.critical_path()] == [
        "copy block.0 into slot 0",
        "compute block.0 from slot 0",
        "copy block.1 into slot 0",
        "compute block.1 from slot 0",
        "copy block.0 into slot 0",
    ]


def test_nothing_takes_no_time() -> None:
    timeline = simulate([], durations(1, 1))
    assert timeline.makespan == 0 and timeline.critical_path() == ()


def test_an_event_is_the_latest_record_before_the_wait() -> None:
    operations: list[Operation] = [
        Record("copy", "e"),
        Copy("a", 0),
        Wait("compute", "e"),
        Compute("block.0"),
        Record("copy", "e"),
        Wait("compute", "never"),
        Wait("compute", "e"),
        Compute("block.1"),
    ]
    starts = {str(span.operation): span.start for span in simulate(operations, durations(1, 5)).spans}
    assert starts == {"copy a into slot 0": 0, "compute block.0": 0, "compute block.1": 5}


# --- properties --------------------------------------------------------------------------------------------

STREAMS = st.sampled_from(["compute", "copy", "collective"])
EVENTS = st.sampled_from(["a", "b", "c"])
ANY = (
    st.builds(Record, STREAMS, EVENTS)
    | st.builds(Wait, STREAMS, EVENTS)
    | st.builds(Compute, st.sampled_from(["block.0", "other"]))
    | st.builds(Copy, st.just("x"), st.just(0))
    | st.builds(Gather, st.just("x"), st.just(0), st.just(0), st.just(0))
)
SIZES = st.integers(0, 5)


def longest_path(operations: Sequence[Operation], seconds: Seconds) -> float:
    """Of the graph whose arrows are the order of streams, and records before waits."""
    graph = nx.DiGraph()
    last: dict[str, int] = {}
    recorded: dict[str, int] = {}
    for index, operation in enumerate(operations):
        cost = 0.0 if isinstance(operation, Record | Wait) else seconds(operation)
        graph.add_edge("begin", index, weight=cost)
        if operation.stream in last:
            graph.add_edge(last[operation.stream], index, weight=cost)
        if isinstance(operation, Wait) and operation.event in recorded:
            graph.add_edge(recorded[operation.event], index, weight=cost)
        if isinstance(operation, Record):
            recorded[operation.event] = index
        last[operation.stream] = index
    return float(nx.dag_longest_path_length(graph))


@given(st.lists(ANY, max_size=40), SIZES, SIZES, SIZES, SIZES)
def test_the_makespan_is_the_longest_path(
    operations: list[Operation], compute: int, copy: int, gather: int, other: int
) -> None:
    seconds = durations(compute, copy, gather, other)
    timeline = simulate(operations, seconds)
    assert timeline.makespan == longest_path(operations, seconds)
    assert timeline.makespan >= max(timeline.busy(s) for s in ("compute", "copy", "collective"))
    path = timeline.critical_path()
    assert sum(span.seconds for span in path) == timeline.makespan
    assert all(first.end == second.start for first, second in pairwise(path))
    assert not path or path[0].start == 0


@given(st.lists(ANY, max_size=40), SIZES, SIZES)
def test_slower_copies_never_make_it_quicker(operations: list[Operation], copy: int, more: int) -> None:
    quick, slow = (simulate(operations, durations(2, time, 1)).makespan for time in (copy, copy + more))
    assert quick <= slow


@st.composite
def residencies(draw: st.DrawFn) -> Residency:
    total = draw(st.integers(1, 9))
    kept = draw(st.sets(st.integers(0, total - 1)))
    blocks = blocks_of(total)
    mode: Mode = draw(st.sampled_from(["local", "allgather"]))
    return Residency(
        blocks,
        tuple(blocks[index] for index in sorted(kept)),
        draw(st.integers(1, 4)) if len(kept) < total else 0,
        mode,
        draw(st.integers(1, 3)) if mode == "allgather" else 1,
    )


@given(residencies(), st.integers(1, 3), st.integers(1, 5))
def test_copies_that_take_nothing_leave_the_arithmetic(
    residency: Residency, steps: int, compute: int
) -> None:
    timeline = simulate(several(residency, steps), durations(compute, 0, 0, other=1))
    assert timeline.makespan == timeline.busy("compute") == steps * (len(residency.blocks) * compute + 2)


@settings(deadline=None)
@given(residencies(), st.integers(1, 5), st.integers(1, 9), st.integers(0, 3))
def test_a_step_in_the_long_run_is_the_mean_of_many(
    residency: Residency, compute: int, copy: int, gather: int
) -> None:
    shape = durations(compute, copy, gather, other=1)
    uneven = {name: 1 + 0.37 * (index * index % 5) for index, name in enumerate(residency.blocks)}

    def seconds(operation: Compute | Copy | Gather) -> float:
        return shape(operation) * uneven.get(operation.call, 1.0)

    count = 48
    calls = len(residency.blocks) + 2
    timeline = simulate(several(residency, count, loaded=True), seconds)
    ends = [span.end for span in timeline.on("compute")][calls - 1 :: calls]
    mean = (ends[-1] - ends[count // 2 - 1]) / (count - count // 2)
    # 24 steps are a whole number of rounds of 1 to 4 slots.
    assert step_seconds(residency, seconds) == pytest.approx(mean, rel=1e-6)


# --- closed forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("copy", [0.1, 0.5, 0.99, 1.0])
def test_copies_shorter_than_the_arithmetic_cost_nothing(slots: int, copy: float) -> None:
    residency = Residency(blocks_of(50), (), slots)
    assert step_seconds(residency, durations(1.0, copy, other=0.25)) == pytest.approx(50.5)


@pytest.mark.parametrize("copy", [1.1, 1.5, 3.0])
def test_copies_longer_than_the_arithmetic_are_the_step(copy: float) -> None:
    residency = Residency(blocks_of(50), (), 2)
    assert step_seconds(residency, durations(1.0, copy)) == pytest.approx(50 * copy)
    # What lies between two steps is hidden as far as the slots reach.
    edge = durations(1.0, copy, other=0.5)
    assert 50 * copy <= step_seconds(residency, edge) <= 50 * copy + 1.0
    assert step_seconds(Residency(blocks_of(50), (), 3), durations(1.0, 3.0, other=0.5)) == pytest.approx(150)


@pytest.mark.parametrize("copy", [0.3, 1.0, 4.0])
def test_one_slot_copies_and_computes_by_turns(copy: float) -> None:
    assert step_seconds(Residency(blocks_of(10), (), 1), durations(1.0, copy)) == pytest.approx(
        10 * (1 + copy)
    )
    # A resident between two streamed blocks is computed while the next one comes.
    half = Residency(blocks_of(10), spaced(blocks_of(10), 5), 1)
    assert step_seconds(half, durations(1.0, copy)) == pytest.approx(5 * (1 + max(1, copy)))


def test_pieces_let_the_gather_of_one_hide_behind_the_copy_of_the_next() -> None:
    def first_block(pieces: int) -> float:
        residency = Residency(blocks_of(1), (), 1, "allgather", pieces)
        timeline = simulate(several(residency, 1), durations(1.0, 4.0 / pieces, 2.0 / pieces))
        return next(span.start for span in timeline.on("compute") if span.operation.call == "block.0")

    assert [first_block(pieces) for pieces in (1, 2, 4)] == [6.0, 5.0, 4.5]


@pytest.mark.parametrize(("copy", "gather", "step"), [(0.5, 0.25, 50), (1.5, 0.5, 75), (0.5, 1.5, 75)])
def test_the_slowest_of_three_streams_is_the_step(copy: float, gather: float, step: float) -> None:
    residency = Residency(blocks_of(50), (), 3, "allgather", 1)
    assert step_seconds(residency, durations(1.0, copy, gather)) == pytest.approx(step)


def test_residents_load_behind_the_first_step_not_before_it() -> None:
    residency = Residency(blocks_of(50), blocks_of(50), 0)
    seconds = durations(1.0, 0.75)
    schedule = Schedule(residency.blocks, (), residency)
    first = simulate(schedule.step(), seconds).makespan
    assert first == pytest.approx(50 + 0.75)
    assert first + 50 == pytest.approx(simulate([*several(residency, 2)], seconds).makespan)


# --- which residents ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("total", [2, 3, 5, 8, 12, 17, 50])
def test_spaced_residents_are_never_worse_than_the_first_ones(total: int, slots: int) -> None:
    blocks = blocks_of(total)
    better = 0
    for count in range(total) if total < 50 else (5, 12, 25, 40, 45):
        for copy in (0.5, 1.0, 1.2, 2.0, total / (total - count)):
            seconds = durations(1.0, copy)
            even, first = (
                step_seconds(Residency(blocks, choose(blocks, count), slots), seconds)
                for choose in (spaced, prefix)
            )
            assert even <= first * (1 + 1e-9), (count, copy)
            better += even < first * (1 - 1e-9)
    assert better or total < 50


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("total", range(2, 8))
def test_no_choice_of_residents_is_better_than_spaced(total: int, slots: int) -> None:
    blocks = blocks_of(total)
    for count in range(1, total):
        for copy in (0.7, 1.5, total / (total - count)):
            seconds = durations(1.0, copy)
            best = min(
                step_seconds(Residency(blocks, kept, slots), seconds) for kept in combinations(blocks, count)
            )
            even = step_seconds(Residency(blocks, spaced(blocks, count), slots), seconds)
            assert even == pytest.approx(best), (count, copy)


@pytest.mark.parametrize("count", [0, 12, 25, 40])
@pytest.mark.parametrize("copy", [0.8, 1.2, 2.0])
def test_with_three_slots_spaced_residents_reach_the_bound(count: int, copy: float) -> None:
    residency = Residency(blocks_of(50), spaced(blocks_of(50), count), 3)
    bound = max(50.0, (50 - count) * copy)
    assert step_seconds(residency, durations(1.0, copy)) == pytest.approx(bound)
