"""`sp`: sequence parallelism, as a rewrite: ranks share the rows, and in attention the heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import h3compile.ops  # noqa: F401  registers what the rewrites call
from h3compile.errors import BuildError
from h3compile.passes.rewrites.ranks_attention import heads_of, share_attention
from h3compile.passes.rewrites.ranks_boundary import gather_outputs, kinds_of, select_rows
from h3compile.pipeline.base import Match, Pass, Rewrite, Tier
from h3compile.program.analysis import execution_stages
from h3compile.program.edit import Editor
from h3compile.program.parallel import Exchange, Parallel
from h3compile.program.program import Call, Program
from h3compile.program.region import Region
from h3compile.program.stages import Stage
from h3compile.targets import Target

__all__ = ["SequenceParallel"]

_ROWS = "rows"
_EXCHANGES: Mapping[str, Exchange] = {"plain": "plain", "fp8": "fp8"}


@dataclass(frozen=True)
class SequenceParallel(Pass):
    """Share the rows of a sequence among ranks; in attention ``ulysses`` of them share the heads.

    Around attention they exchange rows for heads; with ``ring``, keys go round that many stretches of the
    sequence. ``ranks`` alone has as many share heads as their number allows, the rest in a ring; ``auto``, as
    no option, takes as many ranks as the build has GPUs. Each rank packs its own rows, and what the output
    heads give is gathered; weights, text and tables are every rank's.
    ``exchange=fp8`` sends what goes from rows to heads and back in E4M3, and is lossy.
    """

    ulysses: int | None = None
    ring: int | None = None
    ranks: int | None = None
    exchange: str = "plain"
    auto: bool = False

    name: ClassVar[str] = "sp"
    tier: ClassVar[Tier] = Tier.ROUNDING
    requires: ClassVar[tuple[str, ...]] = ("hoist", "outline")
    after: ClassVar[tuple[str, ...]] = ("fold-schedule", "fp8", "fuse", "hoist", "sage", "skip")

    def __post_init__(self) -> None:
        for option in ("ulysses", "ring", "ranks"):
            value = getattr(self, option)
            if value == 1:
                raise ValueError(f"{option} is 1, and one rank has nobody to share with")
            if value is not None and value < 1:
                raise ValueError(f"{option} is {value}, and counts ranks: 2 or more")
        if self.ranks is not None and (self.ulysses is not None or self.ring is not None):
            raise ValueError("ranks counts them, ulysses and ring say how they share: give one or the other")
        if self.auto and self.told is not None:
            raise ValueError("auto takes as many ranks as there are GPUs: leave it, or their number, out")
        if self.exchange not in _EXCHANGES:
            raise ValueError(f"exchange is {self.exchange!r}, and must be one of {', '.join(_EXCHANGES)}")
        if self.exchange == "fp8":
            if self.ring is not None:
                raise ValueError("exchange=fp8 is of heads, and a ring sends keys and values as they are")
            object.__setattr__(self, "tier", Tier.LOSSY)  # of this one

    @property
    def told(self) -> int | None:
        """How many ranks the options say there are; None where they say nothing."""
        if self.ranks is None and self.ulysses is None and self.ring is None:
            return None
        return self.ranks or (self.ulysses or 1) * (self.ring or 1)

    def for_gpus(self, count: int) -> SequenceParallel:
        """The same among ``count`` GPUs. Raises `BuildError` where it was told another number of ranks."""
        if self.told is None and count > 1:
            return replace(self, ranks=count, auto=False)
        if self.told is None:
            raise BuildError("sp shares rows among GPUs, and there is one", "say how many: sp(ranks=N)")
        if self.told != count:
            raise BuildError(
                f"sp is for {self.told} ranks, and the build for {count} {'GPU' if count == 1 else 'GPUs'}",
                "leave one of them out",
            )
        return self

    def apply(self, program: Program, target: Target) -> Rewrite:
        return _Sharing(program, self._degrees(program)).run()

    def _degrees(self, program: Program) -> Parallel:
        exchange = _EXCHANGES[self.exchange]
        if self.ulysses is not None or self.ring is not None:
            return Parallel(self.ulysses or 1, self.ring or 1, exchange, _ROWS)
        if self.ranks is None:
            raise BuildError("sp does not know how many ranks there are", "say how many: sp(ranks=N)")
        stages = execution_stages(program)
        regions = (program.regions[call.region] for call in program.calls if stages[call.name] is Stage.STEP)
        heads = next((count for region in regions if (count := heads_of(region)) is not None), 1)
        ulysses = math.gcd(heads, self.ranks)
        if self.exchange == "fp8" and ulysses < self.ranks:
            raise BuildError(
                f"{self.ranks} ranks cannot share {heads} heads, and a ring sends keys as they are",
                "leave out exchange=fp8, or take a number of ranks that divides the heads",
            )
        return Parallel(ulysses, self.ranks // ulysses, exchange, _ROWS)


@dataclass(frozen=True)
class _Shared:
    """A region for the rows of one rank, still to be finished, and what was found in it."""

    edit: Editor
    found: tuple[tuple[str, str], ...]

    @property
    def unread(self) -> set[str]:
        """The inputs that nothing reads."""
        return {port.name for port in self.edit.inputs if not self.edit.node_of(port).users}


class _Sharing:
    """One application: the calls of the step in order, and which values hold a rank's rows so far."""

    def __init__(self, program: Program, parallel: Parallel) -> None:
        self.program = program
        stages = execution_stages(program)
        self.calls = [call for call in program.calls if stages[call.name] is Stage.STEP]
        kinds = dict.fromkeys(
            kind
            for call in self.calls
            for kind in kinds_of(program, program.regions[call.region], call.inputs)
        )
        self.parallel = replace(parallel, kinds=tuple(kinds))
        self.local: set[str] = set()

    def run(self) -> Rewrite:
        regions = dict(self.program.regions)
        calls = {call.name: call for call in self.program.calls}
        found: dict[str, tuple[tuple[str, str], ...]] = {}
        matches: list[Match] = []
        for call in self.calls:
            if call.region not in found:
                forms = {
                    form: self._shared(call, self.program.regions[form])
                    for form in self.program.forms_of(call.region)
                }
                found[call.region] = forms[call.region].found
                # All forms of a region take the same inputs: what one of them reads, each is given.
                unread = set.intersection(*(shared.unread for shared in forms.values()))
                for form, shared in forms.items():
                    shared.edit.drop_inputs(unread)
                    regions[form] = shared.edit.finish()
            given = dict(zip(_names(self.program.regions[call.region]), call.inputs, strict=True))
            inputs = tuple(given.get(port, port) for port in _names(regions[call.region]))
            calls[call.name] = replace(call, inputs=inputs)
            matches += [Match(kind, f"{call.name}/{at}") for kind, at in found[call.region]]
            self.local |= self._rows_of(call)
        program = self.program.evolve(regions=regions, calls=tuple(calls.values()), parallel=self.parallel)
        return Rewrite(program, tuple(matches))

    def _rows_of(self, call: Call) -> set[str]:
        """The values of ``call`` with a row for each of the sequence's, or from now on of the rank's."""
        ports = self.program.regions[call.region].outputs
        rows = self.parallel.rows
        return {value for value, port in zip(call.outputs, ports, strict=True) if rows in port.shape}

    def _shared(self, call: Call, region: Region) -> _Shared:
        """One form of the region that ``call`` calls, for the rows of one rank."""
        edit = Editor(region)
        values = dict(zip(_names(region), call.inputs, strict=True))
        attentions, whole = share_attention(edit, self.parallel)
        packed = select_rows(edit, values, self.parallel, local=self.local, whole=whole)
        gathered = gather_outputs(edit, values, self.parallel)
        edit.sweep()
        found = [
            (kind, node.name)
            for kind, nodes in (("attention", attentions), ("packed", packed), ("gathered", gathered))
            for node in nodes
        ]
        return _Shared(edit, tuple(found))


def _names(region: Region) -> list[str]:
    return [port.name for port in region.inputs]
