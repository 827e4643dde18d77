"""The race checker against another judge: a device on which one operation is as slow as it can be."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from h3compile.plan.races import Race, check
from h3compile.plan.residency import Mode, Residency, spaced
from h3compile.plan.schedule import Compute, Copy, Gather, Operation, Record, Schedule, Stream, Wait

BLOCKS = ("block.0", "block.1", "block.2")
MODES: tuple[tuple[Mode, int], ...] = (("local", 1), ("allgather", 1), ("allgather", 3))
PLANS = [
    Residency(BLOCKS, spaced(BLOCKS, count), slots if count < 3 else 0, mode, pieces)
    for count in (0, 1, 3)
    for slots in (1, 2)
    for mode, pieces in MODES
]


def place_of(operation: Compute | Copy | Gather) -> tuple[object, ...]:
    return ("own", operation.call) if operation.slot is None else ("slot", operation.slot)


Memory = dict[object, object]


def effects(operation: Compute | Copy | Gather, residency: Residency) -> tuple[Memory, Memory]:
    """What an operation expects in which places, and what it puts into which."""
    call = operation.call
    place = place_of(operation)
    if isinstance(operation, Compute):
        weights = operation.slot is not None or call in residency.resident
        return {(*place, piece): (call, piece) for piece in range(residency.pieces if weights else 0)}, {}
    content = (call, operation.piece)
    if isinstance(operation, Gather):
        return {("area", operation.area): content}, {(*place, operation.piece): content}
    if operation.area is None:
        return {}, {(*place, 0): content}
    return {}, {("area", operation.area): content}


def goes_wrong(operations: Sequence[Operation], residency: Residency, slow: int) -> bool:
    """Execute with everything quick but operation ``slow``, which ends when nothing else can go on."""
    queues: dict[Stream, deque[int]] = {"compute": deque(), "copy": deque(), "collective": deque()}
    awaited: dict[int, int] = {}
    latest: dict[str, int] = {}
    for index, operation in enumerate(operations):
        queues[operation.stream].append(index)
        if isinstance(operation, Record):
            latest[operation.event] = index
        elif isinstance(operation, Wait) and operation.event in latest:
            awaited[index] = latest[operation.event]
    done: set[int] = set()
    memory: Memory = {}
    flying: int | None = None
    while any(queues.values()):
        stuck = True
        for queue in queues.values():
            while queue and queue[0] != flying and awaited.get(queue[0], -1) in done | {-1}:
                index, stuck = queue[0], False
                operation = operations[index]
                if isinstance(operation, Compute | Copy | Gather):
                    reads, writes = effects(operation, residency)
                    if any(memory.get(place) != content for place, content in reads.items()):
                        return True
                    if flying is not None:
                        other = operations[flying]
                        assert isinstance(other, Compute | Copy | Gather)
                        their_reads, their_writes = effects(other, residency)
                        if writes.keys() & (their_reads.keys() | their_writes.keys()):
                            return True
                        if reads.keys() & their_writes.keys():
                            return True
                    memory.update(writes)
                    if index == slow:
                        flying = index
                        break
                done.add(queue.popleft())
        if stuck:
            assert flying is not None
            next(queue for queue in queues.values() if queue and queue[0] == flying).popleft()
            done.add(flying)
            flying = None
    return False


def can_go_wrong(operations: Sequence[Operation], residency: Residency) -> bool:
    return any(
        goes_wrong(operations, residency, slow)
        for slow, operation in enumerate(operations)
        if isinstance(operation, Compute | Copy | Gather)
    )


CALLS = st.sampled_from(["block.0", "block.1"])
SLOTS = st.integers(0, 1)
STREAMS: st.SearchStrategy[Stream] = st.sampled_from(["compute", "copy", "collective"])
EVENTS = st.sampled_from(["a", "b", "c"])
EVENTFUL = st.builds(Record, STREAMS, EVENTS) | st.builds(Wait, STREAMS, EVENTS)
STREAMED = st.builds(Compute, CALLS, SLOTS)
LOCALLY = EVENTFUL | STREAMED | st.builds(Copy, CALLS, SLOTS)
SHARDED = (
    EVENTFUL
    | STREAMED
    | st.builds(Copy, CALLS, SLOTS, st.just(0), st.integers(0, 1))
    | st.builds(Gather, CALLS, SLOTS, st.just(0), st.integers(0, 1))
)


def data_races(operations: Sequence[Operation], residency: Residency) -> list[Race]:
    found = check(operations, residency, dict.fromkeys((*residency.blocks, "refiner"), 1))
    return [race for race in found if race.kind in ("unfinished", "overwritten", "content")]


@settings(max_examples=400, deadline=None)
@given(st.lists(LOCALLY, max_size=14))
def test_it_agrees_with_a_slow_device_on_copies(operations: list[Operation]) -> None:
    residency = Residency(("block.0", "block.1"), (), 2)
    assert bool(data_races(operations, residency)) == can_go_wrong(operations, residency)


@settings(max_examples=400, deadline=None)
@given(st.lists(SHARDED, max_size=16))
def test_it_agrees_with_a_slow_device_on_gathers(operations: list[Operation]) -> None:
    residency = Residency(("block.0", "block.1"), (), 2, "allgather")
    assert bool(data_races(operations, residency)) == can_go_wrong(operations, residency)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_it_agrees_with_a_slow_device_on_damaged_schedules(data: st.DataObject) -> None:
    residency = data.draw(st.sampled_from(PLANS))
    schedule = Schedule(
        ("embed", *residency.blocks, "head"), ("rotary", "refiner"), residency, carried={"refiner"}
    )
    operations = [*schedule.request(), *schedule.step()]
    assert not can_go_wrong(operations, residency)
    index = data.draw(st.integers(0, len(operations) - 2))
    damaged = operations[:index] + operations[index + 1 :]
    if data.draw(st.booleans()):
        damaged = [*operations[:index], operations[index + 1], operations[index], *operations[index + 2 :]]
    assert bool(data_races(damaged, residency)) == can_go_wrong(damaged, residency)
