"""How long a sequence of stream operations takes: an event simulation.

Every stream does its operations in order; a ``Wait`` holds its stream until the ``Record`` it waits for.
The host counts for nothing: it is taken to enqueue everything at once, which holds as long as launching is
faster than executing. Streams do not slow each other down: what copies and collectives take from kernels
belongs into the durations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from h3compile.plan.residency import Residency
from h3compile.plan.schedule import Compute, Copy, Gather, Operation, Record, Schedule, Stream, Wait

__all__ = ["Seconds", "Span", "Timeline", "simulate", "steady_step_seconds"]

# What an operation takes. Only ever asked about Compute, Copy and Gather.
Seconds = Callable[[Compute | Copy | Gather], float]

_STREAMS: tuple[Stream, ...] = get_args(Stream)


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on its stream, in seconds from the beginning.

    ``after`` is the number of the span whose end this one began at; None when it began at once.
    """

    operation: Compute | Copy | Gather
    start: float
    end: float
    after: int | None

    @property
    def stream(self) -> Stream:
        """The stream it lies on."""
        return self.operation.stream

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """What ran when; ``spans`` in the order in which the host enqueued them."""

    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        """Seconds until the last operation of any stream has ended."""
        return max((span.end for span in self.spans), default=0.0)

    def on(self, stream: Stream) -> tuple[Span, ...]:
        """The spans of one stream, in order."""
        return tuple(span for span in self.spans if span.stream == stream)

    def busy(self, stream: Stream) -> float:
        """Seconds in which ``stream`` worked."""
        return sum(span.seconds for span in self.on(stream))

    def idle(self, stream: Stream) -> float:
        """Seconds of the makespan in which ``stream`` did not work."""
        return self.makespan - self.busy(stream)

    def critical_path(self) -> tuple[Span, ...]:
        """Spans that follow each other without a gap from the beginning to the end of the makespan.

        Of several such chains, the one that a stream's own order explains before an event does.
        """
        if not self.spans:
            return ()
        chain = [max(self.spans, key=lambda span: span.end)]
        while (before := chain[-1].after) is not None:
            chain.append(self.spans[before])
        return tuple(reversed(chain))


class _Clock:
    """The simulation's state, which operations may be fed to bit by bit."""

    def __init__(self, seconds: Seconds) -> None:
        self._seconds = seconds
        # Of every stream and event: when it is through, and with the end of which span.
        self._streams: dict[Stream, tuple[float, int | None]] = dict.fromkeys(_STREAMS, (0.0, None))
        self._events: dict[str, tuple[float, int | None]] = {}
        self.spans: list[Span] = []

    def feed(self, operations: Iterable[Operation]) -> None:
        streams, events, spans = self._streams, self._events, self.spans
        for operation in operations:
            stream = operation.stream
            if isinstance(operation, Record):
                events[operation.event] = streams[stream]
            elif isinstance(operation, Wait):
                # As on the device: an event that nobody recorded holds nobody up.
                event = events.get(operation.event)
                if event is not None and event[0] > streams[stream][0]:
                    streams[stream] = event
            else:
                start, after = streams[stream]
                end = start + self._seconds(operation)
                streams[stream] = (end, len(spans))
                spans.append(Span(operation, start, end, after))

    def reached(self, stream: Stream) -> float:
        """When ``stream`` is through with what it was fed."""
        return self._streams[stream][0]


def simulate(operations: Iterable[Operation], seconds: Seconds) -> Timeline:
    """When each of ``operations`` runs, each taking ``seconds`` of it (0 or more)."""
    clock = _Clock(seconds)
    clock.feed(operations)
    return Timeline(tuple(clock.spans))


def steady_step_seconds(
    step: Sequence[str], residency: Residency, seconds: Seconds, *, most_steps: int = 24
) -> float:
    """Seconds from the end of a step to the end of the next one, when many have gone before.

    Slots go round several times before blocks meet the same ones again, so steps may take turns in being
    long and short: what is compared and returned is the mean over one such round. Simulates until two rounds
    agree, or ``most_steps``, of which the second half is then averaged.
    """
    slots = residency.slots
    turn = slots // math.gcd(slots, len(residency.streamed)) if slots else 1
    schedule = Schedule(step, (), residency, loaded=True)
    clock = _Clock(seconds)
    ends = [0.0]
    while len(ends) <= most_steps:
        clock.feed(schedule.step())
        ends.append(clock.reached("compute"))
        if len(ends) > 2 * turn + 1:
            last, before = (ends[-1] - ends[-1 - turn]) / turn, (ends[-1 - turn] - ends[-1 - 2 * turn]) / turn
            if abs(last - before) <= 1e-9 * max(last, before):
                return last
    half = len(ends) // 2
    return (ends[-1] - ends[half]) / (len(ends) - 1 - half)
