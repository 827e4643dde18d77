"""Puts a loaded engine together: weights into places, executors behind calls, tables and memo between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from h3compile.engine.loader import EngineFolder
from h3compile.engine.manifest import CallRecord
from h3compile.errors import EngineError, H3CompileError
from h3compile.plan.schedule import Schedule
from h3compile.program.residency import Residency
from h3compile.program.serialize import parse_dtype
from h3compile.runtime.activations import Activations
from h3compile.runtime.arena import StepMemory
from h3compile.runtime.executors import Executor, executor_for
from h3compile.runtime.fold import ScheduleCall
from h3compile.runtime.groups import TableGroup, group_tables
from h3compile.runtime.inputs import Inputs
from h3compile.runtime.lanes import lanes_for
from h3compile.runtime.link import LinkedProgram, call_name, link
from h3compile.runtime.measures import Measures
from h3compile.runtime.memory import free_bytes, gib, without_memory
from h3compile.runtime.parts import Parts
from h3compile.runtime.pinned import HostMemory
from h3compile.runtime.places import Places
from h3compile.runtime.pool import Pool
from h3compile.runtime.ranks import Ranks
from h3compile.runtime.reader import HostRange, Reader, Wanted
from h3compile.runtime.request import RequestMemo
from h3compile.runtime.runner import BoundCall, Runner, bound
from h3compile.runtime.sharding import WHOLE, Sharding
from h3compile.runtime.stats import Stats
from h3compile.runtime.streamer import Gathering, Streamer
from h3compile.runtime.tables import ModulationTables
from h3compile.runtime.weights import Weights, range_key, views

__all__ = ["assemble"]


def assemble(
    folder: EngineFolder,
    partition: str,
    device: torch.device,
    pool: Pool,
    table_bytes: int,
    *,
    residency: Residency | None = None,
    host: HostMemory | None = None,
    ranks: Ranks | None = None,
    activations: Activations | None = None,
) -> Parts:
    """The parts of a module that runs ``partition`` of an engine on ``device``.

    ``residency`` says which blocks stay there; None: all, and they are there on return. What is streamed
    lies in ``host``. ``activations`` are those of the largest forward that is to come. Raises `EngineError`
    when the engine's records do not fit each other, and `H3CompileError` when a GPU or the host lacks the
    memory, before any of it is allocated.
    """
    program = link(folder.manifest)
    sizes = {name: found.nbytes for name, found in folder.manifest.partitions[partition].ranges.items()}
    rank, count = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    places = Places.of(program, sizes, residency, rank, count)
    groups: tuple[TableGroup, ...] = ()
    if program.timestep is not None:
        groups = group_tables(program.tables, str(program.timestep.shape[0]), places.host_tables(program))
    site = _Site(folder, partition, device, pool, program, groups, places, host or HostMemory(device), ranks)
    site.require_ranges()
    site.require_host_memory(table_bytes)
    free = free_bytes(device)
    if free is not None:
        site.require_memory(free, activations)
    return site.build(table_bytes)


@dataclass(frozen=True)
class _Site:
    folder: EngineFolder
    partition: str
    device: torch.device
    pool: Pool
    program: LinkedProgram
    groups: tuple[TableGroup, ...]
    places: Places
    host: HostMemory
    ranks: Ranks | None

    @property
    def cold(self) -> dict[str, str]:
        """Schedule call -> its range, for those that have one."""
        return {call_name(call): call.range for call in self.program.schedule if call.range is not None}

    def require_ranges(self) -> None:
        """Every call must find weights of the shapes its region takes."""
        ranges = self.folder.manifest.partitions[self.partition].ranges
        for call in (*self.program.schedule, *self.program.request, *self.program.step):
            ports = self.program.regions[call.region].weights
            slots = ranges[call.range].slots if call.range in ranges else ()
            if [(slot.shape, slot.dtype) for slot in slots] != [(port.shape, port.dtype) for port in ports]:
                raise EngineError(
                    f"the weights of {call_name(call)} in {self.partition} do not fit its region",
                    "rebuild the engine",
                )

    def require_memory(self, free: int, activations: Activations | None) -> None:
        """What will be allocated against the ``free`` bytes of the GPU, before anything is allocated."""
        places, sizes = self.places, self.places.sizes
        keys = {self._device_key(name): sizes[name] for name in places.always}
        keys |= {
            self._device_key(name, places.sharding): places.sharding.gathered(sizes[name])
            for name in places.residents.values()
        }
        weights = sum(size for key, size in keys.items() if not self.pool.holds(key))
        slots = places.residency.slots * places.slot_bytes + places.residency.areas * places.area_bytes
        cold = max((sizes[name] for name in self.cold.values()), default=0)
        tables = self._folded * sum(group.nbytes for group in self.groups if not group.on_host)
        # Cold weights pass through before the first call of a forward: what is alive is the larger of both.
        forward = 0 if activations is None else activations.nbytes
        kinds = {"weights": weights, "slots": slots, "tables": tables}
        if activations is not None:
            kinds[f"activations in a forward of {activations.rows:,} rows"] = forward
        kinds["cold weights in passing"] = max(0, cold - forward)
        need = sum(kinds.values())
        if need <= free:
            return
        parts = ", ".join(f"{gib(size)} of {kind}" for kind, size in kinds.items() if size)
        smaller = "ask for a smaller or shorter clip, " if forward else ""
        raise H3CompileError(
            f"the engine needs {gib(need)} ({parts}) on {self.device}, which has {gib(free)} free",
            f"free it, take a larger device, {smaller}or keep fewer blocks on it: load(path, resident=N)",
        )

    def require_host_memory(self, table_bytes: int) -> None:
        """What streamed weights and their tables will take of the host, before anything is allocated."""
        places = self.places
        held = places.sharding.held
        keys = {self._host_key(name): held(places.sizes[name]) for name in places.on_host}
        need = sum(size for key, size in keys.items() if not self.pool.holds(key)) + places.staging_bytes
        whole = sum(group.nbytes for group in self.groups)
        entry = sum(group.nbytes for group in self.groups if group.on_host)
        if entry:  # those folded, and as many seen later as may be kept
            need += (self._folded + table_bytes // whole) * entry
        self.host.require(need)

    @property
    def _folded(self) -> int:
        record = self.folder.manifest.partitions[self.partition].tables
        return 0 if record is None else len(record.timesteps)

    def _device_key(self, name: str, sharding: Sharding = WHOLE) -> tuple[str, ...]:
        return range_key(self.folder, self.partition, name, f"{self.device}{sharding.name}")

    def _host_key(self, name: str) -> tuple[str, ...]:
        kind = "pinned" if self.host.pinned else "pageable"
        return range_key(self.folder, self.partition, name, f"host {kind}{self.places.sharding.name}")

    def build(self, table_bytes: int) -> Parts:
        manifest, program, places, stats = self.folder.manifest, self.program, self.places, Stats()
        weights = Weights(
            self.folder,
            self.partition,
            self.device,
            self.pool,
            places.always,
            later=tuple(places.residents.values()),
            sharding=places.sharding,
        )
        # What is small, or must be looked at on the host, is kept to tell whether it changed.
        # Where a rank's rows are follows from the layout, which every rank is given.
        own = () if self.ranks is None else self.ranks.parallel.ports
        ports = tuple(p for p in manifest.inputs if p.name not in {port.name for port in own})
        kept = [
            port.name
            for port in ports
            if manifest.input_stages[port.name] != "step" or not parse_dtype(port.dtype).is_floating_point
        ]
        request = [self._bind(call, weights) for call in program.request]
        step = [self._bind(call, weights) for call in program.step]
        stand_ins, streamer = self._stand_ins(), self._streamer(weights)
        parts = Parts(
            manifest=manifest,
            partition=self.partition,
            device=self.device,
            pool=self.pool,
            weights=weights,
            ports=ports,
            inputs=Inputs(ports, kept, self.device),
            request=RequestMemo(
                request, program.request_values, stats, bound if streamer is None else streamer.request
            ),
            tables=self._tables(weights, stats, table_bytes),
            variants=program.variants,
            measures=Measures(program.measures, self.device),
            runner=Runner(
                step,
                manifest.outputs,
                self.device,
                variants=stand_ins,
                measures=program.measures,
                feed=bound if streamer is None else streamer.step,
            ),
            memory=self._memory(step, stand_ins, stats),
            stats=stats,
            residency=places.residency if places.residency.blocks else None,
            streamer=streamer,
            host=self.host,
            ranks=self.ranks,
        )
        if streamer is not None:
            # Last: while it locks host memory the driver serves nobody else, the copies of tables neither.
            streamer.reader.start()
        return parts

    def _memory(
        self, step: Sequence[BoundCall], stand_ins: Mapping[str, Executor], stats: Stats
    ) -> StepMemory | None:
        """What places the values of a step; None where a region runs operator by operator."""
        ranges = self.folder.manifest.partitions[self.partition].ranges
        weights: dict[str, tuple[torch.Tensor, ...]] = {}
        calls = []
        for call, record in zip(step, self.program.step, strict=True):
            rehearsal = call.executor.rehearsal
            if rehearsal is None:
                return None
            if call.region not in weights:
                slots = ranges[record.range].slots if record.range in ranges else ()
                weights[call.region] = tuple(
                    without_memory(slot.shape, slot.strides, parse_dtype(slot.dtype)) for slot in slots
                )
            calls.append(replace(call, executor=rehearsal, weights=weights[call.region]))
        variants: dict[str, Executor] = {}
        for name, executor in stand_ins.items():
            rehearsal = executor.rehearsal
            if rehearsal is None:
                return None
            variants[name] = rehearsal
        runner = Runner(
            calls,
            self.folder.manifest.outputs,
            torch.device("cpu"),
            variants=variants,
            measures=self.program.measures,
        )
        return StepMemory(runner, self.program.tables, self.device, stats)

    def _streamer(self, weights: Weights) -> Streamer | None:
        """What brings weights to the calls of the residency; None where all are there already."""
        places = self.places
        if not places.residency.blocks:
            return None
        schedule = Schedule(
            [call_name(call) for call in self.program.step],
            [call_name(call) for call in self.program.request],
            places.residency,
            carried=places.carried,
        )
        ranges = places.carried | places.streamed
        lanes = lanes_for(self.device)
        if self.ranks is not None:
            # The first blocks of a forward are gathered while the one before it ends.
            self.ranks.watch.stay_for(lanes.gathering)
        records = self.folder.manifest.partitions[self.partition].ranges
        return Streamer(
            schedule,
            carried=tuple(places.carried),
            streamed=tuple(places.streamed),
            slots=[
                torch.empty(places.slot_bytes, dtype=torch.uint8, device=self.device)
                for _ in range(places.residency.slots)
            ],
            places={call: weights.place(name) for call, name in places.residents.items()},
            reader=Reader(list(self._wanted(weights)), self.host),
            lanes=lanes,
            views=lambda data, call: views(data, records[ranges[call]]),
            gathering=self._gathering(ranges | places.residents),
        )

    def _gathering(self, ranges: Mapping[str, str]) -> Gathering | None:
        """Where the shards of all ranks come together; None where each has the whole."""
        places = self.places
        if places.residency.mode != "allgather":
            return None
        assert self.ranks is not None, "refused before"
        return Gathering(
            # A group of its own: gathers of weights and exchanges of rows do not wait for each other.
            self.ranks.another_group(),
            places.sharding,
            [
                torch.empty(places.area_bytes, dtype=torch.uint8, device=self.device)
                for _ in range(places.residency.areas)
            ],
            {call: places.sizes[name] for call, name in ranges.items()},
        )

    def _wanted(self, weights: Weights) -> Iterator[Wanted]:
        """What is to be read, in order of need."""
        places = self.places
        for call in (*places.carried, *places.residency.blocks):
            kept: HostRange | None = None
            if call in places.residents:
                name = places.residents[call]
                if weights.place(name).filled:
                    continue
            else:
                name = places.carried.get(call) or places.streamed[call]
                kept = self.pool.share(self._host_key(name), HostRange, HostRange)
            size = places.sizes[name]
            if places.sharding == WHOLE:
                read = partial(self.folder.load_range, self.partition, name)
            else:
                read = partial(self.folder.load_spans, self.partition, name, places.sharding.spans(size))
            yield Wanted(call, places.sharding.held(size), read, kept)

    def _bind(self, call: CallRecord, weights: Weights) -> BoundCall:
        found = weights.resident(call.range) if call.range in self.places.on_device else ()
        executor = self._executor(call.region)
        return BoundCall(call_name(call), call.region, call.inputs, call.outputs, executor, found)

    def _stand_ins(self) -> dict[str, Executor]:
        """The executors of all variants: which of them a step takes is known when it begins."""
        variants = {variant.region for found in self.program.variants.values() for variant in found}
        return {name: self._executor(name) for name in sorted(variants)}

    def _executor(self, region: str) -> Executor:
        record = self.program.regions[region]
        return executor_for(self.folder, record, self.device, self.pool, interpret=False)

    def _tables(self, weights: Weights, stats: Stats, budget: int) -> ModulationTables | None:
        if self.program.timestep is None:
            return None
        cold = self.cold

        @contextmanager
        def open_cold() -> Iterator[Callable[[str], tuple[torch.Tensor, ...]]]:
            with weights.cold(cold.values()) as read:
                yield lambda call: read(cold[call]) if call in cold else ()

        record = self.folder.manifest.partitions[self.partition].tables
        files = () if record is None else tuple(record.files)
        return ModulationTables(
            [self._schedule_call(call) for call in self.program.schedule],
            self.program.timestep,
            self.groups,
            cold=open_cold,
            device=self.device,
            stats=stats,
            folded=(
                () if record is None else record.timesteps,
                ((call, self.folder.load_table(self.partition, call)) for call in files),
            ),
            budget=budget,
            host=self.host,
        )

    def _schedule_call(self, call: CallRecord) -> ScheduleCall:
        region = self.program.regions[call.region]
        executor = executor_for(self.folder, region, self.device, self.pool, interpret=True)
        return ScheduleCall(call_name(call), call.inputs, call.outputs, executor)
