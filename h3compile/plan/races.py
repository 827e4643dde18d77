"""Whether a sequence of stream operations is safe, decided without a device.

An operation happens before another when it comes earlier on its stream, or when a ``Record`` after it is
waited for before the other: what CUDA promises and nothing more. Vector clocks keep, for every stream, how
much of the others is known to have ended (the method of FastTrack, Flanagan and Freund 2009): one pass over
the operations, linear in their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from h3compile.plan.residency import Residency, piece_bytes
from h3compile.plan.schedule import Compute, Copy, Gather, Operation, Record, Wait

__all__ = ["Kind", "Race", "check"]

Kind = Literal["unfinished", "overwritten", "content", "again", "place", "event", "memory"]

_STREAMS = {"compute": 0, "copy": 1, "collective": 2}

# A device place that one write fills: ("slot", number, piece), ("own", call, piece), ("area", number, 0).
_Key = tuple[str, int | str, int]


@dataclass(frozen=True)
class Race:
    """One thing that may go wrong, and the operation, by its number, at which it does.

    ``unfinished``: weights are read before they are there. ``overwritten``: a place is written while it may
    be read. ``content``: what lies in the place is something else. ``again``: a resident that
    arrived is copied. ``place``: no such place, or the wrong one for this block. ``event``: a wait for
    what nobody recorded. ``memory``: more of the device than the limit; -1 when already at the beginning.
    """

    kind: Kind
    operation: int
    message: str

    def __str__(self) -> str:
        when = "before the first operation" if self.operation < 0 else f"at operation {self.operation}"
        return f"{self.kind} {when}: {self.message}"


@dataclass(frozen=True, slots=True)
class _Access:
    """One operation's reading or writing, dated by its stream and its place on it."""

    stream: int
    time: int
    number: int
    operation: Operation | None  # None: it was there from the beginning


@dataclass(slots=True)
class _Place:
    """What lies in a place, who put it there, and who read it since."""

    holds: tuple[str, int]
    written: _Access
    reads: dict[int, _Access] = field(default_factory=dict)  # the last one of each stream


def check(
    operations: Iterable[Operation],
    residency: Residency,
    sizes: Mapping[str, int],
    limit_bytes: int | None = None,
    *,
    ranks: int = 1,
    loaded: bool = False,
) -> list[Race]:
    """Everything that may go wrong in ``operations``, in their order; empty when they are safe.

    ``sizes`` are the bytes of the weights of every call that is copied and of every block, whole;
    ``limit_bytes``, where given, is what slots, residents and areas may take of the device together.
    ``ranks`` is over how many devices an AllGather's blocks are spread. ``loaded``: the residents are there
    from the beginning. Places are taken when first written and never given back; slots are all as large as
    the largest call that is copied into one.
    """
    return list(_Checker(tuple(operations), residency, sizes, limit_bytes, ranks, loaded).run())


class _Checker:
    def __init__(
        self,
        operations: tuple[Operation, ...],
        residency: Residency,
        sizes: Mapping[str, int],
        limit_bytes: int | None,
        ranks: int,
        loaded: bool,
    ) -> None:
        self._operations = operations
        self._residency = residency
        self._resident = frozenset(residency.resident)
        self._streamed = frozenset(residency.blocks) - self._resident
        # Calls, of the request too, whose weights this sequence puts into slots.
        self._slotted = {o.call for o in operations if isinstance(o, Copy | Gather) and o.slot is not None}
        self._sizes = sizes
        self._limit = limit_bytes
        self._slot_bytes = max((sizes[call] for call in self._slotted), default=0)
        largest = max((sizes[call] for call in self._slotted | self._resident), default=0)
        self._area_bytes = piece_bytes(largest, ranks, residency.pieces)
        self._clocks = [[0, 0, 0] for _ in _STREAMS]
        self._events: dict[str, tuple[int, ...]] = {}
        self._places: dict[_Key, _Place] = {}
        self._computed: set[str] = set(residency.resident if loaded else ())
        self._bytes = 0
        self._taken: set[tuple[str, int | str]] = set()
        if loaded:
            there = _Access(0, 0, -1, None)
            for call in residency.resident:
                self._take(("own", call))
                for piece in range(residency.pieces):
                    self._places["own", call, piece] = _Place((call, piece), there)

    def run(self) -> Iterator[Race]:
        if self._limit is not None and self._bytes > self._limit:
            yield Race("memory", -1, f"residents take {self._bytes:,} bytes, the limit is {self._limit:,}")
        for number, operation in enumerate(self._operations):
            stream = _STREAMS[operation.stream]
            clock = self._clocks[stream]
            if isinstance(operation, Record):
                self._events[operation.event] = tuple(clock)
                continue
            if isinstance(operation, Wait):
                seen = self._events.get(operation.event)
                if seen is None:
                    yield Race("event", number, f"{operation}, which nobody recorded before")
                else:
                    clock[:] = map(max, clock, seen)
                continue
            clock[stream] += 1
            access = _Access(stream, clock[stream], number, operation)
            misplaced = self._misplaced(operation)
            if misplaced:
                yield Race("place", number, f"{operation}: {misplaced}")
                continue
            if isinstance(operation, Compute):
                yield from self._compute(operation, access)
            elif isinstance(operation, Copy):
                yield from self._copy(operation, access)
            else:
                yield from self._gather(operation, access)

    def _misplaced(self, operation: Compute | Copy | Gather) -> str:
        """Why ``operation`` names a place that it cannot have; empty when it can."""
        call, slot = operation.call, operation.slot
        if slot is not None and not 0 <= slot < self._residency.slots:
            return f"there are {self._residency.slots} slots"
        if slot is not None and call in self._resident:
            return "the block is resident and has its own place"
        if slot is None and (call in self._streamed or call in self._slotted):
            return "its weights lie in a slot"
        if isinstance(operation, Compute):
            return ""
        if slot is None and call not in self._resident:
            return "it is no resident block"
        if not 0 <= operation.piece < self._residency.pieces:
            return f"a block has {self._residency.pieces} pieces"
        areas = self._residency.areas
        if operation.area is None:
            return "a shard goes through an area" if areas else ""
        return "" if 0 <= operation.area < areas else f"there are {areas} areas"

    def _compute(self, operation: Compute, access: _Access) -> Iterator[Race]:
        call, slot = operation.call, operation.slot
        if slot is None and call not in self._resident:
            return  # its weights were never copied
        for piece in range(self._residency.pieces):
            yield from self._read(_home(call, slot, piece), (call, piece), access)
        if slot is None:
            self._computed.add(call)

    def _copy(self, operation: Copy, access: _Access) -> Iterator[Race]:
        if operation.call in self._computed:
            yield Race("again", access.number, f"{operation}, and the block arrived before")
        if operation.area is not None:
            yield from self._write(("area", operation.area, 0), (operation.call, operation.piece), access)
        else:
            yield from self._arrive(operation, access)

    def _gather(self, operation: Gather, access: _Access) -> Iterator[Race]:
        yield from self._read(("area", operation.area, 0), (operation.call, operation.piece), access)
        yield from self._arrive(operation, access)

    def _arrive(self, operation: Copy | Gather, access: _Access) -> Iterator[Race]:
        home = _home(operation.call, operation.slot, operation.piece)
        yield from self._write(home, (operation.call, operation.piece), access)

    def _ended(self, access: _Access, before: _Access) -> bool:
        """Whether ``access`` has ended before ``before``, the newest operation of its stream, begins."""
        return self._clocks[before.stream][access.stream] >= access.time

    def _read(self, key: _Key, expected: tuple[str, int], access: _Access) -> Iterator[Race]:
        place = self._places.get(key)
        if place is None:
            yield Race("content", access.number, f"{access.operation}: nothing was put there before")
            return
        if place.holds != expected:
            yield Race("content", access.number, f"{access.operation}: there lies {_holding(place)}")
        elif not self._ended(place.written, access):
            yield Race("unfinished", access.number, _too_early(access, place.written))
        place.reads[access.stream] = access

    def _write(self, key: _Key, content: tuple[str, int], access: _Access) -> Iterator[Race]:
        # A place is written on one stream only: writes follow each other, and reads are what may be too late.
        place = self._places.get(key)
        for earlier in () if place is None else place.reads.values():
            if not self._ended(earlier, access):
                yield Race("overwritten", access.number, _too_early(access, earlier))
        self._places[key] = _Place(content, access)
        if self._take(key[:2]) and self._limit is not None and self._bytes > self._limit:
            yield Race(
                "memory",
                access.number,
                f"{access.operation} makes it {self._bytes:,} bytes, the limit is {self._limit:,}",
            )

    def _take(self, place: tuple[str, int | str]) -> bool:
        """Count the memory of ``place`` when it is used first; whether it was."""
        if place in self._taken:
            return False
        self._taken.add(place)
        match place:
            case "slot", _:
                self._bytes += self._slot_bytes
            case "area", _:
                self._bytes += self._area_bytes
            case _, call:
                self._bytes += self._sizes[str(call)]
        return True


def _home(call: str, slot: int | None, piece: int) -> _Key:
    return ("own", call, piece) if slot is None else ("slot", slot, piece)


def _holding(place: _Place) -> str:
    call, piece = place.holds
    return f"{call}, piece {piece}, since operation {place.written.number}"


def _too_early(access: _Access, other: _Access) -> str:
    return f"{access.operation} may begin before the end of {other.operation} (operation {other.number})"
