"""The manager: orders passes, runs them, and trusts none of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import networkx as nx

from h3compile.errors import BuildError
from h3compile.pipeline.base import Pass, Rewrite, Tier
from h3compile.pipeline.instruments import Instrument
from h3compile.program.printer import count_ops
from h3compile.program.program import Program
from h3compile.program.serialize import region_to_json
from h3compile.program.verifier import VerificationError, verify
from h3compile.targets import Target

__all__ = ["Manager", "PassRun", "in_order", "order"]


@dataclass(frozen=True)
class PassRun:
    """What one pass did: matches by kind, and operators (each region counted once) before and after."""

    name: str
    spelled: str
    tier: Tier
    seconds: float
    matches: dict[str, int]
    ops_before: Counter[str]
    ops_after: Counter[str]
    regions_before: int
    regions_after: int


def order(passes: Sequence[Pass]) -> list[Pass]:
    """The passes in the one order their declarations allow; ties go by name, never by how they were typed.

    Raises `BuildError` when a required pass is missing, two passes conflict, one is there twice, or
    the declarations contradict each other.
    """
    known = {item.name: item for item in passes}
    if len(known) != len(passes):
        twice = next(name for name, n in Counter(p.name for p in passes).items() if n > 1)
        raise BuildError(f"pass {twice!r} is there twice", "name it once")
    # By name, so that errors do not depend on how the passes were typed either.
    for name, item in sorted(known.items()):
        missing = [needed for needed in item.requires if needed not in known]
        if missing:
            raise BuildError(f"pass {name!r} needs {missing[0]!r}", f"add {missing[0]}, or take out {name}")
        excluded = [other for other in item.conflicts if other in known]
        if excluded:
            raise BuildError(
                f"passes {name!r} and {excluded[0]!r} exclude each other", "take one of them out"
            )
    return [known[name] for name in in_order([type(item) for item in passes])]


def in_order(kinds: Sequence[type[Pass]]) -> list[str]:
    """The names of passes, each after those it requires or follows; `BuildError` when that is impossible."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(sorted(kind.name for kind in kinds))
    for kind in sorted(kinds, key=lambda kind: kind.name):
        graph.add_edges_from(
            (before, kind.name) for before in (*kind.requires, *kind.after) if before in graph
        )
    try:
        return list(nx.lexicographical_topological_sort(graph))
    except nx.NetworkXUnfeasible as error:
        cycle = " -> ".join(source for source, _ in nx.find_cycle(graph))
        raise BuildError(
            f"the passes {cycle} each want to run before the next", "take one of them out"
        ) from error


def _content(program: Program) -> tuple[object, ...]:
    """What a pass could edit in place: graphs, and the tables of weights and of variants."""
    graphs = {name: region_to_json(region) for name, region in program.regions.items()}
    return graphs, dict(program.weights), dict(program.variants)


class Manager:
    """Runs passes in order and checks the program after every one of them.

    A pass whose matches differ from what the model's facts predict fails the build, and so does one
    that matched nothing, unless it is named in ``allow_unmatched``.
    """

    def __init__(
        self,
        passes: Sequence[Pass],
        *,
        instruments: Sequence[Instrument] = (),
        allow_unmatched: Collection[str] = (),
    ) -> None:
        self.passes = order(passes)
        self._instruments = instruments
        self._allow_unmatched = frozenset(allow_unmatched)

    def run(self, program: Program, target: Target) -> tuple[Program, tuple[PassRun, ...]]:
        """The program after all passes, verified, and what each of them did.

        Raises `VerificationError` naming the pass that broke the program, `BuildError` when matches are
        not as expected.
        """
        program = verify(program)
        runs: list[PassRun] = []
        for number, item in enumerate(self.passes):
            for instrument in self._instruments:
                instrument.before(number, item, program)
            held = _content(program)
            start = time.perf_counter()
            rewrite = self._apply(item, program, target)
            seconds = time.perf_counter() - start
            if _content(program) != held:
                raise VerificationError(f"pass {item.name!r} edited the program it was given")
            after = self._checked(item, program, rewrite)
            run = PassRun(
                item.name,
                item.spelled(),
                item.tier,
                seconds,
                rewrite.counts(),
                count_ops(program),
                count_ops(after),
                len(program.regions),
                len(after.regions),
            )
            runs.append(run)
            for instrument in self._instruments:
                instrument.after(number, item, after)
            program = after
        return program, tuple(runs)

    def _apply(self, item: Pass, program: Program, target: Target) -> Rewrite:
        try:
            return item.apply(program, target)
        except BuildError as error:
            if error.mend:
                raise
            raise BuildError(f"pass {item.name!r}: {error.cause}", self._without(item)) from error

    def _without(self, item: Pass) -> str:
        """How to build without a pass: those that need it have to go too."""
        gone = [item.name]
        for later in self.passes:
            if any(needed in gone for needed in later.requires):
                gone.append(later.name)
        return f"report this, or build with --passes {','.join(f'-{name}' for name in gone)}"

    def _checked(self, item: Pass, before: Program, rewrite: Rewrite) -> Program:
        level = before.level if item.level is None else item.level
        if rewrite.program.level != level:
            raise VerificationError(
                f"pass {item.name!r} left the program at level {rewrite.program.level.name}, not {level.name}"
            )
        if rewrite.program.facts is not before.facts:
            raise VerificationError(f"pass {item.name!r} changed the facts of the model")
        if rewrite.program.outputs != before.outputs:
            raise VerificationError(f"pass {item.name!r} changed which values the program returns")
        try:
            after = verify(rewrite.program)
        except VerificationError as error:
            raise VerificationError(f"pass {item.name!r} broke the program ({error.cause})") from error
        for value in before.outputs:
            was, now = before.port_of(value), after.port_of(value)
            if (was.dtype, was.shape) != (now.dtype, now.shape):
                raise VerificationError(f"pass {item.name!r} changed output {value} from {was} to {now}")
        counts = rewrite.counts()
        for kind, expected in item.expects(before.facts).items():
            if counts.get(kind, 0) != expected:
                raise BuildError(
                    f"pass {item.name!r} matched {counts.get(kind, 0)} {kind}, this model has {expected}",
                    self._without(item),
                )
        if not counts and item.name not in self._allow_unmatched:
            raise BuildError(
                f"pass {item.name!r} matched nothing",
                f"take it out, or allow it with --allow {item.name}",
            )
        return after
