"""`dlo`: which blocks stay on the device, and how the others come there when they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from h3compile.errors import BuildError, H3CompileError
from h3compile.pipeline.base import Match, Pass, Rewrite, Tier
from h3compile.plan.amounts import parse_bytes
from h3compile.plan.residency import prefix, spaced
from h3compile.program.analysis import execution_stages
from h3compile.program.program import Program
from h3compile.program.residency import Mode, Residency, repeated
from h3compile.program.stages import Stage
from h3compile.targets import Target

__all__ = ["Dlo"]

_MODES: dict[str, Mode] = {"local": "local", "allgather": "allgather"}
_PLACES = {"spaced": spaced, "prefix": prefix}

# One is read while the other is filled.
SLOTS = 2


@dataclass(frozen=True)
class Dlo(Pass):
    """Keep ``resident`` blocks on the device and stream the others through ``slots`` places there.

    Without ``resident`` the fastest plan that fits the target's memory is taken, or ``hbm`` of it, such as
    ``12GiB``. ``slots`` is 2 where blocks are streamed. ``place`` says which blocks stay: ``spaced`` evenly
    over the step, or the ``prefix``. ``mode=allgather`` has every rank hold a shard of each block, gathered
    in ``pieces`` parts; without a mode blocks come from the rank's own memory (``local``), or as is faster
    where the plan is chosen.
    """

    resident: int | None = None
    slots: int | None = None
    mode: str | None = None
    place: str = "spaced"
    pieces: int = 1
    hbm: str | None = None

    name: ClassVar[str] = "dlo"
    tier: ClassVar[Tier] = Tier.EXACT
    requires: ClassVar[tuple[str, ...]] = ("outline",)
    after: ClassVar[tuple[str, ...]] = ("fold-schedule", "fp8", "fuse", "hoist", "sage", "skip", "sp")

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in _MODES:
            raise ValueError(f"mode is {self.mode!r}, and must be one of {', '.join(_MODES)}")
        if self.place not in _PLACES:
            raise ValueError(f"place is {self.place!r}, and must be one of {', '.join(_PLACES)}")
        if self.resident is not None and self.resident < 0:
            raise ValueError(f"resident is {self.resident}, and counts blocks")
        if self.slots is not None and self.slots < 0:
            raise ValueError(f"slots is {self.slots}, and counts places")
        if self.resident is None and (self.slots is not None or self.place != "spaced" or self.pieces != 1):
            raise ValueError("slots, place and pieces belong to a number of resident blocks: add resident=N")
        if self.resident is not None and self.hbm is not None:
            raise ValueError("hbm chooses the number of resident blocks: leave resident or hbm out")
        if self.hbm is not None:
            try:
                parse_bytes(self.hbm)
            except H3CompileError as error:
                raise ValueError(f"hbm: {error}") from error

    def apply(self, program: Program, target: Target) -> Rewrite:
        if self.mode == "allgather" and program.parallel is None:
            raise BuildError("mode=allgather is of several ranks, and there is one", "add sp(ranks=N)")
        if self.resident is None:
            modes = tuple(_MODES.values()) if self.mode is None else (_MODES[self.mode],)
            residency = automatic(program, target, modes, self.hbm)
        else:
            residency = self._asked(streamable(program), self.resident)
        kept = frozenset(residency.resident)
        matches = tuple(Match("resident" if name in kept else "streamed", name) for name in residency.blocks)
        return Rewrite(program.evolve(residency=residency), matches)

    def _asked(self, blocks: tuple[str, ...], resident: int) -> Residency:
        slots = self.slots
        if slots is None:
            slots = SLOTS if resident < len(blocks) else 0
        kept = _PLACES[self.place](blocks, resident)
        return Residency(blocks, kept, slots, _MODES[self.mode or "local"], self.pieces)


def streamable(program: Program) -> tuple[str, ...]:
    """The calls that can be streamed: the repeated ones of the step that have weights, in order."""
    stages = execution_stages(program)
    return repeated(
        (call.region, call.name) for call in program.calls if call.weights and stages[call.name] is Stage.STEP
    )


def automatic(program: Program, target: Target, modes: tuple[Mode, ...], hbm: str | None) -> Residency:
    """The fastest plan for a device that fits its memory, or ``hbm`` of it; with `sp` that of one rank."""
    ranks = program.parallel.ranks if program.parallel is not None else 1
    # What they cost is of no use to a program that says how many blocks stay.
    from h3compile.plan.choose import fastest_residency
    from h3compile.plan.work_of import work_of

    budget = None if hbm is None else parse_bytes(hbm)
    return fastest_residency(work_of(program), target, ranks=ranks, modes=modes, hbm=budget)
