"""The block streamer: executes a schedule, so that weights are on the device when their call is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from h3compile.plan.schedule import Compute, Copy, Gather, Operation, Record, Schedule, Wait
from h3compile.runtime.lanes import Lanes, Ticket
from h3compile.runtime.reader import Reader
from h3compile.runtime.runner import BoundCall, Check, Fed
from h3compile.runtime.sharding import Sharding
from h3compile.runtime.weights import DeviceRange

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Gathering", "Streamer"]

# The weights that begin at a device buffer, of the call of this name.
Views = Callable[[torch.Tensor, str], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Gathering:
    """Where shards come together: the ranks, the ``areas`` that parts wait in, and bytes of calls."""

    group: ProcessGroup
    sharding: Sharding
    areas: Sequence[torch.Tensor]
    sizes: Mapping[str, int]


class Streamer:
    """Brings weights to calls as ``schedule`` says: `step` and `request` are what a runner is fed by.

    ``slots`` are the device places that streamed calls take turns in, ``places`` those of the residents by
    call. ``reader`` has the bytes in host memory, sooner or later. ``views`` gives a call's weights in a
    slot. A walk that does not come to its end leaves no thread and nothing half-done behind: the next one
    begins with empty slots, and waits on the device for what still runs.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        carried: Sequence[str],
        streamed: Sequence[str],
        slots: Sequence[torch.Tensor],
        places: Mapping[str, DeviceRange],
        reader: Reader,
        lanes: Lanes,
        views: Views,
        gathering: Gathering | None = None,
    ) -> None:
        self._schedule = schedule
        self._carried = frozenset(carried)
        self._slots = tuple(slots)
        self._places = dict(places)
        self._reader = reader
        self._lanes = lanes
        self._arriving: set[str] = set()  # residents whose last part is on its way
        # Made once: a view is cheap, and a forward of 50 blocks would make a thousand of them.
        self._views = {
            (slot, call): views(data, call)
            for slot, data in enumerate(self._slots)
            for call in (*carried, *streamed)
        }
        self._gathering = gathering
        self.copied = 0  # bytes brought to the device since loading
        self.observe: Callable[[Operation], None] = lambda operation: None  # told of what was executed
        areas = () if gathering is None else gathering.areas
        lanes.adopt(*self._slots, *areas, *(place.data for place in self._places.values()))

    @property
    def reader(self) -> Reader:
        """What reads from disk."""
        return self._reader

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots, and of the areas that parts wait in."""
        areas = () if self._gathering is None else self._gathering.areas
        return sum(place.nbytes for place in (*self._slots, *areas))

    def step(self, calls: Sequence[BoundCall], check: Check) -> Fed:
        """The calls of a forward, each with its weights."""
        yield from self._walk(self._schedule.step(), calls, check)

    def request(self, calls: Sequence[BoundCall], check: Check) -> Fed:
        """Those ``calls`` of a request that are to be computed, each with its weights."""
        if self._carried.isdisjoint(call.name for call in calls):
            for call in calls:
                yield call, call.weights
            return
        yield from self._walk(self._schedule.request(), calls, check)

    def _walk(self, operations: Iterator[Operation], calls: Iterable[BoundCall], check: Check) -> Fed:
        asked = {call.name: call for call in calls}
        ended = False
        try:
            self._reader.start()
            self._lanes.begin()
            for operation in operations:
                match operation:
                    case Compute(name, slot) if name in asked:
                        call = asked.pop(name)
                        yield call, call.weights if slot is None else self._views[slot, name]
                    case Compute():  # of a request that has this value still
                        continue
                    case Copy(name, slot, _, None):
                        self._copy(name, slot, check)
                    case Copy(name, slot, piece, int(area)):
                        self._stage(name, slot, piece, area, check)
                    case Gather(name, slot, piece, area):
                        self._gather(name, slot, piece, area)
                    case Record(stream, event):
                        self._lanes.record(stream, event)
                    case Wait(stream, event):
                        self._lanes.wait(stream, event)
                self.observe(operation)
            ended = True
        finally:
            if not ended:
                self._schedule.reset()
                self._reader.pause()
        assert not asked, f"the schedule does not compute {', '.join(asked)}"

    def _copy(self, call: str, slot: int | None, check: Check) -> None:
        if slot is not None:
            source = self._reader.get(call, check)
            self._lanes.copy(source, self._slots[slot][: source.numel()])
            self.copied += source.nbytes
            return
        if call not in self._reader:
            self._places[call].wait()  # another engine brings it, or a walk did that ended there
            return
        source = self._reader.get(call, check)
        sent: list[Ticket] = []
        self._places[call].fill(partial(self._send, source, sent))
        self._reader.staged(call, *sent)

    def _stage(self, call: str, slot: int | None, piece: int, area: int, check: Check) -> None:
        """A part of this rank's shard on its way into an area."""
        if slot is None and call not in self._reader:
            return  # as in `_copy`
        gathering = self._plan()
        source = self._reader.get(call, check)
        length = source.numel() // gathering.sharding.pieces
        part = source[piece * length : (piece + 1) * length]
        ticket = self._lanes.copy(part, gathering.areas[area][:length])
        self.copied += part.nbytes
        if slot is None and piece + 1 == gathering.sharding.pieces:
            self._arriving.add(call)
            self._reader.staged(call, ticket)  # copies end in their order

    def _gather(self, call: str, slot: int | None, piece: int, area: int) -> None:
        """A part of every rank, from their areas into the slot or the resident's place."""
        gathering = self._plan()
        sharding, nbytes = gathering.sharding, gathering.sizes[call]
        part = gathering.areas[area][: sharding.part(nbytes)]
        if slot is not None:
            self._lanes.gather(part, sharding.round(self._slots[slot], nbytes, piece), gathering.group)
            return
        place = self._places[call]
        if call not in self._reader and call not in self._arriving:
            place.wait()  # as in `_copy`
            return
        ticket = self._lanes.gather(part, sharding.round(place.data, nbytes, piece), gathering.group)
        if piece + 1 == sharding.pieces:
            self._arriving.discard(call)
            place.fill(lambda _: ticket)

    def _plan(self) -> Gathering:
        assert self._gathering is not None, "the schedule gathers, and nobody said from whom"
        return self._gathering

    def _send(self, source: torch.Tensor, sent: list[Ticket], target: torch.Tensor) -> Ticket:
        ticket = self._lanes.copy(source, target)
        sent.append(ticket)
        self.copied += source.nbytes
        return ticket
