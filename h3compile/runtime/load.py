"""Loads an engine: from a folder to a module that is ready to run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from h3compile.engine.loader import EngineFolder, open_engine
from h3compile.engine.manifest import CallRecord, Manifest
from h3compile.errors import EngineError, H3CompileError, nearest
from h3compile.program.serialize import parse_dtype
from h3compile.runtime.executors import executor_for
from h3compile.runtime.fold import ScheduleCall
from h3compile.runtime.inputs import Inputs
from h3compile.runtime.link import LinkedProgram, call_name, link
from h3compile.runtime.memory import gib
from h3compile.runtime.module import CompiledTransformer, Parts, parameters, with_index
from h3compile.runtime.pool import Pool
from h3compile.runtime.request import RequestMemo
from h3compile.runtime.runner import BoundCall, Runner
from h3compile.runtime.stats import Stats
from h3compile.runtime.tables import TABLE_BYTES, ModulationTables, TableGroup, group_tables
from h3compile.runtime.weights import Weights, range_key

__all__ = ["load"]


def load(
    path: str | os.PathLike[str],
    device: str | torch.device | None = None,
    *,
    partition: str | None = None,
    expect: str | None = None,
    share: CompiledTransformer | Pool | None = None,
    verify: bool = True,
    table_bytes: int = TABLE_BYTES,
) -> CompiledTransformer:
    """The engine at ``path`` as a module that replaces ``pipe.transformer``.

    ``device`` is by default the kind the engine was built for; ``partition`` the engine's first set of
    weights. ``expect`` is the digest the caller trusts: an engine is code, and is trusted like code.
    ``share`` names a module, or a `Pool`, to share equal weights and artifacts with. ``verify=False``
    skips the digests of the files. ``table_bytes`` bounds what timesteps not folded at build may occupy.

    Raises `EngineError` when the engine is damaged, unfinished, without weights or made for another
    device, `H3CompileError` when the device is absent or too small.
    """
    folder = open_engine(Path(path), expect=expect, verify=verify)
    manifest = folder.manifest
    if manifest.pending:
        raise EngineError(
            f"{path} is not finished: {', '.join(manifest.pending)} wait for {manifest.target}",
            f"run `h3compile finalize {path}` on a machine that has it",
        )
    if manifest.weights == "none":
        raise EngineError(f"{path} holds no weights", "build it without --weightless")
    name = partition if partition is not None else next(iter(manifest.partitions), "")
    if name not in manifest.partitions:
        raise EngineError(f"{path} has no partition {name!r}", nearest(name, manifest.partitions))
    if {port.name for port in manifest.inputs} != set(parameters()) or len(manifest.outputs) != 2:
        raise EngineError(f"{path} is an engine of {manifest.model}, which has other inputs", "rebuild it")
    where = _device_for(manifest, device)
    pool = share.pool if isinstance(share, CompiledTransformer) else share or Pool()
    # Whatever loads on the current device must load on this one.
    with torch.cuda.device(where) if where.type == "cuda" else nullcontext(), torch.no_grad():
        return CompiledTransformer(_assemble(folder, name, where, pool, table_bytes))


def _assemble(
    folder: EngineFolder, partition: str, device: torch.device, pool: Pool, table_bytes: int
) -> Parts:
    manifest = folder.manifest
    program = link(manifest)
    _require_ranges(folder, partition, program)
    groups: tuple[TableGroup, ...] = ()
    if program.timestep is not None:
        groups = group_tables(program.tables, str(program.timestep.shape[0]))
    hot = (*program.request, *program.step)
    resident = list(dict.fromkeys(call.range for call in hot if call.range is not None))
    if device.type == "cuda":
        _require_memory(folder, partition, device, pool, resident, program, groups)

    stats = Stats()
    weights = Weights(folder, partition, device, pool, resident)

    def bind(call: CallRecord) -> BoundCall:
        executor = executor_for(folder, program.regions[call.region], device, pool, interpret=False)
        bound = weights.resident(call.range) if call.range is not None else ()
        return BoundCall(call_name(call), call.inputs, call.outputs, executor, bound)

    # What is small, or must be looked at on the host, is kept to tell whether it changed.
    kept = [
        port.name
        for port in manifest.inputs
        if manifest.input_stages[port.name] != "step" or not parse_dtype(port.dtype).is_floating_point
    ]
    return Parts(
        manifest=manifest,
        partition=partition,
        device=device,
        pool=pool,
        weights=weights,
        inputs=Inputs(manifest.inputs, kept, device),
        request=RequestMemo([bind(call) for call in program.request], program.request_values, stats),
        tables=_tables(folder, partition, program, groups, device, pool, weights, stats, table_bytes),
        runner=Runner([bind(call) for call in program.step], manifest.outputs, device),
        stats=stats,
    )


def _tables(
    folder: EngineFolder,
    partition: str,
    program: LinkedProgram,
    groups: Sequence[TableGroup],
    device: torch.device,
    pool: Pool,
    weights: Weights,
    stats: Stats,
    budget: int,
) -> ModulationTables | None:
    if program.timestep is None:
        return None
    ranges = {call_name(call): call.range for call in program.schedule}
    calls = [
        ScheduleCall(
            call_name(call),
            call.inputs,
            call.outputs,
            executor_for(folder, program.regions[call.region], device, pool, interpret=True),
        )
        for call in program.schedule
    ]

    @contextmanager
    def cold() -> Iterator[Callable[[str], tuple[torch.Tensor, ...]]]:
        with weights.cold([name for name in ranges.values() if name is not None]) as read:

            def of_call(call: str) -> tuple[torch.Tensor, ...]:
                name = ranges[call]
                return read(name) if name is not None else ()

            yield of_call

    record = folder.manifest.partitions[partition].tables
    files = record.files if record is not None else {}
    return ModulationTables(
        calls,
        program.timestep,
        groups,
        cold=cold,
        device=device,
        stats=stats,
        folded=(
            record.timesteps if record is not None else (),
            ((call, folder.load_table(partition, call)) for call in files),
        ),
        budget=budget,
    )


def _device_for(manifest: Manifest, asked: str | torch.device | None) -> torch.device:
    """The device to load on: of the kind, and where code was lowered of the arch, of the engine's target."""
    kind = "cpu" if manifest.arch.startswith("cpu") else "cuda"
    try:
        device = torch.device(asked if asked is not None else kind)
    except RuntimeError:
        raise H3CompileError(f"{asked!r} is not a device", "name one such as 'cpu' or 'cuda:0'") from None
    if device.type != kind:
        raise EngineError(
            f"the engine was built for {manifest.target} ({manifest.arch}) and cannot run on {device}",
            f"build one with --target {device.type if device.type == 'cpu' else 'auto'}",
        )
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0 or (device.index or 0) >= count:
        raise H3CompileError(
            f"the engine was built for {manifest.target} and this machine has {count or 'no'} CUDA devices",
            "load it where there is one, or build with --target cpu",
        )
    device = with_index(device)
    lowered = any(region.artifact is not None for region in manifest.regions)
    major, minor = torch.cuda.get_device_capability(device)
    if lowered and manifest.arch.rstrip("a") != f"sm_{major}{minor}":
        raise EngineError(
            f"the engine was built for {manifest.arch} and {device} is sm_{major}{minor}",
            "run `h3compile build` again with --target auto",
        )
    return device


def _require_ranges(folder: EngineFolder, partition: str, program: LinkedProgram) -> None:
    ranges = folder.manifest.partitions[partition].ranges
    for call in (*program.schedule, *program.request, *program.step):
        ports = program.regions[call.region].weights
        slots = ranges[call.range].slots if call.range in ranges else ()
        if [(slot.shape, slot.dtype) for slot in slots] != [(port.shape, port.dtype) for port in ports]:
            raise EngineError(
                f"the weights of {call_name(call)} in {partition} do not fit its region", "rebuild the engine"
            )


def _require_memory(
    folder: EngineFolder,
    partition: str,
    device: torch.device,
    pool: Pool,
    resident: Sequence[str],
    program: LinkedProgram,
    groups: Sequence[TableGroup],
) -> None:
    """Compares what will be allocated with what the device has, before anything is."""
    record = folder.manifest.partitions[partition]
    wanted = {range_key(folder, partition, name, device): record.ranges[name].nbytes for name in resident}
    need = sum(nbytes for key, nbytes in wanted.items() if not pool.holds(key))
    if record.tables is not None:
        need += len(record.tables.timesteps) * sum(group.nbytes for group in groups)
    cold = [record.ranges[call.range].nbytes for call in program.schedule if call.range is not None]
    need += max(cold, default=0)
    free, _ = torch.cuda.mem_get_info(device)
    # What this process's allocator holds and does not use is free too.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if need > free:
        raise H3CompileError(
            f"the engine needs {gib(need)} on {device}, which has {gib(free)} free",
            "free the device or take a larger one",
        )
