"""The planner: a question about a clip on a node goes in; plans come out, or why there are none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from h3compile.errors import H3CompileError
from h3compile.plan.collectives import degrees
from h3compile.plan.components import AUDIO_VAE, TEXT_ENCODER, VIDEO_VAE, Component, Placement
from h3compile.plan.cost import Parallel, step_seconds
from h3compile.plan.memory import usable
from h3compile.plan.plans import Plan, checked
from h3compile.plan.residency import Mode
from h3compile.plan.search import Candidate, fastest, frontier, smallest
from h3compile.plan.shapes import Clip
from h3compile.plan.space import Space
from h3compile.plan.work import ProgramWork, released
from h3compile.targets import Node

__all__ = ["LOSSY", "PLACEMENTS", "Objective", "Placements", "Planner", "Question", "tenants"]

# GPUs that the links of one node join, in those that are sold.
_NODE = 8

# What is to be short: a step of one clip, or the node's time for it when it makes several at once.
Objective = Literal["latency", "throughput"]

# Passes that may be allowed: they change the clip.
LOSSY = ("fp8", "sage")

# How many times as long as the fastest a step may take to be on a frontier.
WORTH = 3.0

# How many times as long as the shortest step one is taken for as short.
_AS_SHORT = 1.05

# Where the text encoder lives, and where the VAEs do; the ways that are tried, in order.
Placements = tuple[Placement, Placement]
PLACEMENTS: tuple[Placements, ...] = (
    ("moved", "moved"),
    ("streamed", "moved"),
    ("streamed", "streamed"),
    ("elsewhere", "elsewhere"),
)


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        node: the devices.
        clip: the size of a request.
        passes: as `--passes` takes them.
        allow: lossy passes that may be added where they help.
        hbm: bytes that may be used of each device; None for what the target has.
        host: bytes of the machine's memory that may be used; None for any.
        components: where the text encoder and the VAEs live; None for the first of these that leaves room
            for short steps: whole on the devices while they work, streamed there by layers (the encoder
            first), elsewhere.
        objective: what is to be short.
        work: what the program has to do under given passes; that of the released model unless said.
        parallel: how the devices share, where that is settled.
        modes: how streamed blocks may come to several devices.
    """

    node: Node
    clip: Clip = field(default_factory=Clip)
    passes: str = ""
    allow: tuple[str, ...] = ()
    hbm: int | None = None
    host: int | None = None
    components: Placement | None = None
    objective: Objective = "latency"
    work: Callable[[str], ProgramWork] = released
    parallel: Parallel | None = None
    modes: tuple[Mode, ...] = ("local", "allgather")

    def __post_init__(self) -> None:
        for name in self.allow:
            if name not in LOSSY:
                raise H3CompileError(f"{name!r} cannot be allowed", f"choose among {', '.join(LOSSY)}")

    @property
    def limit(self) -> int | None:
        """Bytes that may be used of each device; None where the target does not say."""
        return usable(self.node.target) if self.hbm is None else self.hbm


class Planner:
    """Answers one question; `H3CompileError` where it makes no sense.

    Candidates are made once: a frontier and a plan cost little more than one of them. ``notes`` say which
    allowed passes the target cannot compute, and where fewer devices would do.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.notes: list[str] = []
        self.variants = self._variants()
        self._shares = self._sharings()
        self._made: dict[tuple[str, Placements], dict[Candidate, Space]] = {}

    def fastest(self) -> Plan | None:
        """The shortest step of the plans that fit; None where none does."""
        pool = self._fitting(self.placements)
        return self._plan(fastest(pool), pool)

    def smallest(self, slowdown: float) -> Plan | None:
        """The plan that takes the least of the devices for steps longer by at most ``slowdown``, a share.

        Longer than those of the fastest with all weights on the devices; None where it does not fit.
        """
        pool = self._fitting(self.placements)
        best = min(candidate.bound for candidate in self._pool(self.placements))
        return self._plan(smallest(pool, best * (1 + slowdown)), pool)

    def frontiers(self) -> dict[str, list[Plan]]:
        """By passes, the plans that no smaller one beats, by size; what is larger than the limit too.

        What takes more than `WORTH` times as long as the fastest is left out: nobody would choose it.
        """
        found = {}
        for passes in self.variants:
            pool = self._candidates(passes, self.placements)
            longest = WORTH * min(one.bound for one in pool)
            worth = [one for one in pool if self._host_fits(one) and one.bound <= longest]
            found[passes] = [self._checked(one, pool[one]) for one in frontier(worth) if one.step <= longest]
        return found

    def resident(self) -> dict[str, Plan]:
        """By passes, the fastest plan with all weights on the devices, whether it fits or not."""
        found = {}
        for passes in self.variants:
            pool = self._candidates(passes, self.placements)
            best = fastest(one for one in pool if not one.residency.streamed)
            assert best is not None
            found[passes] = self._checked(best, pool[best])
        return found

    def least(self) -> Plan:
        """The plan that takes the least of the devices, the text encoder and the VAEs elsewhere."""
        last = self._tried[-1]
        pool = self._pool(last)
        best = min(pool, key=lambda one: (one.device, one.host, one.bound))
        return self._checked(best, pool[best])

    def least_of_host(self) -> Plan:
        """Of the plans that fit the devices, the one that takes the least of the host."""
        last, limit = self._tried[-1], self.question.limit
        pool = self._pool(last)
        fitting = [one for one in pool if limit is None or one.device <= limit]
        best = min(fitting, key=lambda one: (one.host, one.device, one.bound))
        return self._checked(best, pool[best])

    def fits(self) -> bool:
        """Whether anything does."""
        # The last way takes the least of the devices, so that the others are rarely looked at.
        return any(self._fitting(tried) for tried in reversed(self._tried))

    @cached_property
    def placements(self) -> Placements:
        """Where the text encoder and the VAEs live: as asked, or the first way in which steps are short.

        As short as in any way in which something fits; elsewhere they go only where nothing else does.
        """
        best = {tried: fastest(self._fitting(tried)) for tried in self._tried}
        steps = {tried: one.step for tried, one in best.items() if one is not None}
        here = {tried: step for tried, step in steps.items() if "elsewhere" not in tried} or steps
        longest = _AS_SHORT * min(here.values(), default=0.0)
        return next((tried for tried, step in here.items() if step <= longest), self._tried[-1])

    @property
    def _tried(self) -> tuple[Placements, ...]:
        asked = self.question.components
        return PLACEMENTS if asked is None else ((asked, asked),)

    def _variants(self) -> dict[str, ProgramWork]:
        """The work under the passes asked for, and with those added that may be."""
        question = self.question
        named = {item.partition("(")[0].strip() for item in question.passes.split(",")}
        extra = [name for name in question.allow if name not in named]
        found = {}
        for count in range(len(extra) + 1):
            for added in itertools.combinations(extra, count):
                passes = ",".join(filter(None, (question.passes, *added)))
                work = question.work(passes)
                try:
                    step_seconds(work, question.node.target, question.clip.dims)
                except H3CompileError as error:
                    if not added:
                        raise
                    if len(added) == 1:
                        self.notes.append(f"{added[0]} is left out: {error.cause}")
                    continue
                found[passes] = work
        return found

    def _sharings(self) -> list[tuple[Parallel, int]]:
        """How the devices may share: ranks of one clip, and clips at once; only what nears the fastest."""
        question, work = self.question, next(iter(self.variants.values()))
        if question.parallel is not None:
            return [(question.parallel, 1)]
        count, heads, target = question.node.count, work.heads, question.node.target
        whole = question.objective == "throughput"
        if count > _NODE and not whole:
            self.notes.append(f"{count} GPUs are planned as if the links of one node joined them")
        if not whole and count not in degrees(heads):
            self._require_ring(work, count)
        steps = {
            shards: step_seconds(work, target, question.clip.dims, shards=shards)
            / (count // shards if whole else 1)
            for shards in sorted({*degrees(heads)} if whole else {*degrees(heads), count})
            if count % shards == 0
        }
        longest = WORTH * min(steps.values())
        # Weights are gathered by the ranks of one clip, as those of an engine do. `Parallel.group`, replicas
        # that gather them together, is for published topologies, by which the cost model is validated.
        return [(Parallel(shards), count // shards) for shards, step in steps.items() if step <= longest]

    def _require_ring(self, work: ProgramWork, count: int) -> None:
        """Raises `H3CompileError` unless ``count`` devices can pass keys round; leaves out what cannot."""
        question = self.question
        for passes, other in list(self.variants.items()):
            try:
                step_seconds(other, question.node.target, question.clip.dims, shards=count)
            except H3CompileError as error:
                if other is not work:
                    del self.variants[passes]
                    self.notes.append(f"{passes} is left out: {error.cause}")
                    continue
                *less, most = (str(degree) for degree in degrees(work.heads) if degree < count)
                mend = (
                    f"use {', '.join(less)} or {most} of them, leave that pass out, "
                    f"or --throughput for {count} clips at once"
                )
                raise H3CompileError(error.cause, mend) from error
        clip, target = question.clip.dims, question.node.target
        ring = step_seconds(work, target, clip, shards=count)
        fewer = {d: step_seconds(work, target, clip, shards=d) for d in degrees(work.heads) if d < count}
        best = min(fewer, key=fewer.__getitem__)
        if fewer[best] < ring:
            self.notes.append(
                f"{best} GPUs are faster, {fewer[best]:.4g} s a step: {count} pass keys round, {ring:.4g} s"
            )

    def _candidates(self, passes: str, placements: Placements) -> dict[Candidate, Space]:
        key = passes, placements
        if key not in self._made:
            question = self.question
            whole = question.objective == "throughput"
            self._made[key] = {
                candidate: space
                for parallel, replicas in self._shares
                for space in [
                    Space(
                        self.variants[passes],
                        question.node.target,
                        question.clip,
                        passes=passes,
                        parallel=parallel,
                        replicas=replicas,
                        together=replicas if whole else 1,
                        tenants=tenants(placements, question.node.count),
                        modes=question.modes,
                    )
                ]
                for candidate in space.candidates()
            }
        return self._made[key]

    def _pool(self, placements: Placements) -> dict[Candidate, Space]:
        found: dict[Candidate, Space] = {}
        for passes in self.variants:
            found |= self._candidates(passes, placements)
        return found

    def _fitting(self, placements: Placements) -> dict[Candidate, Space]:
        limit = self.question.limit
        return {
            one: space
            for one, space in self._pool(placements).items()
            if self._host_fits(one)
            and (limit is None or one.device + (one.host if space.unified else 0) <= limit)
        }

    def _host_fits(self, candidate: Candidate) -> bool:
        return self.question.host is None or candidate.host <= self.question.host

    def _plan(self, candidate: Candidate | None, pool: Mapping[Candidate, Space]) -> Plan | None:
        return None if candidate is None else self._checked(candidate, pool[candidate])

    def _checked(self, candidate: Candidate, space: Space) -> Plan:
        return checked(self.question.node, space, candidate, self.question.limit)


def tenants(placements: Placements, devices: int) -> tuple[Component, ...]:
    """The text encoder, split over the devices, and the VAEs, whole on each: their tiles are divided."""
    encoder, vaes = placements
    return (
        TEXT_ENCODER.placed(encoder, shards=devices),
        VIDEO_VAE.placed(vaes),
        AUDIO_VAE.placed(vaes),
    )
