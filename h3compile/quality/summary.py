"""Sums over an engine's manifest that people want to see: bytes by stage, by region, by folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from h3compile.engine.manifest import Manifest, PartitionRecord, RegionRecord
from h3compile.program.analysis import execution_stages
from h3compile.program.program import Program
from h3compile.program.region import Region
from h3compile.program.serialize import op_name
from h3compile.program.stages import Stage

__all__ = [
    "artifact_size",
    "folder_sizes",
    "in_order",
    "operators",
    "own_operators",
    "program_weights_by_stage",
    "stands_in",
    "weights_by_stage",
]

_OWN = "h3compile."


def operators(region: Region) -> Counter[str]:
    """How often each operator stands in a region's graph."""
    return Counter(op_name(node.target) for node in region.graph.nodes if node.op == "call_function")


def own_operators(region: Region) -> dict[str, int]:
    """How often each of our own operators stands in a region's graph, by its name without the namespace."""
    return {
        name.removeprefix(_OWN): count for name, count in operators(region).items() if name.startswith(_OWN)
    }


def weights_by_stage(manifest: Manifest, partition: PartitionRecord) -> dict[str, int]:
    """Bytes of a partition's weights by the stage of the call that reads them, alignment included.

    ``schedule`` weights stay cold: they are read only to evaluate a timestep that no table holds. A range
    that several calls bind counts once, in the stage that reads it most often.
    """
    order = {"schedule": 0, "request": 1, "step": 2}
    stages: dict[str, str] = {}
    for call in manifest.calls:
        if call.range in partition.ranges and order[call.stage] >= order[stages.get(call.range, "schedule")]:
            stages[call.range] = call.stage
    totals: Counter[str] = Counter()
    for name, record in partition.ranges.items():
        totals[stages.get(name, "unused")] += record.nbytes
    return {stage: totals[stage] for stage in ("step", "request", "schedule", "unused") if totals[stage]}


def program_weights_by_stage(program: Program) -> dict[str, int]:
    """The same of a program, written or not: the bytes of its weights by the stage that reads them."""
    order = [stage.value for stage in Stage]
    stages = execution_stages(program)
    read: dict[str, str] = {}
    for call in program.calls:
        stage = stages[call.name].value
        for weight in call.weights:
            read[weight] = max(stage, read.get(weight, stage), key=order.index)
    totals: Counter[str] = Counter()
    for weight, stage in read.items():
        totals[stage] += program.weights[weight].nbytes
    return {stage: totals[stage] for stage in reversed(order) if totals[stage]}


def in_order(manifest: Manifest) -> list[RegionRecord]:
    """The regions in the order of their first calls, each followed by its variants."""
    order: list[str] = []
    for region in dict.fromkeys(call.region for call in manifest.calls):
        order += [region, *(variant.region for variant in manifest.variants.get(region, ()))]
    return sorted(manifest.regions, key=lambda region: order.index(region.name))


def stands_in(manifest: Manifest, region: str) -> tuple[str, str] | None:
    """Which region ``region`` is a variant of, and in which steps it serves its calls; None for no variant.

    Of several variants whose condition holds the first one in the manifest does.
    """
    for base, variants in manifest.variants.items():
        whens = [str(variant.condition) for variant in variants if variant.region == region]
        if whens:
            return base, " or ".join(whens)
    return None


def artifact_size(region: RegionRecord, files: Mapping[str, int]) -> int:
    """Bytes of a region's lowered artifact, file or folder; 0 before it is lowered."""
    if region.artifact is None:
        return 0
    path = region.artifact.path.rstrip("/")
    return sum(size for name, size in files.items() if name == path or name.startswith(f"{path}/"))


def folder_sizes(files: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Number and bytes of the files below each top folder; files beside it go by their own name."""
    found: dict[str, tuple[int, int]] = {}
    for name, size in sorted(files.items()):
        top = f"{name.split('/')[0]}/" if "/" in name else name
        count, total = found.get(top, (0, 0))
        found[top] = (count + 1, total + size)
    return found
