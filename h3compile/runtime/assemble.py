"""Puts a loaded engine together: weights onto the device, executors behind calls, tables and memo between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from h3compile.engine.loader import EngineFolder
from h3compile.engine.manifest import CallRecord
from h3compile.errors import EngineError, H3CompileError
from h3compile.program.serialize import parse_dtype
from h3compile.runtime.executors import Executor, executor_for
from h3compile.runtime.fold import ScheduleCall
from h3compile.runtime.groups import TableGroup, group_tables
from h3compile.runtime.inputs import Inputs
from h3compile.runtime.link import LinkedProgram, call_name, link
from h3compile.runtime.measures import Measures
from h3compile.runtime.memory import gib
from h3compile.runtime.module import Parts
from h3compile.runtime.pool import Pool
from h3compile.runtime.request import RequestMemo
from h3compile.runtime.runner import BoundCall, Runner
from h3compile.runtime.stats import Stats
from h3compile.runtime.tables import ModulationTables
from h3compile.runtime.weights import Weights, range_key

__all__ = ["assemble"]


def assemble(
    folder: EngineFolder, partition: str, device: torch.device, pool: Pool, table_bytes: int
) -> Parts:
    """The parts of a module that runs ``partition`` of an engine on ``device``.

    Raises `EngineError` when the engine's records do not fit each other, and `H3CompileError` when a GPU
    lacks the memory, before any of it is allocated.
    """
    program = link(folder.manifest)
    groups: tuple[TableGroup, ...] = ()
    if program.timestep is not None:
        groups = group_tables(program.tables, str(program.timestep.shape[0]))
    site = _Site(folder, partition, device, pool, program, groups)
    site.require_ranges()
    if device.type == "cuda":
        site.require_memory()
    return site.build(table_bytes)


@dataclass(frozen=True)
class _Site:
    folder: EngineFolder
    partition: str
    device: torch.device
    pool: Pool
    program: LinkedProgram
    groups: tuple[TableGroup, ...]

    @property
    def resident(self) -> tuple[str, ...]:
        """The ranges that stay on the device."""
        calls = (*self.program.request, *self.program.step)
        return tuple(dict.fromkeys(call.range for call in calls if call.range is not None))

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

    def require_memory(self) -> None:
        """What will be allocated against what the GPU has, before anything is allocated."""
        record = self.folder.manifest.partitions[self.partition]
        sizes = {name: found.nbytes for name, found in record.ranges.items()}
        keys = {
            range_key(self.folder, self.partition, name, self.device): sizes[name] for name in self.resident
        }
        need = sum(size for key, size in keys.items() if not self.pool.holds(key))
        need += max((sizes[name] for name in self.cold.values()), default=0)
        if record.tables is not None:
            need += len(record.tables.timesteps) * sum(group.nbytes for group in self.groups)
        free, _ = torch.cuda.mem_get_info(self.device)
        # What this process's allocator holds and does not use is free too.
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if need > free:
            raise H3CompileError(
                f"the engine needs {gib(need)} on {self.device}, which has {gib(free)} free",
                "free the device or take a larger one",
            )

    def build(self, table_bytes: int) -> Parts:
        manifest, program, stats = self.folder.manifest, self.program, Stats()
        weights = Weights(self.folder, self.partition, self.device, self.pool, self.resident)
        # What is small, or must be looked at on the host, is kept to tell whether it changed.
        kept = [
            port.name
            for port in manifest.inputs
            if manifest.input_stages[port.name] != "step" or not parse_dtype(port.dtype).is_floating_point
        ]
        request = [self._bind(call, weights) for call in program.request]
        step = [self._bind(call, weights) for call in program.step]
        return Parts(
            manifest=manifest,
            partition=self.partition,
            device=self.device,
            pool=self.pool,
            weights=weights,
            inputs=Inputs(manifest.inputs, kept, self.device),
            request=RequestMemo(request, program.request_values, stats),
            tables=self._tables(weights, stats, table_bytes),
            variants=program.variants,
            measures=Measures(program.measures, self.device),
            runner=Runner(
                step,
                manifest.outputs,
                self.device,
                variants=self._stand_ins(),
                measures=program.measures,
            ),
            stats=stats,
        )

    def _bind(self, call: CallRecord, weights: Weights) -> BoundCall:
        bound = weights.resident(call.range) if call.range is not None else ()
        executor = self._executor(call.region)
        return BoundCall(call_name(call), call.region, call.inputs, call.outputs, executor, bound)

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
        )

    def _schedule_call(self, call: CallRecord) -> ScheduleCall:
        region = self.program.regions[call.region]
        executor = executor_for(self.folder, region, self.device, self.pool, interpret=True)
        return ScheduleCall(call_name(call), call.inputs, call.outputs, executor)
