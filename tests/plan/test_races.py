"""The race checker: every plan is clean, and every planted bug is caught."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import pytest

from h3compile.plan.races import Race, check
from h3compile.plan.residency import Residency, piece_bytes, prefix, spaced
from h3compile.plan.schedule import Compute, Copy, Gather, Operation, Record, Schedule, Wait

REFINERS = ("refiner.0", "refiner.1")
REQUEST = ("rotary", *REFINERS)
MODES = [("local", 1), *(("allgather", pieces) for pieces in range(1, 5))]


def blocks_of(count: int) -> tuple[str, ...]:
    return tuple(f"block.{index}" for index in range(count))


def schedule_of(residency: Residency, loaded: bool = False) -> Schedule:
    step = ("embed", *residency.blocks, "head")
    return Schedule(step, REQUEST, residency, carried=REFINERS, loaded=loaded)


def sizes_of(residency: Residency) -> dict[str, int]:
    return {name: 100 + index for index, name in enumerate((*residency.blocks, *REFINERS))}


def limit_of(residency: Residency, ranks: int = 1) -> int:
    """The device memory of the plan, all slots and areas as large as the largest call."""
    sizes = sizes_of(residency)
    largest = max(sizes.values()) if residency.slots else max(sizes[name] for name in residency.blocks)
    areas = residency.areas * piece_bytes(largest, ranks, residency.pieces)
    return sum(sizes[name] for name in residency.resident) + residency.slots * largest + areas


def races(operations: Iterable[Operation], residency: Residency, *, loaded: bool = False) -> list[Race]:
    return check(
        operations, residency, sizes_of(residency), limit_of(residency, ranks=2), ranks=2, loaded=loaded
    )


def life(residency: Residency, loaded: bool = False, steps: int = 3) -> list[Operation]:
    """Two requests of some steps."""
    schedule = schedule_of(residency, loaded)
    found: list[Operation] = []
    for _ in range(2):
        found += schedule.request()
        for _ in range(steps):
            found += schedule.step()
    return found


def plans(total: int, counts: Iterable[int], slots: Sequence[int] = (1, 2, 3, 4)) -> Iterator[Residency]:
    blocks = blocks_of(total)
    for count in counts:
        for kept in {spaced(blocks, count), prefix(blocks, count)}:
            for mode, pieces in MODES:
                for places in slots if count < total else (0,):
                    yield Residency(blocks, kept, places, mode, pieces)  # type: ignore[arg-type]


# Few plans with everything in them for what is quadratic in the operations, and many for the slow tests.
FEW = [plan for plan in plans(3, (0, 1, 3), slots=(1, 2)) if plan.pieces in (1, 3)]
MANY = [*plans(4, range(5), slots=(1, 2, 3)), *plans(5, (2,), slots=(2, 4))]
SAMPLES = pytest.mark.parametrize(
    "sample",
    [
        pytest.param(FEW, id="few"),
        pytest.param(MANY, id="many", marks=[pytest.mark.slow, pytest.mark.matrix]),
    ],
)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("count", range(13))
def test_every_plan_of_twelve_blocks_is_clean(count: int, loaded: bool) -> None:
    for residency in plans(12, [count]):
        assert races(life(residency, loaded, steps=2), residency, loaded=loaded) == [], residency


@pytest.mark.parametrize("count", [0, 1, 12, 25, 40, 49, 50])
def test_plans_of_fifty_blocks_are_clean(count: int) -> None:
    for residency in plans(50, [count], slots=(1, 2, 3)):
        schedule = schedule_of(residency)
        operations = [*schedule.request(), *schedule.step(), *schedule.step()]
        assert races(operations, residency) == [], residency


@pytest.mark.parametrize("executed", [True, False])
@pytest.mark.parametrize("residency", FEW, ids=str)
def test_interrupted_anywhere_it_goes_on_clean(residency: Residency, executed: bool) -> None:
    def interrupted(after: int) -> list[Operation] | None:
        schedule = schedule_of(residency)
        found: list[Operation] = []

        def walk(operations: Iterator[Operation]) -> bool:
            """Execute until the operation at which it stops, that one included or not."""
            for operation in operations:
                if len(found) == after:
                    found.extend([operation] if executed else [])
                    return False
                found.append(operation)
            return True

        for begin in (schedule.request, schedule.step, schedule.step):
            if not walk(begin()):
                break
        else:
            return None
        schedule.reset()
        # The first walk after it is interrupted too, at once.
        next(schedule.step())
        schedule.reset()
        first = list(schedule.request() if after % 2 else schedule.step())
        return [*found, *first, *schedule.step(), *schedule.step()]

    after = 0
    while (operations := interrupted(after)) is not None:
        assert races(operations, residency) == [], after
        after += 1
    assert after > 20


def test_without_the_waits_after_an_interruption_there_is_a_race() -> None:
    for residency, gone in (
        (Residency(blocks_of(3), (), 1), "stopped/compute"),
        (Residency(blocks_of(3), (), 1, "allgather", 2), "stopped/compute"),
        (Residency(blocks_of(3), (), 1, "allgather", 2), "stopped/collective"),
    ):
        schedule = schedule_of(residency)
        found: list[Operation] = []
        last = Compute("block.0", 0) if gone == "stopped/compute" else Gather("block.1", 0, 0, 0)
        for operation in schedule.step():
            found.append(operation)
            if operation == last:
                break
        schedule.reset()
        found += schedule.step()
        assert races(found, residency) == []
        assert races([o for o in found if getattr(o, "event", "") != gone], residency), (residency, gone)


# --- planted bugs ---------------------------------------------------------------------------------------


def unread(operations: Sequence[Operation], index: int) -> bool:
    """Whether nobody waits for the record at ``index``."""
    record = operations[index]
    assert isinstance(record, Record)
    for later in operations[index + 1 :]:
        if isinstance(later, Wait) and later.event == record.event:
            return False
        if isinstance(later, Record) and later.event == record.event:
            return True
    return True


@SAMPLES
@pytest.mark.parametrize("kind", [Wait, Record])
def test_no_wait_and_no_record_can_be_left_out(kind: type[Operation], sample: list[Residency]) -> None:
    missing = 0
    for residency in sample:
        operations = life(residency, steps=2)
        for index, operation in enumerate(operations):
            if not isinstance(operation, kind):
                continue
            found = races(operations[:index] + operations[index + 1 :], residency)
            if isinstance(operation, Record) and unread(operations, index):
                # What was on its way at the end, or when a request dropped it.
                last = operation not in operations[index + 1 :]
                assert last or re.match(r"copied/\d", operation.event), (residency, index, str(operation))
                continue
            assert found, (residency, index, str(operation))
            missing += 1
    assert missing > 60 * len(sample)


@SAMPLES
def test_neighbours_on_a_stream_cannot_be_exchanged(sample: list[Residency]) -> None:
    """Each operation before the wait that guards it, each record before what it records."""
    exchanged = 0
    for residency in sample:
        operations = life(residency, steps=2)
        for index, (first, second) in enumerate(pairwise(operations)):
            guards = isinstance(first, Wait) and isinstance(second, Compute | Copy | Gather)
            records = isinstance(second, Record) and not unread(operations, index + 1)
            if first.stream != second.stream or not (guards or records) or isinstance(first, Record):
                continue
            found = races([*operations[:index], second, first, *operations[index + 2 :]], residency)
            assert found, (residency, index, str(first), str(second))
            exchanged += 1
    assert exchanged > 60 * len(sample)


Plant = Callable[[list[Operation]], list[Operation]]


def replaced(old: Operation, *new: Operation, time: int = 0) -> Plant:
    """The ``time``-th ``old`` becomes ``new``."""

    def plant(operations: list[Operation]) -> list[Operation]:
        index = [i for i, operation in enumerate(operations) if operation == old][time]
        return [*operations[:index], *new, *operations[index + 1 :]]

    return plant


def earlier(moved: Operation, before: Operation, time: int = 0) -> Plant:
    """The ``time``-th ``moved`` is enqueued before the last ``before`` that precedes it."""

    def plant(operations: list[Operation]) -> list[Operation]:
        index = [i for i, operation in enumerate(operations) if operation == moved][time]
        target = max(i for i, operation in enumerate(operations[:index]) if operation == before)
        return [*operations[:target], moved, *operations[target:index], *operations[index + 1 :]]

    return plant


LOCAL = Residency(blocks_of(4), ("block.0", "block.2"), 2)
PAIR = Residency(blocks_of(3), (), 2)
ALONE = Residency(blocks_of(3), (), 1)
GATHER = Residency(blocks_of(3), ("block.0",), 2, "allgather", 2)


@pytest.mark.parametrize(
    ("residency", "plant", "kind", "message"),
    [
        pytest.param(
            LOCAL,
            replaced(Copy("block.1", 0), Copy("block.1", 1)),
            "content",
            "compute block.1 from slot 0: there lies refiner.0",
            id="copied into the other slot",
        ),
        pytest.param(
            LOCAL,
            replaced(Compute("block.1", 0), Compute("block.1", 1), time=1),
            "content",
            "compute block.1 from slot 1: there lies block.3",
            id="computed from the other slot",
        ),
        pytest.param(
            LOCAL,
            replaced(Compute("block.1", 0), Compute("block.1")),
            "place",
            "its weights lie in a slot",
            id="a streamed block computed from its own place",
        ),
        pytest.param(
            LOCAL,
            replaced(Compute("refiner.0", 0), Compute("refiner.0")),
            "place",
            "its weights lie in a slot",
            id="a request call computed from its own place",
        ),
        pytest.param(
            LOCAL,
            replaced(Copy("block.3", 1), Copy("block.3", 1), Copy("block.0", None), time=2),
            "again",
            "copy block.0 into its own place, and the block arrived before",
            id="a resident copied again",
        ),
        pytest.param(
            LOCAL,
            replaced(Copy("block.3", 1), Copy("block.2", 1)),
            "place",
            "copy block.2 into slot 1: the block is resident",
            id="a resident copied into a slot",
        ),
        pytest.param(
            LOCAL,
            replaced(Copy("block.2", None)),
            "content",
            "compute block.2: nothing was put there before",
            id="a resident never copied",
        ),
        pytest.param(
            LOCAL,
            replaced(Copy("block.3", 1), Copy("block.3", None)),
            "place",
            "copy block.3 into its own place: its weights lie in a slot",
            id="a streamed block copied into a place of its own",
        ),
        pytest.param(
            LOCAL,
            replaced(Copy("refiner.0", 0), Copy("refiner.0", 2)),
            "place",
            "there are 2 slots",
            id="one slot too many",
        ),
        pytest.param(
            PAIR,
            earlier(Copy("block.2", 0), Compute("block.0", 0)),
            "content",
            "compute block.0 from slot 0: there lies block.2",
            id="a slot refilled before its block is computed",
        ),
        pytest.param(
            PAIR,
            earlier(Copy("block.2", 0), Wait("copy", "free/0")),
            "overwritten",
            "copy block.2 into slot 0 may begin before the end of compute block.0 from slot 0",
            id="a slot refilled without waiting",
        ),
        pytest.param(
            ALONE,
            earlier(Copy("block.1", 0), Wait("copy", "free/0")),
            "overwritten",
            "copy block.1 into slot 0 may begin before the end of compute block.0 from slot 0",
            id="one slot: copied without waiting",
        ),
        pytest.param(
            ALONE,
            replaced(Wait("compute", "copied/0"), Wait("compute", "copied/1")),
            "event",
            "wait for copied/1 on compute, which nobody recorded before",
            id="an event that nobody records",
        ),
        pytest.param(
            LOCAL,
            replaced(Wait("compute", "copied/block.2"), Wait("compute", "copied/block.0")),
            "unfinished",
            "compute block.2 may begin before the end of copy block.2 into its own place",
            id="waits for another event",
        ),
        pytest.param(
            GATHER,
            replaced(Gather("block.1", 0, 1, 1)),
            "content",
            "compute block.1 from slot 0: there lies refiner.0, piece 1",
            id="a piece never gathered",
        ),
        pytest.param(
            GATHER,
            replaced(Copy("block.1", 0, 1, 1), Copy("block.1", 0, 1, 0)),
            "content",
            "gather piece 1 of block.1 from area 1 into slot 0: there lies",
            id="a shard copied into the other area",
        ),
        pytest.param(
            GATHER,
            replaced(Copy("block.1", 0, 0, 0), Copy("block.1", 0)),
            "place",
            "a shard goes through an area",
            id="a shard copied into a slot",
        ),
        pytest.param(
            GATHER,
            replaced(Copy("block.1", 0, 1, 1), Copy("block.1", 0, 2, 1)),
            "place",
            "a block has 2 pieces",
            id="one piece too many",
        ),
        pytest.param(
            GATHER,
            replaced(Copy("block.1", 0, 1, 1), Copy("block.1", 0, 1, 2)),
            "place",
            "there are 2 areas",
            id="one area too many",
        ),
        pytest.param(
            LOCAL,
            replaced(Compute("rotary"), Copy("rotary", None), Compute("rotary")),
            "place",
            "it is no resident block",
            id="a call with weights of its own copied",
        ),
    ],
)
def test_a_planted_bug_is_caught(residency: Residency, plant: Plant, kind: str, message: str) -> None:
    operations = life(residency)
    assert races(operations, residency) == []
    found = races(plant(operations), residency)
    assert [race for race in found if race.kind == kind and re.search(message, race.message)], found


@pytest.mark.parametrize("residency", [LOCAL, ALONE, GATHER])
def test_memory_above_the_limit_names_the_operation(residency: Residency) -> None:
    sizes, operations = sizes_of(residency), life(residency)
    limit = limit_of(residency, ranks=2)
    assert check(operations, residency, sizes, limit, ranks=2) == []
    (race,) = check(operations, residency, sizes, limit - 1, ranks=2)
    assert race.kind == "memory" and isinstance(operations[race.operation], Copy | Gather)
    assert str(race).endswith(f"makes it {limit} bytes, the limit is {limit - 1}")


def test_residents_that_are_there_count_from_the_beginning() -> None:
    sizes = sizes_of(LOCAL)
    found = check([], LOCAL, sizes, 100, loaded=True)
    assert [str(race) for race in found] == [
        "memory before the first operation: residents take 202 bytes, the limit is 100"
    ]
