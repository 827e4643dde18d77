"""Reads off a program what it has to do: its regions by `kernels.py`, its calls, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

import sympy  # type: ignore[import-untyped]

from h3compile.plan.kernels import polynomial_of, region_peak, region_work
from h3compile.plan.polynomial import Polynomial, total, undominated
from h3compile.plan.work import CallWork, ProgramWork
from h3compile.program.analysis import execution_stages
from h3compile.program.program import Call, Program
from h3compile.program.stages import Stage

__all__ = ["activations_of", "work_of"]


def work_of(program: Program, passes: str = "", *, fused: bool = True, placed: bool = True) -> ProgramWork:
    """The work of an outlined ``program``; ``passes`` is how it is named.

    The number of calls is that of the program: `ProgramWork.with_blocks` has others. Where ranks share a
    sequence it is the work of one, in the lengths of the sequence; what they exchange counts as bytes moved
    in memory, not as time on a link. ``placed`` is that of `ProgramWork`.
    """
    config = program.facts.config
    heads, width, hidden = (
        config[name] for name in ("num_attention_heads", "attention_head_dim", "hidden_size")
    )
    assert isinstance(heads, int) and isinstance(width, int) and isinstance(hidden, int)
    values = _Values(program)
    regions = {
        name: region_work(
            region,
            program.dims,
            tables=values.ports(name, values.is_table),
            consumed=values.ports(name, values.ends) if placed else frozenset(),
            fused=fused,
        )
        for name, region in program.regions.items()
    }
    work = ProgramWork(passes, heads, heads * width, hidden, regions, tuple(_calls(program, values)), placed)
    return work if program.parallel is None else work.in_terms_of(program.parallel.shares)


def activations_of(
    program: Program, *, own: Container[str] = (), fused: bool = True, placed: bool = True
) -> tuple[Polynomial, ...]:
    """Bytes that live at once in a forward of an outlined ``program``: the largest of these.

    By liveness, in its free lengths; weights and tables are left out. Of several ranks, those of one.
    ``placed`` is that of `ProgramWork`; then what dense attention returns lies beside the rest, but of the
    operators ``own``, which kernels of ours compute.
    """
    stages, values = execution_stages(program), _Values(program)
    peaks: dict[str, tuple[Polynomial, ...]] = {}
    found = []
    for call in program.calls:
        if stages[call.name] not in (Stage.REQUEST, Stage.STEP):
            continue
        held = values.held(call, stages[call.name].value)
        for name in program.forms_of(call.region):
            if name not in peaks:
                peaks[name] = region_peak(
                    program.regions[name],
                    program.dims,
                    tables=values.ports(name, values.is_table),
                    consumed=values.ports(name, values.ends) if placed else frozenset(),
                    fused=fused,
                    own=own if placed else None,
                )
            found += [held + peak for peak in peaks[name]]
    return undominated(found)


def _calls(program: Program, values: _Values) -> Iterator[CallWork]:
    stages = execution_stages(program)
    run: list[Call] = []
    for call in (*program.calls, None):
        if run and (call is None or call.region != run[0].region):
            held = [values.held(one, stages[one.name].value) for one in run]
            yield CallWork(
                run[0].region,
                stages[run[0].name].value,
                len(run),
                max(held, key=lambda polynomial: polynomial.at(values.hints)),
                values.tables(run[0]),
            )
            run = []
        if call is not None:
            run.append(call)


class _Values:
    """How long the values of a program live, and their bytes."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.hints = {dim.name: dim.hint for dim in program.dims}
        self._given = [port.name for port in program.inputs]
        self._tables = frozenset(program.tables)
        stages = execution_stages(program)
        self._at = {call.name: place for place, call in enumerate(program.calls)}
        self._born = {value: self._at[call.name] for call in program.calls for value in call.outputs}
        self._stage = {value: stages[call.name].value for call in program.calls for value in call.outputs}
        self._last = dict.fromkeys(program.outputs, len(program.calls))
        self._kept: set[str] = set()  # of a request, read by every step
        for place, call in enumerate(program.calls):
            for value in call.inputs:
                self._last[value] = max(place, self._last.get(value, 0))
                if self._stage.get(value) == "request" and stages[call.name].value == "step":
                    self._kept.add(value)

    def held(self, call: Call, stage: str) -> Polynomial:
        """Bytes of what lives during ``call`` without going in: the caller's tensors are there always."""
        here = self._at[call.name]
        alive = [*self._given, *(v for v, born in self._born.items() if born < here <= self._last.get(v, -1))]
        if stage == "step":
            alive += self._kept
        inside = self._tables.union(call.inputs)
        return total(self._bytes(value) for value in dict.fromkeys(alive) if value not in inside)

    def ports(self, region: str, holds: Callable[[str, Call], bool]) -> frozenset[str]:
        """The inputs of ``region`` of which something ``holds`` in all of its calls, by their names there."""
        calls = self._program.calls_of(self._program.base_of(region))
        names = [port.name for port in self._program.regions[region].inputs]
        return frozenset(
            name
            for place, name in enumerate(names)
            if calls and all(holds(call.inputs[place], call) for call in calls)
        )

    def is_table(self, value: str, call: Call) -> bool:
        """Whether ``value`` is one, for whichever ``call``."""
        return value in self._tables

    def ends(self, value: str, call: Call) -> bool:
        """Whether ``value``, an input of ``call``, is a call's result that is read there the last time."""
        made = value in self._born and value not in self._kept and not self.is_table(value, call)
        return made and self._last[value] == self._at[call.name] and call.inputs.count(value) == 1

    def tables(self, call: Call) -> int:
        """Bytes a timestep of the tables that ``call`` reads."""
        read = [value for value in call.inputs if self.is_table(value, call)]
        one = dict.fromkeys(self.hints, 1)
        return int(sum(self._bytes(value).at(one) for value in read))

    def _bytes(self, value: str) -> Polynomial:
        port = self._program.port_of(value)
        names = {name: sympy.Symbol(name) for name in self.hints}
        size = sympy.Integer(port.dtype.itemsize)
        for dim in port.shape:
            size *= sympy.sympify(dim, locals=names) if isinstance(dim, str) else dim
        return polynomial_of(size, {symbol: name for name, symbol in names.items()})
