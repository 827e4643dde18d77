"""An engine's program as the runtime executes it: its calls by stage, and what passes between stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from h3compile.engine.manifest import CallRecord, Manifest, PortRecord, RegionRecord
from h3compile.errors import EngineError

__all__ = ["LinkedProgram", "call_name", "link"]


@dataclass(frozen=True)
class LinkedProgram:
    """A program whose every value is known to be there when it is read.

    ``tables`` are the ports of the schedule-stage values that steps read, in program order;
    ``request_values`` the request-stage values that they read.
    """

    regions: Mapping[str, RegionRecord]
    schedule: tuple[CallRecord, ...]
    request: tuple[CallRecord, ...]
    step: tuple[CallRecord, ...]
    tables: tuple[PortRecord, ...]
    request_values: tuple[str, ...]
    timestep: PortRecord | None  # the schedule-stage input, where there are schedule calls


def call_name(call: CallRecord) -> str:
    """``region.index``, unique in a program."""
    return f"{call.region}.{call.index}"


def link(manifest: Manifest) -> LinkedProgram:
    """Checks that the program of ``manifest`` can be executed stage by stage.

    Where no pass made tables, what depends on the timestep alone is computed in every step.

    Raises `EngineError` when a call reads a value that no earlier call and no input gives, when a stage
    reads one that comes later, when ports do not match, or when a table is missing from the list.
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
    )


def _broken(what: str) -> EngineError:
    return EngineError(f"the engine's program cannot be executed ({what})", "rebuild the engine")
