"""The block streamer's schedule: what is enqueued on which stream, in the order of the host.

One pure class makes it, and three read it: the runtime executes it, `h3compile.plan.simulate` times it and
`h3compile.plan.races` checks it.

Weights on their way:

- ``local``: ``Copy`` writes a slot, or a resident's own place, from the host.
- ``allgather``: ``Copy`` writes a piece of this rank's shard into an area, ``Gather`` reads the areas of all
  ranks and writes that piece of the slot or place. Areas are taken in turn, whatever block a piece is of.

Events, and who waits for them:

- ``copied/S``, ``copied/CALL``: the slot S, or the resident CALL, is whole; ``compute`` waits.
- ``free/S``: what slot S holds has been read; the stream that writes slots waits.
- ``staged/A``: area A holds its piece; ``collective`` waits.
- ``taken/A``: area A has been gathered; ``copy`` waits.
- ``stopped/compute``, ``stopped/collective``: what an interrupted walk had enqueued there has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from h3compile.errors import BuildError
from h3compile.plan.residency import Residency

__all__ = ["Compute", "Copy", "Gather", "Operation", "Record", "Schedule", "Stream", "Wait"]

Stream = Literal["compute", "copy", "collective"]


@dataclass(frozen=True, slots=True)
class Compute:
    """A region's call. ``slot`` is where its weights lie; None: in their own place, or it has none."""

    call: str
    slot: int | None = None
    stream: ClassVar[Stream] = "compute"

    def __str__(self) -> str:
        return f"compute {self.call}" + ("" if self.slot is None else f" from slot {self.slot}")


@dataclass(frozen=True, slots=True)
class Copy:
    """Host to device: the weights of ``call`` for ``slot``, or for its own place when that is None.

    ``area`` is None in ``local`` mode: the copy is the whole block. In ``allgather`` mode it is the area
    that takes piece ``piece`` of this rank's shard.
    """

    call: str
    slot: int | None
    piece: int = 0
    area: int | None = None
    stream: ClassVar[Stream] = "copy"

    def __str__(self) -> str:
        place = _place(self.slot)
        if self.area is None:
            return f"copy {self.call} into {place}"
        return f"copy piece {self.piece} of {self.call} into area {self.area} for {place}"


@dataclass(frozen=True, slots=True)
class Gather:
    """The AllGather of piece ``piece`` from ``area`` of every rank into ``slot``, or its own place."""

    call: str
    slot: int | None
    piece: int
    area: int
    stream: ClassVar[Stream] = "collective"

    def __str__(self) -> str:
        return f"gather piece {self.piece} of {self.call} from area {self.area} into {_place(self.slot)}"


@dataclass(frozen=True, slots=True)
class Record:
    """Marks ``event`` at this point of ``stream``."""

    stream: Stream
    event: str

    def __str__(self) -> str:
        return f"record {self.event} on {self.stream}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Holds ``stream`` until the latest ``Record`` of ``event`` before this, in host order, is reached."""

    stream: Stream
    event: str

    def __str__(self) -> str:
        return f"wait for {self.event} on {self.stream}"


Operation = Compute | Copy | Gather | Record | Wait


def _place(slot: int | None) -> str:
    return "its own place" if slot is None else f"slot {slot}"


class Schedule:
    """The operations of request after request and step after step, as they are to be enqueued.

    ``step`` and ``request`` name all calls of a forward and of what is done once a request, in order.
    Calls of the step that ``residency`` does not know have their weights on the device always. The weights
    of request calls come through the slots: of all of them, or of those ``carried``; where there are no
    slots they are on the device always. ``loaded``: the residents are on the device from the beginning;
    otherwise the first step brings them, in order of need.

    Copies are enqueued in the order in which their calls are computed. A slot is refilled as soon as the
    call that reads it has been enqueued, so copies run up to ``slots`` streamed calls ahead, across the end
    of a step too; residents are brought at most as many calls ahead, and at least two. A ``Compute`` comes
    before the copies that look past it: the host enqueues arithmetic first.

    State advances when the next operation is asked for, so what was not executed is not taken for done.
    """

    def __init__(
        self,
        step: Sequence[str],
        request: Sequence[str],
        residency: Residency,
        *,
        carried: Collection[str] | None = None,
        loaded: bool = False,
    ) -> None:
        blocks = set(residency.blocks)
        if tuple(name for name in step if name in blocks) != residency.blocks:
            raise BuildError("the residency is of another program", "plan the blocks of this step, in order")
        if set(request) & set(step):
            raise BuildError("a call belongs to the request and to the step", "name calls apart")
        self._step = tuple(step)
        self._request = tuple(request)
        self._blocks = residency.blocks
        self._residency = residency
        self._residents = frozenset(residency.resident)
        carried = frozenset(request if carried is None else carried) if residency.slots else frozenset()
        self._moving = blocks | carried
        self._writer: Stream = "collective" if residency.mode == "allgather" else "copy"
        # A resident is first `_sent` (its copy is enqueued), then `_arrived` (compute waited for it).
        self._sent: set[str] = set(residency.resident if loaded else ())
        self._arrived: set[str] = set(self._sent)
        # Calls that move, from the next one to compute on: how many of them are sent, and in which slots.
        self._dealt = 0
        self._held: deque[int] = deque()
        self._turn = 0  # of slots
        self._area = 0
        self._read: set[int] = set()  # slots whose free/S nobody waited for yet
        self._taken: set[int] = set()  # areas whose taken/A nobody waited for yet
        self._walking = False
        self._stopped = False

    def request(self) -> Iterator[Operation]:
        """What is done once a request: slots are dropped, the request's calls take them in turn.

        The first blocks of the step that follows are on their way at the end.
        """
        self._begin()
        self._dealt = 0
        self._held.clear()
        yield from self._walk(self._request)

    def step(self) -> Iterator[Operation]:
        """One forward; the first blocks of the next one are on their way at its end."""
        self._begin()
        yield from self._walk(self._step)

    def reset(self) -> None:
        """Forget a walk that was not executed to its end: slots hold nothing, residents that came stay.

        What was enqueued may still be running: the next walk waits for it on the device, not the host.
        """
        self._dealt = 0
        self._held.clear()
        self._read.clear()
        self._taken.clear()
        self._walking = False
        # With everything on the device nothing is copied that would have to wait.
        self._stopped = bool(self._residency.slots) or self._sent != self._residents

    def _begin(self) -> None:
        if self._walking:
            raise RuntimeError("the last walk of the schedule did not end: call reset() first")
        self._walking = True

    def _walk(self, calls: tuple[str, ...]) -> Iterator[Operation]:
        if self._stopped:
            yield from self._settle()
        # After any walk comes a step.
        coming = tuple(name for name in calls if name in self._moving)
        for call in calls:
            if call not in self._moving:
                yield Compute(call)
                yield from self._send(coming)
                continue
            yield from self._send(coming, need=1)
            slot = None if call in self._residents else self._held[0]
            if slot is not None:
                yield Wait("compute", f"copied/{slot}")
            elif call not in self._arrived:
                yield Wait("compute", f"copied/{call}")
                self._arrived.add(call)
            yield Compute(call, slot)
            if slot is not None:
                yield Record("compute", f"free/{slot}")
                self._held.popleft()
                self._read.add(slot)
            coming = coming[1:]
            self._dealt -= 1
            yield from self._send(coming)
        self._walking = False

    def _send(self, coming: tuple[str, ...], need: int | None = None) -> Iterator[Operation]:
        """The copies for the calls that are next to move: ``coming``, then the blocks round and round.

        ``need``: only for so many calls; otherwise as far ahead as slots and `_reach` allow.
        """
        slots = self._residency.slots
        reach = max(slots, 2)
        while self._moving and (need is None or self._dealt < need):
            past = self._dealt - len(coming)
            call = coming[self._dealt] if past < 0 else self._blocks[past % len(self._blocks)]
            if call not in self._residents:
                if len(self._held) == slots:
                    return
                slot = self._turn % slots
                yield from self._bring(call, slot)
                self._turn += 1
                self._held.append(slot)
            elif self._dealt >= reach and not (slots and call in self._sent):
                return
            elif call not in self._sent:
                yield from self._bring(call, None)
                self._sent.add(call)
            self._dealt += 1

    def _bring(self, call: str, slot: int | None) -> Iterator[Operation]:
        """One block to the device."""
        copied = f"copied/{call if slot is None else slot}"
        if self._residency.mode == "allgather":
            yield from self._bring_shards(call, slot)
        else:
            yield from self._wait_for_slot(slot)
            yield Copy(call, slot)
        yield Record(self._writer, copied)

    def _bring_shards(self, call: str, slot: int | None) -> Iterator[Operation]:
        for piece in range(self._residency.pieces):
            area = self._area % self._residency.areas
            if area in self._taken:
                yield Wait("copy", f"taken/{area}")
                self._taken.remove(area)
            yield Copy(call, slot, piece, area)
            yield Record("copy", f"staged/{area}")
            if piece == 0:
                yield from self._wait_for_slot(slot)
            yield Wait("collective", f"staged/{area}")
            yield Gather(call, slot, piece, area)
            yield Record("collective", f"taken/{area}")
            self._taken.add(area)
            self._area += 1

    def _wait_for_slot(self, slot: int | None) -> Iterator[Operation]:
        if slot in self._read:
            yield Wait(self._writer, f"free/{slot}")
            self._read.remove(slot)

    def _settle(self) -> Iterator[Operation]:
        """After an interruption events may lack: everything that reads slots and areas is waited for."""
        yield Record("compute", "stopped/compute")
        yield Wait(self._writer, "stopped/compute")
        if self._residency.mode == "allgather":
            yield Record("collective", "stopped/collective")
            yield Wait("copy", "stopped/collective")
        self._stopped = False
