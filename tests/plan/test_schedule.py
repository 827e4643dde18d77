"""The streamer's schedule: what is enqueued, in which order."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from h3compile.errors import BuildError
from h3compile.plan.residency import Mode, Residency, prefix, spaced
from h3compile.plan.schedule import Compute, Copy, Gather, Operation, Schedule

BLOCKS = tuple(f"block.{index}" for index in range(6))
STEP = ("embed", *BLOCKS, "head")
REQUEST = ("rotary", "refiner.0", "refiner.1")
REFINERS = ("refiner.0", "refiner.1")


def text(operations: Iterable[Operation]) -> list[str]:
    return [str(operation) for operation in operations]


def copies(operations: Iterable[Operation]) -> list[str]:
    return [operation.call for operation in operations if isinstance(operation, Copy)]


def computed(operations: Iterable[Operation]) -> list[str]:
    return [operation.call for operation in operations if isinstance(operation, Compute)]


def small(resident: tuple[str, ...], slots: int, mode: Mode = "local", pieces: int = 1) -> Schedule:
    step = ("embed", "block.0", "block.1", "block.2")
    return Schedule(step, (), Residency(step[1:], resident, slots, mode, pieces))


def test_the_first_step_as_enqueued() -> None:
    schedule = small(("block.1",), 2)
    assert text(schedule.step()) == [
        "compute embed",
        "copy block.0 into slot 0",
        "record copied/0 on copy",
        "copy block.1 into its own place",
        "record copied/block.1 on copy",
        "copy block.2 into slot 1",
        "record copied/1 on copy",
        "wait for copied/0 on compute",
        "compute block.0 from slot 0",
        "record free/0 on compute",
        "wait for free/0 on copy",
        "copy block.0 into slot 0",
        "record copied/0 on copy",
        "wait for copied/block.1 on compute",
        "compute block.1",
        "wait for copied/1 on compute",
        "compute block.2 from slot 1",
        "record free/1 on compute",
        "wait for free/1 on copy",
        "copy block.2 into slot 1",
        "record copied/1 on copy",
    ]
    assert text(schedule.step())[:5] == [
        "compute embed",
        "wait for copied/0 on compute",
        "compute block.0 from slot 0",
        "record free/0 on compute",
        "wait for free/0 on copy",
    ]


def test_one_slot_copies_and_computes_in_turn() -> None:
    assert text(small((), 1).step())[:11] == [
        "compute embed",
        "copy block.0 into slot 0",
        "record copied/0 on copy",
        "wait for copied/0 on compute",
        "compute block.0 from slot 0",
        "record free/0 on compute",
        "wait for free/0 on copy",
        "copy block.1 into slot 0",
        "record copied/0 on copy",
        "wait for copied/0 on compute",
        "compute block.1 from slot 0",
    ]


def test_shards_pass_through_two_areas_and_only_the_gather_waits_for_the_slot() -> None:
    operations = text(small((), 1, "allgather", 3).step())
    assert operations[operations.index("record free/0 on compute") + 1 :][:17] == [
        "wait for taken/1 on copy",
        "copy piece 0 of block.1 into area 1 for slot 0",
        "record staged/1 on copy",
        "wait for free/0 on collective",
        "wait for staged/1 on collective",
        "gather piece 0 of block.1 from area 1 into slot 0",
        "record taken/1 on collective",
        "wait for taken/0 on copy",
        "copy piece 1 of block.1 into area 0 for slot 0",
        "record staged/0 on copy",
        "wait for staged/0 on collective",
        "gather piece 1 of block.1 from area 0 into slot 0",
        "record taken/0 on collective",
        "wait for taken/1 on copy",
        "copy piece 2 of block.1 into area 1 for slot 0",
        "record staged/1 on copy",
        "wait for staged/1 on collective",
    ]


def test_all_resident_is_arithmetic_only() -> None:
    schedule = Schedule(STEP, REQUEST, Residency(BLOCKS, BLOCKS, 0), loaded=True)
    assert list(schedule.request()) == [Compute(call) for call in REQUEST]
    assert list(schedule.step()) == [Compute(call) for call in STEP]


@pytest.mark.parametrize("mode", ["local", "allgather"])
def test_residents_come_behind_the_first_step_and_never_again(mode: Mode) -> None:
    schedule = Schedule(STEP, REQUEST, Residency(BLOCKS, BLOCKS, 0, mode))
    assert sorted(copies(schedule.request())) == ["block.0", "block.1"]  # no more than two ahead
    first = list(schedule.step())
    assert copies(first) == list(BLOCKS[2:])
    assert list(schedule.step()) == [Compute(call) for call in STEP]
    assert list(schedule.request()) == [Compute(call) for call in REQUEST]


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("count", range(6))
def test_copies_are_in_the_order_of_need_and_bounded(slots: int, count: int) -> None:
    residency = Residency(BLOCKS, spaced(BLOCKS, count), slots)
    schedule = Schedule(STEP, (), residency)
    copied: list[str] = []
    needed: list[str] = []
    for _ in range(4):
        for operation in schedule.step():
            if isinstance(operation, Copy):
                copied.append(operation.call)
            elif isinstance(operation, Compute) and operation.call in BLOCKS:
                resident = operation.call in residency.resident
                assert (operation.slot is None) == resident
                if not resident or operation.call not in needed:
                    needed.append(operation.call)
            else:
                continue
            ahead = copied[len(needed) :]
            assert sum(call not in residency.resident for call in ahead) <= slots
            assert sum(call in residency.resident for call in ahead) <= max(slots, 2)
    assert copied[: len(needed)] == needed
    # The first blocks of the next step are on their way.
    assert len(copied) - len(needed) == slots


def test_arithmetic_is_enqueued_before_the_copies_that_look_past_it() -> None:
    schedule = Schedule(STEP, (), Residency(BLOCKS, (), 3), loaded=True)
    list(schedule.step())
    copied = 3
    for operation in schedule.step():
        if isinstance(operation, Compute) and operation.slot is not None:
            assert copied == 3
            copied -= 1
        copied += isinstance(operation, Copy)


def test_residents_are_at_most_as_far_ahead_as_slots() -> None:
    residency = Residency(BLOCKS, BLOCKS[1:], 1)
    operations = list(Schedule(STEP, (), residency).step())
    first = operations.index(Compute("block.0", 0))
    assert copies(operations[:first]) == ["block.0", "block.1"]
    for index, call in enumerate(BLOCKS[1:4], start=1):
        before = operations[: operations.index(Compute(call))]
        assert copies(before) == list(BLOCKS[: index + 2])


def test_a_slot_keeps_turning_over_the_end_of_a_step() -> None:
    schedule = Schedule(STEP, (), Residency(BLOCKS, ("block.0",), 2), loaded=True)
    slots = [
        o.slot for _ in range(4) for o in schedule.step() if isinstance(o, Compute) and o.slot is not None
    ]
    assert slots == [0, 1] * 10


def test_a_request_drops_what_was_ahead_and_takes_the_slots() -> None:
    schedule = Schedule(STEP, REQUEST, Residency(BLOCKS, (), 2), carried=REFINERS)
    list(schedule.step())
    request = list(schedule.request())
    assert request[0] == Compute("rotary")
    assert computed(request) == list(REQUEST)
    assert copies(request) == ["refiner.0", "refiner.1", "block.0", "block.1"]
    step = list(schedule.step())
    assert copies(step) == [*BLOCKS[2:], "block.0", "block.1"]
    assert {o.slot for o in request if isinstance(o, Compute) and o.call in REFINERS} == {0, 1}


def test_all_request_calls_are_carried_unless_said_otherwise() -> None:
    schedule = Schedule(STEP, REQUEST, Residency(BLOCKS, (), 3))
    assert copies(schedule.request()) == [*REQUEST, "block.0", "block.1", "block.2"]


def test_after_a_reset_slots_are_filled_anew_and_residents_stay() -> None:
    schedule = Schedule(STEP, (), Residency(BLOCKS, prefix(BLOCKS, 2), 2))
    walk = schedule.step()
    for operation in walk:
        if operation == Compute("block.3", 1):
            break
    walk.close()
    schedule.reset()
    again = list(schedule.step())
    assert copies(again)[:2] == ["block.2", "block.3"]
    assert not set(copies(again)) & set(BLOCKS[:2])
    assert text(again)[:5] == [
        "record stopped/compute on compute",
        "wait for stopped/compute on copy",
        "compute embed",
        "copy block.2 into slot 1",
        "record copied/1 on copy",
    ]
    assert text(schedule.step()).count("record stopped/compute on compute") == 0


def test_an_operation_that_was_not_executed_is_not_taken_for_done() -> None:
    schedule = Schedule(STEP, (), Residency(BLOCKS, BLOCKS, 0))
    walk = schedule.step()
    assert next(walk) == Compute("embed")
    assert next(walk) == Copy("block.0", None)  # and it fails
    walk.close()
    schedule.reset()
    assert copies(schedule.step()) == list(BLOCKS)


def test_a_walk_that_did_not_end_is_not_walked_over() -> None:
    schedule = Schedule(STEP, (), Residency(BLOCKS, (), 2))
    next(schedule.step())
    with pytest.raises(RuntimeError, match="call reset"):
        next(schedule.step())


def test_a_residency_of_another_program_is_refused() -> None:
    with pytest.raises(BuildError, match="of another program"):
        Schedule(STEP, (), Residency(BLOCKS[::-1], (), 2))
    with pytest.raises(BuildError, match="belongs to the request and to the step"):
        Schedule(STEP, ("head",), Residency(BLOCKS, (), 2))


def test_a_program_without_blocks() -> None:
    schedule = Schedule(("embed",), REQUEST, Residency((), (), 0))
    assert list(schedule.request()) == [Compute(call) for call in REQUEST]
    assert list(schedule.step()) == [Compute("embed")]


def test_shards_of_residents_are_gathered_too() -> None:
    schedule = Schedule(STEP, (), Residency(BLOCKS, BLOCKS, 0, "allgather", 2))
    gathers = [operation for operation in schedule.step() if isinstance(operation, Gather)]
    assert [gather.call for gather in gathers] == [name for name in BLOCKS for _ in range(2)]
    assert {gather.slot for gather in gathers} == {None}
