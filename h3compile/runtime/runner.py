"""The small loop that executes a program: call after call, each value freed after its last use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import torch

from h3compile.runtime.executors import Executor
from h3compile.runtime.measures import Record

__all__ = ["BoundCall", "Check", "Fed", "Feed", "Reads", "Runner", "bound", "last_reads"]

# Called wherever work may stop; raises `Interrupted` to make it stop.
Check = Callable[[], None]

# How many calls the host may enqueue before it waits for the first of them on the device. Without a
# bound it would enqueue a whole forward in milliseconds, and a stop would wait seconds for the device.
RUN_AHEAD = 4


class Reads(Protocol):
    """Something with a list of values that it reads."""

    @property
    def inputs(self) -> tuple[str, ...]: ...


class Source(Protocol):
    """Values that are produced when asked for; each is asked for once a run."""

    def __getitem__(self, name: str, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class BoundCall:
    """One execution of a region; ``weights`` are those that stay on the device, else a `Feed` brings them."""

    name: str
    region: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    executor: Executor
    weights: tuple[torch.Tensor, ...]

    def run(
        self,
        inputs: list[torch.Tensor],
        weights: Sequence[torch.Tensor],
        stand_in: Executor | None = None,
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """The outputs by name, computed by ``stand_in`` where one is given; ``inputs`` is emptied."""
        inputs += weights
        made = (stand_in or self.executor)(inputs)
        inputs.clear()
        return zip(self.outputs, made, strict=True)


# Calls one by one, each with its weights, which are there until the next one is asked for. Closed early it
# leaves nothing half-done.
Fed = Generator[tuple[BoundCall, tuple[torch.Tensor, ...]], None, None]


class Feed(Protocol):
    """Brings weights to calls."""

    def __call__(self, calls: Sequence[BoundCall], check: Check, /) -> Fed:
        """Every one of ``calls``, in order; ``check`` is called where it waits."""


def bound(calls: Sequence[BoundCall], check: Check) -> Fed:
    """The feed of calls whose weights all stay on the device."""
    for call in calls:
        yield call, call.weights


def last_reads(calls: Sequence[Reads], kept: Collection[str] = ()) -> list[tuple[str, ...]]:
    """For every call the values that no later call reads, without those that are ``kept``."""
    last = {name: index for index, call in enumerate(calls) for name in call.inputs}
    dead: list[list[str]] = [[] for _ in calls]
    for name, index in last.items():
        if name not in kept:
            dead[index].append(name)
    return [tuple(names) for names in dead]


class Runner:
    """Executes ``calls`` in order and returns ``outputs``.

    ``variants`` are the executors that may stand in for those of calls, by the name of their region;
    ``measures`` the values that are recorded when they are made; ``feed`` brings the weights.
    """

    def __init__(
        self,
        calls: Sequence[BoundCall],
        outputs: Sequence[str],
        device: torch.device,
        *,
        variants: Mapping[str, Executor] | None = None,
        measures: Collection[str] = (),
        feed: Feed = bound,
    ) -> None:
        self._calls = tuple(calls)
        self._outputs = tuple(outputs)
        self._dead = last_reads(self._calls, self._outputs)
        self._read = {name for call in self._calls for name in call.inputs} | set(self._outputs)
        self._device = device
        self._variants = dict(variants or {})
        self._measures = frozenset(measures)
        self._feed = feed

    def run(
        self,
        given: Mapping[str, torch.Tensor],
        source: Source,
        check: Check,
        *,
        stand_ins: Mapping[str, str] | None = None,
        record: Record = lambda name, value: None,
    ) -> tuple[torch.Tensor, ...]:
        """The outputs, from the values ``given`` and, for values in neither these nor a call, ``source``.

        ``check`` is called before every call. ``stand_ins`` names, by region, the variant that serves its
        calls in this step; ``record`` is given every measured value.
        """
        executors = {region: self._variants[variant] for region, variant in (stand_ins or {}).items()}
        values = dict(given)
        pace = _Pace(self._device)
        with closing(self._feed(self._calls, check)) as feed:
            for (call, weights), dead in zip(feed, self._dead, strict=True):
                check()
                for name in call.inputs:
                    if name not in values:
                        values[name] = source[name]
                inputs = [values[name] for name in call.inputs]
                # Before the call, so that an executor which consumes its inputs can free them early.
                for name in dead:
                    del values[name]
                made = dict(call.run(inputs, weights, executors.get(call.region)))
                for name in self._measures.intersection(made):
                    record(name, made[name])
                values.update((name, value) for name, value in made.items() if name in self._read)
                del inputs, made
                pace.advance()
        check()
        return tuple(values[name] if name in values else source[name] for name in self._outputs)


class _Pace:
    """Keeps the host at most `RUN_AHEAD` calls ahead of a GPU; does nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._events: deque[torch.cuda.Event] | None = deque() if device.type == "cuda" else None

    def advance(self) -> None:
        if self._events is None:
            return
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)
        if len(self._events) > RUN_AHEAD:
            self._events.popleft().synchronize()
