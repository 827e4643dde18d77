"""Modulation tables: schedule-stage values by the exact bits of t."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from h3compile.engine.manifest import PortRecord
from h3compile.errors import EngineError, H3CompileError
from h3compile.program.serialize import parse_dtype
from h3compile.runtime.fold import ScheduleCall, fold
from h3compile.runtime.groups import TableGroup
from h3compile.runtime.memory import gib, nbytes
from h3compile.runtime.pinned import HostBuffer, HostMemory
from h3compile.runtime.runner import Check
from h3compile.runtime.stats import Stats
from h3compile.runtime.timesteps import to_bits

__all__ = ["MANY_TIMESTEPS", "TABLE_BYTES", "ModulationTables", "RowStream"]

# Distinct timesteps in one forward beyond which tables are evaluated block by block and not kept. A
# request has 1 to 4; only a mask that gives rows their own t has more, and then up to every row. At
# 16 the tables of 50 real blocks take 155 MB; at 37,760 they would take 365 GB.
MANY_TIMESTEPS = 16

# What timesteps evaluated after the build may occupy: 110 of them at real size, so any 50-step request.
TABLE_BYTES = 1 << 30

_MEND = "rebuild the engine"


@dataclass(frozen=True)
class _Entry:
    """One timestep's rows: for each group of equally shaped values one [count, g, ...] tensor."""

    values: tuple[torch.Tensor, ...]
    buffers: tuple[HostBuffer, ...]  # what values on the host lie in


class ModulationTables:
    """The rows of every table value, for timesteps folded at build and for those seen since.

    ``calls`` are all schedule-stage calls, ``timestep`` the port of the input that carries t. ``cold``
    opens access to the calls' weights by call name. ``folded`` is what the engine holds: bit patterns
    and, call by call, tables [T, g, ...]; folded rows stay. Rows evaluated later are kept while they fit
    into ``budget`` bytes, the least recently used leaving first. Groups on the host lie in ``host``.
    """

    def __init__(
        self,
        calls: Sequence[ScheduleCall],
        timestep: PortRecord,
        groups: Sequence[TableGroup],
        *,
        cold: Callable[[], AbstractContextManager[Callable[[str], Sequence[torch.Tensor]]]],
        device: torch.device,
        stats: Stats,
        folded: tuple[Sequence[int], Iterable[tuple[str, Mapping[str, torch.Tensor]]]] = ((), ()),
        budget: int = TABLE_BYTES,
        host: HostMemory | None = None,
    ) -> None:
        self._calls = tuple(calls)
        self._timestep = timestep
        self._groups = tuple(groups)
        self._places = {
            name: (group, place)
            for group, record in enumerate(groups)
            for place, name in enumerate(record.names)
        }
        self._cold = cold
        self._device = device
        self._stats = stats
        self._budget = budget
        self._host = host
        self._entry_bytes = sum(group.nbytes for group in groups)
        self._host_entry_bytes = sum(group.nbytes for group in groups if group.on_host)
        self._folded = self._absorb(*folded) if folded[0] else {}
        self._kept: OrderedDict[int, _Entry] = OrderedDict()
        self._last: tuple[tuple[int, ...], dict[str, torch.Tensor]] = ((), {})

    @property
    def nbytes(self) -> int:
        """Bytes of all rows held on the device, the last step's assembled tables included."""
        entries = len(self._folded) + len(self._kept)
        keys, rows = self._last
        # Of one timestep, what lies on the device already is its entry.
        assembled = [row for name, row in rows.items() if len(keys) > 1 or self._on_host(name)]
        return entries * (self._entry_bytes - self._host_entry_bytes) + nbytes(*assembled)

    @property
    def host_nbytes(self) -> int:
        """Bytes of all rows held on the host."""
        return (len(self._folded) + len(self._kept)) * self._host_entry_bytes

    def select(self, timesteps: Sequence[float], check: Check) -> Mapping[str, torch.Tensor] | RowStream:
        """Every table value for one forward, by name: `rows`, or `stream` beyond `MANY_TIMESTEPS`."""
        if len(timesteps) > MANY_TIMESTEPS:
            return self.stream(timesteps, check)
        return self.rows(timesteps, check)

    def rows(self, timesteps: Sequence[float], check: Check = lambda: None) -> dict[str, torch.Tensor]:
        """Every table value [M * g, ...], contiguous, for these M timesteps in this order.

        Timesteps never seen are evaluated together, one pass over the cold weights, and kept.
        """
        keys = to_bits(timesteps)
        missing = self._missing(keys)
        self._stats.table_misses += len(missing)
        self._stats.table_hits += len(set(keys)) - len(missing)
        if keys == self._last[0]:
            return self._last[1]
        self._last = ((), {})  # first, so that two steps' tables never exist together
        self._evaluate(missing, check)
        entries = [self._entry(key) for key in keys]
        assembled = [
            self._assemble([self._on_device(entry.values[i]) for entry in entries])
            for i in range(len(self._groups))
        ]
        rows = {name: assembled[group][place] for name, (group, place) in self._places.items()}
        self._last = (keys, rows)
        self._evict(keep=keys)
        return rows

    def stream(self, timesteps: Sequence[float], check: Check = lambda: None) -> RowStream:
        """The table values for many timesteps, call by call as they are asked for; nothing is kept."""
        keys = to_bits(timesteps)
        distinct = list(dict.fromkeys(keys))
        order: torch.Tensor | None = None
        if len(distinct) < len(keys):
            places = {key: place for place, key in enumerate(distinct)}
            order = torch.tensor([places[key] for key in keys], device=self._device)
        self._stats.table_misses += len(distinct)
        return RowStream(self._fold(distinct, check), order)

    def prepare(self, timesteps: Sequence[float], check: Check = lambda: None) -> None:
        """Evaluates those of ``timesteps`` never seen, in one pass over the cold weights, and keeps them.

        Raises `H3CompileError` when they do not fit into the budget.
        """
        missing = self._missing(to_bits(timesteps))
        need = len(missing) * self._entry_bytes
        if need > self._budget:
            raise H3CompileError(
                f"tables of {len(missing)} new timesteps take {gib(need)}, the budget is {gib(self._budget)}",
                "prepare fewer, or load the engine with a larger table_bytes",
            )
        self._stats.table_misses += len(missing)
        self._evaluate(missing, check)
        self._evict(keep=to_bits(timesteps))

    def release(self) -> None:
        """Frees the last step's assembled tables; the rows of every timestep stay."""
        self._last = ((), {})

    def _missing(self, keys: Sequence[int]) -> list[int]:
        distinct = dict.fromkeys(keys)
        return [key for key in distinct if key not in self._folded and key not in self._kept]

    def _entry(self, key: int) -> _Entry:
        if key in self._folded:
            return self._folded[key]
        self._kept.move_to_end(key)
        return self._kept[key]

    def _evaluate(self, keys: Sequence[int], check: Check) -> None:
        if keys:
            self._kept.update(self._absorb(keys, self._fold(keys, check)))

    def _fold(self, keys: Sequence[int], check: Check) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        with self._cold() as weights:
            yield from fold(
                self._calls,
                keys,
                timestep=self._timestep.name,
                dtype=parse_dtype(self._timestep.dtype),
                tables=self._places.keys(),
                weights=weights,
                device=self._device,
                check=check,
            )

    def _absorb(
        self, keys: Sequence[int], calls: Iterable[tuple[str, Mapping[str, torch.Tensor]]]
    ) -> dict[int, _Entry]:
        """An entry for every key, filled from tables whose leading dimension runs over ``keys``.

        Every entry has memory of its own, so that evicting one frees it.
        """
        entries = [self._empty() for _ in keys]
        absent = set(self._places)
        for call, tables in calls:
            for name, table in tables.items():
                group, place = self._places.get(name, (-1, -1))
                if group < 0 or tuple(table.shape) != (len(keys), *self._groups[group].shape):
                    raise EngineError(f"table {name} of {call} does not fit the program", _MEND)
                home = "cpu" if self._groups[group].on_host else self._device
                for entry, row in zip(entries, table.to(home).unbind(), strict=True):
                    entry.values[group][place].copy_(row)
                absent.discard(name)
        if absent:
            raise EngineError(f"the tables of {', '.join(sorted(absent)[:3])} are missing", _MEND)
        return dict(zip(keys, entries, strict=True))

    def _empty(self) -> _Entry:
        """An entry to be filled."""
        values: list[torch.Tensor] = []
        buffers: list[HostBuffer] = []
        for group in self._groups:
            shape = (len(group.names), *group.shape)
            if not group.on_host:
                values.append(torch.empty(shape, dtype=group.dtype, device=self._device))
                continue
            assert self._host is not None, "groups on the host need host memory"
            buffers.append(self._host.take(group.nbytes))
            values.append(buffers[-1].data.view(group.dtype).view(shape))
        return _Entry(tuple(values), tuple(buffers))

    def _on_host(self, name: str) -> bool:
        return self._groups[self._places[name][0]].on_host

    def _on_device(self, value: torch.Tensor) -> torch.Tensor:
        # From pinned memory the host does not wait; from pageable memory it does.
        return value.to(self._device, non_blocking=True)

    def _assemble(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[count, g, ...] of M timesteps as one [count, M * g, ...]: a single kernel, or none for M = 1."""
        if len(parts) == 1:
            return parts[0]
        return torch.stack(list(parts), dim=1).flatten(1, 2)

    def _evict(self, keep: Sequence[int]) -> None:
        surplus = len(self._kept) * self._entry_bytes - self._budget
        for key in list(self._kept):
            if surplus <= 0:
                return
            if key not in keep:
                del self._kept[key]
                surplus -= self._entry_bytes


class RowStream:
    """Table values produced in the order of the program's calls, each handed out once.

    At any time the values of one call exist, and those produced before they were asked for.
    """

    def __init__(
        self, calls: Iterator[tuple[str, dict[str, torch.Tensor]]], order: torch.Tensor | None
    ) -> None:
        self._calls = calls
        self._order = order  # row of the distinct timesteps for every timestep; None: they are the same
        self._ready: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        """The value [M * g, ...], contiguous; `KeyError` when it is no table or was handed out."""
        while name not in self._ready:
            _, values = next(self._calls, ("", {}))
            if not values:
                raise KeyError(name)
            self._ready.update(values)
        table = self._ready.pop(name)
        if self._order is not None:
            table = table.index_select(0, self._order)
        return table.flatten(0, 1)
