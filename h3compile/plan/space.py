"""The plans there are for one program and one way to share a node: residencies, their memory and a bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from h3compile.plan.components import Component
from h3compile.plan.cost import Parallel, operation_seconds
from h3compile.plan.memory import MemoryPlan, kept_timesteps, memory_plan
from h3compile.plan.residency import Mode, Residency, spaced
from h3compile.plan.schedule import Compute, Copy, Gather
from h3compile.plan.search import Candidate
from h3compile.plan.shapes import Clip
from h3compile.plan.simulate import Seconds, steady_step_seconds
from h3compile.plan.work import ProgramWork
from h3compile.targets import Target

__all__ = ["PIECES", "SLOTS", "Load", "Space"]

SLOTS = (1, 2, 3, 4)
PIECES = (1, 2, 4)


@dataclass(frozen=True)
class Load:
    """Seconds that each stream has to work in one step."""

    compute: float
    copy: float
    collective: float

    @property
    def longest(self) -> float:
        """What the busiest stream has to do: no schedule is shorter."""
        return max(self.compute, self.copy, self.collective)

    def towards(self, other: Load, share: float) -> Load:
        """The load at ``share`` of the way to ``other``."""
        return Load(
            self.compute + share * (other.compute - self.compute),
            self.copy + share * (other.copy - self.copy),
            self.collective + share * (other.collective - self.collective),
        )


@dataclass(frozen=True, eq=False)
class Space:
    """One program, one clip, one way to share a step; what is left to choose is where weights live.

    ``passes`` made the program, as `--passes` takes them.
    ``replicas`` groups of ``parallel.shards`` devices each make a clip at the same time. ``together`` is for
    how many clips a step counts: it is seconds of the node for one of them. ``tenants`` share the device.
    ``modes`` are those that streamed blocks may come in, where there are several devices.
    """

    work: ProgramWork
    target: Target
    clip: Clip
    passes: str = ""
    parallel: Parallel = field(default_factory=Parallel)
    replicas: int = 1
    together: int = 1
    tenants: Sequence[Component] = ()
    modes: tuple[Mode, ...] = ("local", "allgather")
    _loads: dict[tuple[Mode, int], tuple[Load, Load]] = field(default_factory=dict, init=False, repr=False)

    @property
    def devices(self) -> int:
        """Devices at work."""
        return self.parallel.shards * self.replicas

    def residencies(self) -> Iterator[Residency]:
        """Every one there is, that of all blocks first; the only one where the host has the same memory."""
        found = _residencies(self.work.blocks, self.modes if self.parallel.ranks > 1 else ("local",))
        return iter(found[:1] if self.unified else found)

    @property
    def unified(self) -> bool:
        """Whether device and host share one memory, so that streaming would only copy within it."""
        return self.target.host is not None and self.target.host.kind == "unified"

    def candidates(self) -> Iterator[Candidate]:
        """Every residency with its memory and its bound."""
        lines: dict[tuple[Mode, int, int], _Line] = {}
        for residency in self.residencies():
            kept = len(residency.resident)
            key = residency.mode, residency.pieces, residency.slots
            if key not in lines:
                lines[key] = _Line(self, residency)
            device, host = lines[key].at(kept)
            yield Candidate(
                residency,
                device,
                host * self.devices,
                self.load(residency).longest / self.together,
                partial(self.step, residency),
            )

    def memory(self, residency: Residency) -> MemoryPlan:
        """What it takes of each device, and of the host for each device."""
        clip = self.clip
        return memory_plan(
            self.work,
            clip.dims,
            residency,
            self.parallel,
            timesteps=kept_timesteps(clip.forwards, clip.dims["timesteps"]),
            tenants=self.tenants,
            pixels=clip.frames * clip.width * clip.height,
            arch=self.target.arch,
        )

    def seconds(self, residency: Residency) -> Seconds:
        """What every operation of its schedule takes."""
        return operation_seconds(self.work, self.target, self.clip.dims, residency, self.parallel)

    def step(self, residency: Residency) -> float:
        """Seconds of one forward of many, as `Candidate.bound` counts them: its schedule, simulated."""
        names = self.work.names("step")
        return steady_step_seconds(names, residency, self.seconds(residency)) / self.together

    def load(self, residency: Residency) -> Load:
        """What each stream has to do in a step; the more is streamed the more, in a straight line."""
        key = residency.mode, residency.pieces
        if key not in self._loads:
            blocks = residency.blocks
            nothing, everything = Residency(blocks, blocks, 0, *key), Residency(blocks, (), 1, *key)
            self._loads[key] = self._load(nothing), self._load(everything)
        least, most = self._loads[key]
        return least.towards(most, len(residency.streamed) / len(residency.blocks))

    def _load(self, residency: Residency) -> Load:
        seconds = self.seconds(residency)
        slot = 0 if residency.slots else None
        step = sum(seconds(Compute(call)) for call in self.work.names("step"))
        copies = sum(seconds(Copy(call, slot)) for call in residency.streamed)
        gathers = 0.0
        if residency.mode == "allgather":
            gathers = sum(seconds(Gather(call, slot, 0, 0)) for call in residency.streamed)
        return Load(step, copies * residency.pieces, gathers * residency.pieces)


@cache
def _residencies(blocks: tuple[str, ...], modes: tuple[Mode, ...]) -> tuple[Residency, ...]:
    """Those of every space with these blocks, which come in these ``modes``."""
    ways = [(mode, pieces) for mode in modes for pieces in (PIECES if mode == "allgather" else (1,))]
    found = [Residency(blocks, blocks, 0)]
    for mode, pieces in ways:
        for slots in SLOTS:
            for count in range(len(blocks) - slots + 1):
                found.append(Residency(blocks, spaced(blocks, count), slots, mode, pieces))
    return tuple(found)


class _Line:
    """Bytes by the number of residents, all else equal: blocks are alike, so every kind is a straight line.

    What is handed out is measured by itself in the end; the line spares thousands of evaluations.
    """

    def __init__(self, space: Space, like: Residency) -> None:
        blocks, slots = like.blocks, like.slots
        # With none resident there is nothing to stage: a point beside the line.
        last = len(blocks) - slots
        self._ends = [
            (count, space.memory(Residency(blocks, spaced(blocks, count), slots, like.mode, like.pieces)))
            for count in dict.fromkeys((0, 1, last) if slots else (last,))
        ]

    def at(self, count: int) -> tuple[int, int]:
        """Bytes of each device, and of the host for each, with ``count`` residents."""
        for known, memory in self._ends:
            if known == count:
                return memory.peak, memory.host
        (first, low), (last, high) = self._ends[-2:]

        def between(least: int, most: int) -> int:
            return least + (most - least) * (count - first) // (last - first)

        device = max(between(low.total(phase), high.total(phase)) for phase in low.device)
        return device, between(low.host, high.host)
