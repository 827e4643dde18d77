"""`report.html`: what was built, for a person, in one file that needs no network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from h3compile.engine.manifest import CallRecord, Manifest, PortRecord, RegionRecord
from h3compile.pipeline.manager import PassRun
from h3compile.quality.planned import Planned
from h3compile.quality.summary import artifact_size, folder_sizes, in_order, stands_in, weights_by_stage
from h3compile.quality.units import forwards, size

__all__ = ["write_report"]

_STAGES = {
    "step": "read in every step",
    "request": "read once a request",
    "schedule": "cold: read only for a timestep no table holds",
    "build": "constant: gone after the build",
    "unused": "read by no call",
}


@dataclass(frozen=True)
class _Bar:
    """One row of a bar chart; ``width`` in percent of the longest."""

    label: str
    meaning: str
    before: int
    after: int
    before_width: float
    after_width: float


@dataclass(frozen=True)
class _RegionRow:
    record: RegionRecord
    stages: tuple[str, ...]
    calls: int
    operators: tuple[tuple[str, int], ...]
    artifact: int
    weights: int  # bytes a call binds
    stands_in: tuple[str, str] | None  # for which region and when, of a variant

    @property
    def operator_count(self) -> int:
        return sum(count for _, count in self.operators)


def write_report(
    manifest: Manifest,
    path: Path,
    *,
    passes: Sequence[PassRun],
    operators: Mapping[str, Mapping[str, int]],
    weights_before: Mapping[str, int],
    weights_after: Mapping[str, int] | None = None,
    files: Mapping[str, int],
    seconds: Mapping[str, float] | None = None,
    notes: Sequence[str] = (),
    planned: Planned | None = None,
) -> None:
    """Write the report of a build to ``path``.

    ``operators`` counts the operators of each region by its name; ``weights_before`` gives the bytes of
    one partition's weights by stage as they would be read with no pass run, usually all in ``step``, and
    ``weights_after`` as this engine reads them, by default by the manifest, which has none when weightless;
    ``files`` the bytes of every file of the engine so far, by relative path; ``seconds`` the time of each
    phase of the build; ``planned`` is where its blocks live. The report is itself covered by the engine's
    digest and so cannot show it.
    """
    first = next(iter(manifest.partitions.values()), None)
    after = weights_after or (weights_by_stage(manifest, first) if first else {})
    environment = Environment(
        loader=PackageLoader("h3compile.quality", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=size, port=_port, thousands=lambda count: f"{count:,}")
    text = environment.get_template("report.html.j2").render(
        manifest=manifest,
        fingerprint=manifest.fingerprint or manifest.resolved_fingerprint(),
        schedules=[forwards(steps) for steps in manifest.schedules],
        regions=[_region_row(manifest, region, operators, files) for region in in_order(manifest)],
        passes=[(run, _differences(run)) for run in passes],
        bars=_bars(weights_before, after),
        before_total=sum(weights_before.values()),
        after_total=sum(after.values()),
        step_before=weights_before.get("step", 0),
        step_after=after.get("step", 0),
        folders=folder_sizes(files),
        files_total=sum(files.values()),
        tables_total=sum(nbytes for name, nbytes in files.items() if name.startswith("tables/")),
        seconds=seconds or {},
        notes=notes,
        planned=planned,
    )
    path.write_text(text, encoding="utf-8")


def _region_row(
    manifest: Manifest,
    region: RegionRecord,
    operators: Mapping[str, Mapping[str, int]],
    files: Mapping[str, int],
) -> _RegionRow:
    variant = stands_in(manifest, region.name)
    calls = [call for call in manifest.calls if call.region == (variant[0] if variant else region.name)]
    counts = Counter(operators.get(region.name, {}))
    return _RegionRow(
        record=region,
        stages=tuple(sorted({call.stage for call in calls})),
        calls=len(calls),
        operators=tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0]))),
        artifact=artifact_size(region, files),
        weights=_bound(manifest, calls),
        stands_in=variant,
    )


def _bound(manifest: Manifest, calls: Sequence[CallRecord]) -> int:
    sizes = [
        record.nbytes
        for partition in manifest.partitions.values()
        for call in calls
        for name, record in partition.ranges.items()
        if name == call.range
    ]
    return max(sizes, default=0)


def _bars(before: Mapping[str, int], after: Mapping[str, int]) -> list[_Bar]:
    longest = max((*before.values(), *after.values(), 1))
    return [
        _Bar(
            stage,
            meaning,
            before.get(stage, 0),
            after.get(stage, 0),
            100 * before.get(stage, 0) / longest,
            100 * after.get(stage, 0) / longest,
        )
        for stage, meaning in _STAGES.items()
        if before.get(stage) or after.get(stage)
    ]


def _differences(run: PassRun) -> list[tuple[str, int]]:
    """Operators whose count a pass changed, the largest change first."""
    names = {*run.ops_before, *run.ops_after}
    changes = [(name, run.ops_after.get(name, 0) - run.ops_before.get(name, 0)) for name in names]
    return sorted((change for change in changes if change[1]), key=lambda item: (-abs(item[1]), item[0]))


def _port(port: PortRecord) -> str:
    return f"{port.dtype} [{', '.join(str(dim) for dim in port.shape)}]"
