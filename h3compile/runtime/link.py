"""An engine's program as the runtime executes it: its calls by stage, and what passes between stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from h3compile.engine.manifest import CallRecord, Manifest, PortRecord, RegionRecord
from h3compile.errors import EngineError
from h3compile.program.conditions import Shorter, Variant

__all__ = ["LinkedProgram", "call_name", "link"]


@dataclass(frozen=True)
class LinkedProgram:
    """A program whose every value is known to be there when it is read.

    ``tables`` are the ports of the schedule-stage values that steps read, in program order;
    ``request_values`` the request-stage values that they read. ``variants`` names, by region, what may
    serve its calls instead; ``measures`` the step-stage values that are kept for reports.
    """

    regions: Mapping[str, RegionRecord]
    schedule: tuple[CallRecord, ...]
    request: tuple[CallRecord, ...]
    step: tuple[CallRecord, ...]
    tables: tuple[PortRecord, ...]
    request_values: tuple[str, ...]
    timestep: PortRecord | None  # the schedule-stage input, where there are schedule calls
    variants: Mapping[str, tuple[Variant, ...]]
    measures: tuple[str, ...]


def call_name(call: CallRecord) -> str:
    """``region.index``, unique in a program."""
    return f"{call.region}.{call.index}"


def link(manifest: Manifest) -> LinkedProgram:
    """Checks that the program of ``manifest`` can be executed stage by stage.

    Where no pass made tables, what depends on the timestep alone is computed in every step.

    Raises `EngineError` when a call reads a value that no earlier call and no input gives, when a stage
    reads one that comes later, when ports do not match, when a table is missing from the list, when a
    variant does not fit the region it stands in for, or a measure is none.
    """
    regions = {region.name: region for region in manifest.regions}
    stage_of = dict(manifest.input_stages)
    maker: dict[str, PortRecord] = {}
    calls: dict[str, list[CallRecord]] = {"schedule": [], "request": [], "step": []}
    for call in manifest.calls:
        stage = "step" if call.stage == "schedule" and not manifest.tables else call.stage
        region = regions.get(call.region)
        if region is None:
            raise _broken(f"{call_name(call)} calls a region that is not there")
        if (len(call.inputs), len(call.outputs)) != (len(region.inputs), len(region.outputs)):
            raise _broken(f"{call_name(call)} does not fit the ports of its region")
        if region.weights and call.range is None:
            raise _broken(f"{call_name(call)} has no weights")
        for name in call.inputs:
            if name not in stage_of:
                raise _broken(f"{call_name(call)} reads {name} before it exists")
            if stage != "step" and stage_of[name] not in (stage, "build"):
                raise _broken(f"{call_name(call)}, {stage} stage, reads {name}, {stage_of[name]} stage")
        for name, port in zip(call.outputs, region.outputs, strict=True):
            if name in stage_of:
                raise _broken(f"{name} is made twice")
            stage_of[name] = stage
            maker[name] = port.model_copy(update={"name": name})
        calls[stage].append(call)
    for name in manifest.outputs:
        if name not in maker:
            raise _broken(f"the output {name} is made by no call")

    read = {name for call in calls["step"] for name in call.inputs} | set(manifest.outputs)
    tables = tuple(port for name, port in maker.items() if name in read and stage_of[name] == "schedule")
    if {port.name for port in tables} != set(manifest.tables):
        raise _broken("its list of tables is not what its steps read")
    variants = {base: _variants(manifest, regions, base) for base in manifest.variants}
    for call in (*calls["schedule"], *calls["request"]):
        if call.region in variants:
            raise _broken(f"{call_name(call)} has variants and does not run in the step")
    for name in manifest.measures:
        if name in read or stage_of.get(name) != "step" or _type(maker[name]) != ("int32", (2,)):
            raise _broken(f"{name} is no measure of a step")
    scheduled = [port for port in manifest.inputs if manifest.input_stages[port.name] == "schedule"]
    if tables and len(scheduled) != 1:
        raise _broken("its tables depend on more than one input")
    return LinkedProgram(
        regions=regions,
        schedule=tuple(calls["schedule"]),
        request=tuple(calls["request"]),
        step=tuple(calls["step"]),
        tables=tables,
        request_values=tuple(name for name in maker if name in read and stage_of[name] == "request"),
        timestep=scheduled[0] if tables else None,
        variants=variants,
        measures=manifest.measures,
    )


def _variants(manifest: Manifest, regions: Mapping[str, RegionRecord], base: str) -> tuple[Variant, ...]:
    lengths = {size for port in manifest.inputs for size in port.shape}
    made: list[Variant] = []
    for record in manifest.variants[base]:
        name, when = record.region, record.condition
        if name in manifest.variants or any(call.region == name for call in manifest.calls):
            raise _broken(f"{name} is a variant of {base} and more than that")
        if name not in regions or _signature(regions[name]) != _signature(regions[base]):
            raise _broken(f"the variant {name} does not fit the ports of {base}")
        if isinstance(when, Shorter) and when.dim not in lengths:
            raise _broken(f"the variant {name} asks for the length {when.dim}, which no input has")
        made.append(Variant(name, when))
    return tuple(made)


def _signature(region: RegionRecord) -> tuple[list[tuple[str, tuple[int | str, ...]]], ...]:
    """What values and weights a region takes and gives, by place."""
    return tuple([_type(port) for port in ports] for ports in (region.inputs, region.weights, region.outputs))


def _type(port: PortRecord) -> tuple[str, tuple[int | str, ...]]:
    return port.dtype, port.shape


def _broken(what: str) -> EngineError:
    return EngineError(f"the engine's program cannot be executed ({what})", "rebuild the engine")
