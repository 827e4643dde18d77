"""From a program to the records of a manifest, and back to what a backend needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from h3compile.engine.layout import SlotSpec, lay_out
from h3compile.engine.manifest import (
    CallRecord,
    DimRecord,
    Manifest,
    NoisierRecord,
    PortRecord,
    RangeRecord,
    RegionRecord,
    ShorterRecord,
    VariantRecord,
)
from h3compile.program.analysis import execution_stages
from h3compile.program.conditions import Condition, Shorter
from h3compile.program.facts import Dim, ModelFacts
from h3compile.program.program import Call, Program
from h3compile.program.region import Port, Region
from h3compile.program.serialize import dtype_name
from h3compile.program.stages import Stage
from h3compile.program.weights import Load

__all__ = [
    "call_records",
    "dim_records",
    "dims_of",
    "graph_path",
    "port_record",
    "range_of",
    "region_record",
    "stage_of",
    "variant_records",
]

_STAGES: Mapping[Stage, Literal["schedule", "request", "step"]] = {
    Stage.SCHEDULE: "schedule",
    Stage.REQUEST: "request",
    Stage.STEP: "step",
}


def port_record(port: Port) -> PortRecord:
    """The port as the manifest keeps it."""
    return PortRecord(name=port.name, dtype=dtype_name(port.dtype), shape=port.shape)


def dim_records(facts: ModelFacts) -> dict[str, DimRecord]:
    """The free lengths as the manifest keeps them."""
    return {
        dim.name: DimRecord(hint=dim.hint, smallest=dim.smallest, largest=dim.largest) for dim in facts.dims
    }


def dims_of(manifest: Manifest) -> tuple[Dim, ...]:
    """The free lengths of an engine, as a backend needs them."""
    return tuple(
        Dim(name, record.hint, record.smallest, record.largest) for name, record in manifest.dims.items()
    )


def graph_path(region: str) -> str:
    """Where the engine keeps a region's graph."""
    return f"regions/{region}.json"


def region_record(region: Region) -> RegionRecord:
    """The region before it is lowered."""
    return RegionRecord(
        name=region.name,
        inputs=tuple(map(port_record, region.inputs)),
        weights=tuple(map(port_record, region.weights)),
        outputs=tuple(map(port_record, region.outputs)),
        graph=graph_path(region.name),
    )


def stage_of(program: Program) -> dict[str, Stage]:
    """When the runner executes each call.

    Without tables a schedule-stage call is step work: its timesteps then enter all at once, as in the model.
    """
    stages = execution_stages(program)
    if program.tables:
        return stages
    return {call: Stage.STEP if stage is Stage.SCHEDULE else stage for call, stage in stages.items()}


def call_records(program: Program) -> tuple[CallRecord, ...]:
    """The calls in order; every call with weights binds the range of its own name."""
    stages = stage_of(program)
    return tuple(
        CallRecord(
            region=call.region,
            index=call.index,
            stage=_STAGES[stages[call.name]],
            inputs=call.inputs,
            outputs=call.outputs,
            range=call.name if call.weights else None,
        )
        for call in program.calls
    )


def variant_records(program: Program) -> dict[str, tuple[VariantRecord, ...]]:
    """The variants as the manifest keeps them."""
    return {
        base: tuple(VariantRecord(region=v.region, when=_condition_record(v.when)) for v in variants)
        for base, variants in program.variants.items()
    }


def _condition_record(condition: Condition) -> ShorterRecord | NoisierRecord:
    if isinstance(condition, Shorter):
        return ShorterRecord(dim=condition.dim, than=condition.than)
    return NoisierRecord(than=condition.than)


def range_of(program: Program, call: Call, files: Mapping[str, str] | None = None) -> RangeRecord:
    """The layout of a call's weights.

    ``files`` maps checkpoint keys to files: with it, weights stored as they are needed become links.
    """
    region = program.regions[call.region]
    specs = []
    for port, name in zip(region.weights, call.weights, strict=True):
        weight = program.weights[name]
        link = (files[weight.key], weight.key) if files and isinstance(weight, Load) else None
        specs.append(SlotSpec(port.name, tuple(weight.shape), weight.dtype, link=link))
    return lay_out(specs)
