"""From a program to the records of a manifest, and back to what a backend needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from h3compile.engine.layout import SlotSpec, lay_out
from h3compile.engine.manifest import (
    CallRecord,
    DimRecord,
    KindRecord,
    Manifest,
    NoisierRecord,
    ParallelRecord,
    PlanRecord,
    PortRecord,
    RangeRecord,
    RegionRecord,
    ShorterRecord,
    VariantRecord,
)
from h3compile.program.analysis import execution_stages
from h3compile.program.conditions import Condition, Shorter
from h3compile.program.facts import Dim
from h3compile.program.parallel import Kind, Parallel
from h3compile.program.program import Call, Program
from h3compile.program.region import Port, Region
from h3compile.program.residency import Residency
from h3compile.program.serialize import dtype_name
from h3compile.program.stages import Stage
from h3compile.program.weights import Load

__all__ = [
    "call_records",
    "dim_records",
    "dims_of",
    "graph_path",
    "parallel_of",
    "parallel_record",
    "plan_record",
    "port_record",
    "range_of",
    "region_record",
    "residency_of",
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


def dim_records(program: Program) -> dict[str, DimRecord]:
    """The free lengths as the manifest keeps them."""
    return {
        dim.name: DimRecord(hint=dim.hint, smallest=dim.smallest, largest=dim.largest) for dim in program.dims
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


def plan_record(program: Program) -> PlanRecord | None:
    """Where the weights live, as the manifest keeps it; None where no pass said so."""
    found = program.residency
    if found is None:
        return None
    return PlanRecord(
        blocks=found.blocks,
        resident=found.resident,
        slots=found.slots,
        mode=found.mode,
        pieces=found.pieces,
    )


def residency_of(plan: PlanRecord) -> Residency:
    """What the record stands for; `BuildError` when its fields contradict each other."""
    return Residency(plan.blocks, plan.resident, plan.slots, plan.mode, plan.pieces)


def parallel_record(program: Program) -> ParallelRecord | None:
    """How ranks share the rows, as the manifest keeps it; None for one rank."""
    found = program.parallel
    if found is None:
        return None
    return ParallelRecord(
        ulysses=found.ulysses,
        ring=found.ring,
        exchange=found.exchange,
        rows=found.rows,
        kinds=tuple(KindRecord(index=kind.index, dim=kind.dim) for kind in found.kinds),
    )


def parallel_of(manifest: Manifest) -> Parallel | None:
    """How the ranks of an engine share the rows; `BuildError` when the record contradicts itself."""
    record = manifest.parallel
    if record is None:
        return None
    kinds = tuple(Kind(kind.index, kind.dim) for kind in record.kinds)
    return Parallel(record.ulysses, record.ring, record.exchange, record.rows, kinds)


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
