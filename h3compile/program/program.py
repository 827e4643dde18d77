"""The program: what is compiled."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from h3compile.program.conditions import Variant
from h3compile.program.facts import Dim, ModelFacts
from h3compile.program.parallel import Parallel
from h3compile.program.region import Port, Region
from h3compile.program.residency import Residency
from h3compile.program.stages import Stage
from h3compile.program.weights import Weight

__all__ = ["Call", "Level", "Program"]


class Level(enum.IntEnum):
    """How far a program has come; each level has its own list of legal operators."""

    TRACED = 0  # one region, straight from torch.export
    CANONICAL = 1  # one region, nothing in it that computes nothing
    OUTLINED = 2  # repeated blocks are one region each


@dataclass(frozen=True)
class Call:
    """One execution of a region: which values go in, with which weights, and what they are called after.

    ``inputs``, ``weights`` and ``outputs`` are names of program values and of entries of the weight
    table, in the order of the region's ports. ``index`` counts the calls of one region from 0.
    """

    region: str
    index: int
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def name(self) -> str:
        """``region.index``, unique in a program."""
        return f"{self.region}.{self.index}"


@dataclass(frozen=True)
class Program:
    """Regions, the calls that execute them in order, and a table of lazy weights.

    Values are single-assignment: a program input, or an output of exactly one earlier call. ``tables``
    names the values folded into tables: each has one row (or equal group of rows) per timestep.

    ``variants`` names, by region, what may stand in for it: the first whose condition holds serves all calls
    of the region in that step. A variant has the ports of the region it stands in for, so weights, tables
    and layouts are shared; it has no calls and no variants of its own. ``measures`` names values that no
    call reads and a runner keeps for reports: int32 [2], the tiles that a call skipped and considered.

    ``residency`` says where the weights of the repeated step calls live; None: all stay on the device.
    ``parallel`` says how ranks share the rows; None: one rank has them all. Every rank is given all inputs of
    the model and returns all its outputs.
    """

    facts: ModelFacts
    regions: Mapping[str, Region]
    calls: tuple[Call, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, Weight]
    level: Level = Level.TRACED
    tables: tuple[str, ...] = field(default=())
    variants: Mapping[str, tuple[Variant, ...]] = field(default_factory=dict)
    measures: tuple[str, ...] = field(default=())
    residency: Residency | None = None
    parallel: Parallel | None = None

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The free lengths: the model's, then those of a rank."""
        return self.facts.dims + (self.parallel.dims(self.facts.dims) if self.parallel else ())

    @property
    def inputs(self) -> tuple[Port, ...]:
        """The model's tensor inputs, in declared order, then where the rows of a rank are among them."""
        declared = tuple(Port(fact.name, fact.dtype, fact.shape) for fact in self.facts.inputs)
        return declared + (self.parallel.ports if self.parallel else ())

    @property
    def input_stages(self) -> dict[str, Stage]:
        """The stage of every input: as the facts declare it; where rows are is known with the request."""
        stages = {fact.name: fact.stage for fact in self.facts.inputs}
        return stages | {port.name: Stage.REQUEST for port in (self.parallel.ports if self.parallel else ())}

    def calls_of(self, region: str) -> tuple[Call, ...]:
        """The calls of one region, in order."""
        return tuple(call for call in self.calls if call.region == region)

    def forms_of(self, region: str) -> tuple[str, ...]:
        """The regions that may serve the calls of ``region``: itself, then its variants in order."""
        forms = (region, *(variant.region for variant in self.variants.get(region, ())))
        return tuple(dict.fromkeys(forms))  # one may stand in under several conditions

    def base_of(self, region: str) -> str:
        """The region whose calls ``region`` may serve: the one it is a variant of, or itself."""
        return next((base for base in self.variants if region in self.forms_of(base)), region)

    def port_of(self, value: str) -> Port:
        """The port that defines ``value``: a program input or the output of a call."""
        for port in self.inputs:
            if port.name == value:
                return port
        for call in self.calls:
            if value in call.outputs:
                return self.regions[call.region].outputs[call.outputs.index(value)]
        raise KeyError(value)

    def evolve(self, **changes: object) -> Program:
        """A copy with some fields replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]
