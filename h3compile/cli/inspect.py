"""`h3compile inspect`: what an engine holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from h3compile.cli.console import device, facts, stdout, table
from h3compile.errors import H3CompileError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from h3compile.engine.loader import EngineFolder
    from h3compile.engine.manifest import CallRecord, Manifest, PortRecord, RegionRecord
    from h3compile.program.region import Region

__all__ = ["inspect"]


def inspect(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="The engine, NAME.h3e.")],
    region: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show one region: ports, operators, calls.")
    ] = None,
    ir: Annotated[
        bool, typer.Option("--ir", help="Print the graph: of --region, or of every region.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compute the digest of every file first.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Show what an engine holds.

    Its configuration, its regions and their calls, the passes, the weights by stage, and the sizes.

    \b
      h3compile inspect h3.h3e
      h3compile inspect h3.h3e --region block
      h3compile inspect h3.h3e --region block --ir
      h3compile inspect h3.h3e --verify
    """
    from h3compile.engine.loader import open_engine

    folder = open_engine(engine, verify=verify)
    console = stdout()
    chosen = folder.manifest.regions if region is None else (_find(folder.manifest, region),)
    if json:
        print(folder.manifest.encode().decode(), end="")
    elif ir:
        for record in chosen:
            print(_graph(folder, record))
    elif region is None:
        _print_engine(console, folder)
    else:
        _print_region(console, folder, chosen[0])
    if verify and not json:
        console.print("every digest is right")


def _find(manifest: Manifest, name: str) -> RegionRecord:
    for record in manifest.regions:
        if record.name == name:
            return record
    raise H3CompileError(f"no region is called {name!r}", nearest(name, (r.name for r in manifest.regions)))


def _read(folder: EngineFolder, record: RegionRecord) -> Region:
    import h3compile.ops  # noqa: F401  graphs name our operators
    from h3compile.program.serialize import region_from_json

    return region_from_json(folder.read_text(record.graph))


def _graph(folder: EngineFolder, record: RegionRecord) -> str:
    """The graph as text; the types of its nodes are not stored and so found again."""
    from h3compile.engine.records import dims_of
    from h3compile.program.printer import print_region
    from h3compile.program.propagate import propagate

    return print_region(propagate(_read(folder, record), dims_of(folder.manifest))) + "\n"


def _print_engine(console: Console, folder: EngineFolder) -> None:
    from h3compile.engine.records import parallel_of, residency_of
    from h3compile.quality.summary import (
        artifact_size,
        folder_sizes,
        in_order,
        operators,
        own_operators,
        weights_by_stage,
    )
    from h3compile.quality.units import forwards, size

    manifest = folder.manifest
    files = {name: record.size for name, record in manifest.files.items()}
    config = ", ".join(f"{key}={value}" for key, value in manifest.model_config_values.items())
    rows = [
        ("engine", str(folder.path)),
        ("digest", folder.digest),
        ("fingerprint", manifest.fingerprint),
        ("model", f"{manifest.model}, {manifest.dtype}"),
        ("configuration", config),
        ("target", f"{device(manifest.target, manifest.arch)}, {manifest.backend}"),
        ("schedules", "; ".join(forwards(steps) for steps in manifest.schedules) or "none folded"),
        ("weights", manifest.weights),
        *((("ranks", str(shared)),) if (shared := parallel_of(manifest)) else ()),
        ("plan", "everything resident" if manifest.plan is None else str(residency_of(manifest.plan))),
        ("components", manifest.model_path or "not recorded: run takes --model"),
        ("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
    ]
    if manifest.pending:
        rows.append(
            ("pending", f"{', '.join(manifest.pending)}: run h3compile finalize on {manifest.target}")
        )
    console.print(facts(rows))
    console.print()
    console.print(
        table(
            "regions, in the order of their first call",
            ("region", "stage", "calls", "operators", "inputs", "outputs", "artifact"),
            (
                (
                    record.name,
                    _stages(manifest, record),
                    str(len(_calls(manifest, record))),
                    str(operators(_read(folder, record)).total()),
                    ", ".join(port.name for port in record.inputs),
                    ", ".join(port.name for port in record.outputs),
                    size(artifact_size(record, files)) if record.artifact else "graph only",
                )
                for record in in_order(manifest)
            ),
            numbers=("calls", "operators", "artifact"),
        )
    )
    if manifest.variants:
        console.print(
            table(
                "variants, the first that holds serves a step",
                ("region", "variant", "when"),
                (
                    (base, variant.region, str(variant.condition))
                    for base, variants in manifest.variants.items()
                    for variant in variants
                ),
            )
        )
    own = [
        (record.name, name, f"{len(_calls(manifest, record))} x {n}", _computed_by(manifest, record, name))
        for record in in_order(manifest)
        for name, n in own_operators(_read(folder, record)).items()
    ]
    if own:
        console.print(table("operators of ours", ("region", "operator", "calls x count", "computed by"), own))
    console.print(
        table(
            "passes, in order",
            ("pass", "tier", "matches"),
            ((done.spelled, done.tier, _counts(done.matches)) for done in manifest.passes),
        )
    )
    console.print(
        table(
            "weights by the stage that reads them",
            ("partition", "stage", "bytes"),
            (
                (name, stage, size(nbytes))
                for name, partition in manifest.partitions.items()
                for stage, nbytes in weights_by_stage(manifest, partition).items()
            ),
            numbers=("bytes",),
        )
    )
    console.print(
        table(
            "files",
            ("below", "files", "bytes"),
            ((name, str(count), size(nbytes)) for name, (count, nbytes) in folder_sizes(files).items()),
            numbers=("files", "bytes"),
        )
    )


def _print_region(console: Console, folder: EngineFolder, record: RegionRecord) -> None:
    from h3compile.quality.summary import operators, stands_in

    manifest = folder.manifest
    kinds = (("input", record.inputs), ("weight", record.weights), ("output", record.outputs))
    console.print(
        table(
            f"region {record.name}",
            ("kind", "name", "dtype", "shape"),
            ((kind, port.name, port.dtype, _shape(port)) for kind, ports in kinds for port in ports),
        )
    )
    variant = stands_in(manifest, record.name)
    if variant is not None:
        console.print(f"serves the calls of {variant[0]} when {variant[1]}", markup=False)
    counts = operators(_read(folder, record)).most_common()
    console.print(
        table("operators", ("operator", "count"), ((name, str(n)) for name, n in counts), numbers=("count",))
    )
    console.print(
        table(
            "calls",
            ("call", "stage", "reads", "gives", "weights"),
            (
                (
                    str(call.index),
                    call.stage,
                    ", ".join(call.inputs),
                    ", ".join(call.outputs),
                    call.range or "none",
                )
                for call in _calls(manifest, record)
            ),
        )
    )


def _computed_by(manifest: Manifest, record: RegionRecord, operator: str) -> str:
    """The providers of an operator in a lowered region; where nothing is lowered, the references compute."""
    if record.name in manifest.pending:
        return "finalize decides"
    if record.artifact is None:
        return "reference"
    providers = record.artifact.providers
    found = {provider for name, provider in providers.items() if name.partition("[")[0] == operator}
    return ", ".join(sorted(found)) or "reference"


def _calls(manifest: Manifest, record: RegionRecord) -> list[CallRecord]:
    """The calls that the region serves, or may serve as a variant."""
    from h3compile.quality.summary import stands_in

    variant = stands_in(manifest, record.name)
    name = variant[0] if variant is not None else record.name
    return [call for call in manifest.calls if call.region == name]


def _stages(manifest: Manifest, record: RegionRecord) -> str:
    return ", ".join(dict.fromkeys(call.stage for call in _calls(manifest, record)))


def _counts(matches: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in matches.items()) or "none"


def _shape(port: PortRecord) -> str:
    return f"[{', '.join(str(dim) for dim in port.shape)}]"
