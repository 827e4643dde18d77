"""What a program has to do, region by region, as polynomials in its free lengths: plain data.

`h3compile.plan.work_of` reads it off a traced program, which takes half a minute; the tables of the released
model for the sets of passes that a plan may need are shipped beside this file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from typing import Literal, get_args

from h3compile.errors import H3CompileError, nearest
from h3compile.plan.polynomial import NOTHING, Polynomial

__all__ = [
    "OWN_DENSE",
    "PASS_SETS",
    "RING",
    "CallWork",
    "Kind",
    "Piece",
    "ProgramWork",
    "RegionWork",
    "StageName",
    "own_rings",
    "released",
]

Kind = Literal["gemm", "attention", "rows"]
StageName = Literal["build", "schedule", "request", "step"]

_FORMAT = 1
_FILE = "released.json"

# Name of a shipped table -> the passes it was read off, as `--passes` takes them. The last is Diffusers as it
# is published, every operator a kernel, with AdaLN, the refiner and the rotary tables in every step; the one
# before is the same under torch.compile.
PASS_SETS: Mapping[str, str] = {
    "exact": "-fuse",
    "fuse": "",
    "fp8": "fp8",
    "sage": "sage",
    "skip": "skip",
    "fp8,sage": "fp8,sage",
    "fp8,skip": "fp8,skip",
    "sage,skip": "sage,skip",
    "fp8,sage,skip": "fp8,sage,skip",
    "diffusers-compiled": "-fuse,-fold-schedule,-hoist",
    "diffusers": "-fuse,-fold-schedule,-hoist",
}


RING = "ring_attention.default"
# Architecture -> dense attention that a kernel of ours computes there, where nothing else is asked for;
# elsewhere cuDNN does (`ops/attention.py`).
OWN_DENSE: Mapping[str, tuple[str, ...]] = {"sm_90a": ("attention.default", RING)}


def own_rings(arch: str) -> bool:
    """Whether a kernel of ours computes and merges the turns of a ring on ``arch``."""
    return RING in OWN_DENSE.get(arch, ())


@dataclass(frozen=True)
class Piece:
    """The work of one operator, or of one kernel that computes several.

    ``flop`` in operands of type ``dtype``; ``bytes`` that must be moved, each input read and each output
    written once; ``tile``, FLOP of one tile of outputs, what a multiprocessor computes without a pause
    (none for rows); ``launches``, kernels.
    """

    operator: str
    kind: Kind
    dtype: str
    flop: Polynomial
    bytes: Polynomial
    tile: Polynomial = NOTHING
    launches: int = 1

    @property
    def rate(self) -> str:
        """The rate of a target that it runs at, beside the bandwidth; empty for rows."""
        return "" if self.kind == "rows" else f"{self.kind}.{self.dtype}"


@dataclass(frozen=True)
class RegionWork:
    """One region: its pieces in order, the bytes of one call's weights, the most that lives at once.

    ``peak``: bytes of inputs, outputs and everything between them, tables and weights left out; which of
    the polynomials is the largest depends on the lengths. ``attended``: bytes that dense attention takes
    where a library computes it, beside its result among them. ``exchanged``: what exchanges of ranks hold at
    once, which no plan of values has.
    """

    pieces: tuple[Piece, ...]
    weights: int
    peak: tuple[Polynomial, ...]
    attended: Polynomial = NOTHING
    exchanged: Polynomial = NOTHING

    def by_library(self, arch: str) -> Polynomial:
        """Bytes that libraries allocate on ``arch`` by the default providers: exchanges, dense attention."""
        own = OWN_DENSE.get(arch, ())
        dense = any(piece.kind == "attention" and piece.operator not in own for piece in self.pieces)
        return self.exchanged + self.attended if dense else self.exchanged


@dataclass(frozen=True)
class CallWork:
    """``count`` calls of one region in a row.

    ``held``: bytes of values that live during a call without being its inputs; ``table``: bytes of the
    tables that one call reads, a timestep.
    """

    region: str
    stage: StageName
    count: int
    held: Polynomial
    table: int = 0

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the calls, such as ``block.0``."""
        return tuple(f"{self.region}.{index}" for index in range(self.count))


@dataclass(frozen=True)
class ProgramWork:
    """A program: its regions, variants among them, and its calls in order.

    ``passes`` are as `PASS_SETS` spells them; ``heads`` bounds the degree of sequence parallelism;
    ``attended`` is their width together, in channels, and ``hidden`` that of a row. ``placed``: whoever runs
    it places what a step computes before it runs, and lets go of an input within the last call that reads it.
    """

    passes: str
    heads: int
    attended: int
    hidden: int
    regions: Mapping[str, RegionWork]
    calls: tuple[CallWork, ...]
    placed: bool = True

    def stage(self, *stages: StageName) -> tuple[CallWork, ...]:
        """The calls of ``stages``, in order."""
        return tuple(call for call in self.calls if call.stage in stages)

    def names(self, *stages: StageName) -> tuple[str, ...]:
        """The names of the calls of ``stages``, in order: what a schedule is made from."""
        return tuple(name for call in self.stage(*stages) for name in call.names)

    def call(self, name: str) -> CallWork:
        """The calls that ``name``, such as ``block.7``, is one of; `KeyError` when there is none."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> Mapping[str, CallWork]:
        return {name: call for call in self.calls for name in call.names}

    @property
    def blocks(self) -> tuple[str, ...]:
        """The calls whose weights may be streamed: those of the step's region with the most of them."""
        largest = max(self.stage("step"), key=lambda call: call.count * self.regions[call.region].weights)
        return largest.names

    @property
    def block(self) -> RegionWork:
        """The region that the blocks call."""
        return self.regions[self.call(self.blocks[0]).region]

    @property
    def weights(self) -> dict[str, int]:
        """Bytes of every call's weights, by its name, as they lie on the device."""
        return {name: self.regions[call.region].weights for call in self.calls for name in call.names}

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables for one timestep."""
        return sum(call.table * call.count for call in self.calls)

    def with_blocks(self, count: int) -> ProgramWork:
        """The same model with another number of blocks, and of the calls that fill their tables."""
        region = self.blocks[0].rpartition(".")[0]
        if count < 1:
            raise ValueError(f"a model has blocks, not {count}")
        return replace(
            self,
            calls=tuple(
                replace(call, count=count) if call.region in (region, f"{region}.schedule") else call
                for call in self.calls
            ),
        )

    def in_terms_of(self, shares: Mapping[str, tuple[str, float]]) -> ProgramWork:
        """The same in other lengths: of a rank's in those of the sequence, of which it has ``shares``."""

        def of(piece: Piece) -> Piece:
            flop, moved, tile = (x.in_terms_of(shares) for x in (piece.flop, piece.bytes, piece.tile))
            return replace(piece, flop=flop, bytes=moved, tile=tile)

        regions = {
            name: replace(
                region,
                pieces=tuple(map(of, region.pieces)),
                peak=tuple(peak.in_terms_of(shares) for peak in region.peak),
                attended=region.attended.in_terms_of(shares),
                exchanged=region.exchanged.in_terms_of(shares),
            )
            for name, region in self.regions.items()
        }
        calls = tuple(replace(call, held=call.held.in_terms_of(shares)) for call in self.calls)
        return replace(self, regions=regions, calls=calls)

    def to_json(self) -> dict[str, object]:
        """Plain values that `from_json` reads; polynomials as text."""
        return {
            "passes": self.passes,
            "heads": self.heads,
            "attended": self.attended,
            "hidden": self.hidden,
            "placed": self.placed,
            "calls": [
                [call.region, call.stage, call.count, str(call.held), call.table] for call in self.calls
            ],
            "regions": {
                name: {
                    "weights": region.weights,
                    "peak": [str(peak) for peak in region.peak],
                    "attended": str(region.attended),
                    **({} if region.exchanged == NOTHING else {"exchanged": str(region.exchanged)}),
                    "pieces": [_piece_to_json(piece) for piece in region.pieces],
                }
                for name, region in self.regions.items()
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> ProgramWork:
        """The program that `to_json` wrote. Raises `ValueError` when it is something else."""
        try:
            return _program_from_json(data)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a program's work: {error!r}") from error


def _piece_to_json(piece: Piece) -> list[object]:
    start: list[object] = [piece.operator, piece.kind, piece.dtype]
    return [*start, str(piece.flop), str(piece.bytes), str(piece.tile), piece.launches]


def _program_from_json(data: Mapping[str, object]) -> ProgramWork:
    value: dict = dict(data)  # type: ignore[type-arg]
    regions = {
        name: RegionWork(
            tuple(_piece_from_json(*piece) for piece in region["pieces"]),
            int(region["weights"]),
            tuple(Polynomial.parse(peak) for peak in region["peak"]),
            Polynomial.parse(region["attended"]),
            Polynomial.parse(region.get("exchanged", "0")),
        )
        for name, region in value["regions"].items()
    }
    calls = tuple(_call_from_json(*call) for call in value["calls"])
    if unknown := [call.region for call in calls if call.region not in regions]:
        raise ValueError(f"{unknown[0]} is called and not described")
    widths = value["heads"], value["attended"], value["hidden"]
    return ProgramWork(value["passes"], *widths, regions, calls, value["placed"])


def _piece_from_json(
    operator: str, kind: Kind, dtype: str, flop: str, moved: str, tile: str, launches: int
) -> Piece:
    if kind not in get_args(Kind):
        raise ValueError(f"{kind!r} is no kind of work")
    flops, bytes_, tiles = (Polynomial.parse(text) for text in (flop, moved, tile))
    return Piece(operator, kind, dtype, flops, bytes_, tiles, launches)


def _call_from_json(region: str, stage: StageName, count: int, held: str, table: int) -> CallWork:
    if stage not in get_args(StageName):
        raise ValueError(f"{stage!r} is no stage")
    return CallWork(region, stage, count, Polynomial.parse(held), table)


def released(passes: str = "") -> ProgramWork:
    """The work of the released MiniMax-H3 under ``passes``: a name of `PASS_SETS`, or what `--passes` takes.

    Options of passes, in parentheses, are those of the shipped table, the defaults. `H3CompileError` when
    no table is shipped for this set.
    """
    key = passes if passes in PASS_SETS else _canonical(passes)
    if key not in PASS_SETS:
        raise H3CompileError(
            f"no work table is shipped for the passes {passes!r}",
            nearest(key, PASS_SETS) + "; passes of a plugin can be built, not planned",
        )
    return _shipped(key)


@cache
def _shipped(key: str) -> ProgramWork:
    text = resources.files("h3compile.plan").joinpath(_FILE).read_text(encoding="utf-8")
    data = json.loads(text)
    if data["format"] != _FORMAT:
        raise H3CompileError(f"{_FILE} has format {data['format']}", "install h3compile again")
    return ProgramWork.from_json(data["programs"][key])


# What is always built; naming it changes nothing. `dlo` says where weights live, not what is computed.
_DEFAULT = frozenset(("canonicalize", "outline", "hoist", "fold-schedule", "fuse", "dlo"))
_OPTIONS = re.compile(r"\([^()]*\)")


def _canonical(passes: str) -> str:
    names = {name.strip() for name in _OPTIONS.sub("", passes).split(",")} - {""}
    changed = sorted(names - _DEFAULT)
    if changed == ["-fuse"]:
        return "exact"
    return ",".join(changed) or "fuse"
