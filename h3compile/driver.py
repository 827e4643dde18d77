"""The driver: a checkpoint goes in, an engine comes out.

Everything heavy is done one call's weights at a time, so a build needs the memory of a block or two,
whatever the depth of the model.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from h3compile.backends.base import Backend
from h3compile.backends.providers import check_legal, check_providers
from h3compile.backends.select import select
from h3compile.engine.layout import copied_nbytes, fill, range_digest
from h3compile.engine.links import record_files
from h3compile.engine.loader import EngineFolder, open_engine
from h3compile.engine.manifest import Manifest, PartitionRecord, PassRecord, RangeRecord, TableRecord
from h3compile.engine.records import (
    call_records,
    dim_records,
    parallel_record,
    plan_record,
    port_record,
    range_of,
    region_record,
    stage_of,
    variant_records,
)
from h3compile.engine.writer import EngineWriter
from h3compile.errors import BuildError, nearest
from h3compile.lower import Lowered, lower, own_dense, versions
from h3compile.models import h3
from h3compile.models.checkpoint import (
    RELEASE,
    Partition,
    PipelineFolder,
    check,
    find_checkpoint,
    open_partition,
    read_partition_config,
)
from h3compile.models.trace import parameter_shapes, trace
from h3compile.passes.sp import SequenceParallel
from h3compile.pipeline.base import Pass
from h3compile.pipeline.instruments import Dump, Report
from h3compile.pipeline.manager import Manager, PassRun
from h3compile.pipeline.registry import Registry
from h3compile.pipeline.spelling import resolve, taken_out
from h3compile.plan.work_of import activations_of
from h3compile.program.printer import print_program
from h3compile.program.program import Call, Program
from h3compile.program.serialize import dtype_name, region_to_json
from h3compile.program.stages import Stage
from h3compile.progress import Progress, Silent
from h3compile.quality.planned import planned
from h3compile.quality.report import write_report
from h3compile.quality.summary import operators, program_weights_by_stage
from h3compile.runtime.executors import eager
from h3compile.runtime.fold import ScheduleCall, fold
from h3compile.runtime.timesteps import to_bits
from h3compile.targets import Target, present, resolve_target

__all__ = ["BuildConfig", "build", "configured"]


class BuildConfig(BaseModel):
    """The options of a build, by the names that recipes and the command line share.

    ``gpus`` share a clip by the pass `sp`, which is added where it was not asked for; ``steps`` are grid
    points of the schedules to fold (N points are N - 1 forwards); ``link`` leaves weights in the
    checkpoint; ``weightless`` builds graphs only; ``allow`` names passes that may match nothing;
    ``providers`` names, by operator, who must compute it on a GPU.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = RELEASE
    passes: str = ""
    target: str = "auto"
    gpus: int | None = None
    backend: str = "inductor"
    steps: tuple[int, ...] = (50,)
    partitions: tuple[str, ...] = ("transformer",)
    weightless: bool = False
    link: bool = False
    overwrite: bool = False
    allow: tuple[str, ...] = ()
    providers: Mapping[str, str] = {}
    dump: Path | None = None
    output: Path | None = None

    @field_validator("gpus")
    @classmethod
    def _gpus(cls, gpus: int | None) -> int | None:
        if gpus is not None and gpus < 1:
            raise ValueError(f"{gpus} GPUs share nothing: at least 1")
        return gpus

    @field_validator("steps")
    @classmethod
    def _steps(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if any(count < 2 for count in steps):
            raise ValueError("a schedule has at least 2 grid points")
        return tuple(sorted(set(steps)))

    @field_validator("partitions")
    @classmethod
    def _partitions(cls, partitions: tuple[str, ...]) -> tuple[str, ...]:
        for name in partitions:
            if name not in h3.PARTITIONS:
                raise ValueError(f"{name!r} is no partition: {nearest(name, h3.PARTITIONS)}")
        if not partitions or len(set(partitions)) != len(partitions):
            raise ValueError("name each partition once")
        return partitions


def configured(options: Mapping[str, object]) -> BuildConfig:
    """The options of a build, checked; `BuildError` with the first complaint in one line."""
    try:
        return BuildConfig.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(str(part) for part in first["loc"]) or "options"
        if first["type"] == "value_error":  # our own sentence, which says it all
            raise BuildError(option, first["msg"].removeprefix("Value error, ")) from error
        raise BuildError(f"{option} cannot be {first['input']!r}", first["msg"]) from error


def build(
    model: str = RELEASE,
    *,
    passes: str = "",
    target: str = "auto",
    gpus: int | None = None,
    output: Path | str | None = None,
    backend: str = "inductor",
    steps: Sequence[int] = (50,),
    partitions: Sequence[str] = ("transformer",),
    weightless: bool = False,
    link: bool = False,
    overwrite: bool = False,
    allow: Sequence[str] = (),
    providers: Mapping[str, str] | None = None,
    dump: Path | None = None,
    progress: Progress | None = None,
) -> EngineFolder:
    """Compile a checkpoint into an engine; the options are those of `BuildConfig`.

    Returns the finished engine, opened. Raises `H3CompileError` with one line for everything a user can
    get wrong; whatever happens, nothing half-written stays behind.
    """
    config = configured(
        {
            "model": model,
            "passes": passes,
            "target": target,
            "gpus": gpus,
            "output": output,
            "backend": backend,
            "steps": steps,
            "partitions": partitions,
            "weightless": weightless,
            "link": link,
            "overwrite": overwrite,
            "allow": allow,
            "providers": providers or {},
            "dump": dump,
        }
    )
    return _Build(config, progress or Silent()).run()


def _shared(text: str, gpus: int | None, target: Target) -> list[Pass]:
    """The passes of ``text`` for so many GPUs; without a number, for those here where `sp` was told none."""
    passes, _ = resolve(text, Registry.default())
    sharing = next((one for one in passes if isinstance(one, SequenceParallel)), None)
    if sharing is None:
        if gpus is None or gpus == 1:
            return passes
        if SequenceParallel.name in taken_out(text):
            raise BuildError(f"{gpus} GPUs share rows by sp, and -sp takes it out", "leave one of them out")
        return [*passes, SequenceParallel(ranks=gpus)]
    if gpus is None:
        if sharing.told is not None:
            return passes
        if target.kind != "cuda" or not present(target):
            raise BuildError(
                f"sp shares rows among GPUs, and none of {target.name} is here to count",
                "say how many: --gpus N, or sp(ranks=N)",
            )
        gpus = torch.cuda.device_count()
    told = sharing.for_gpus(gpus)
    return [told if one is sharing else one for one in passes]


class _Build:
    def __init__(self, config: BuildConfig, progress: Progress) -> None:
        self.config = config
        self.progress = progress
        # Names and options are resolved first: a typing error must not cost a minute of tracing.
        self.target: Target = resolve_target(config.target)
        self.backend: Backend = select(config.backend)
        check_providers(config.providers)
        if config.providers and not (self.backend.lowers and self.target.kind == "cuda"):
            raise BuildError(
                f"{self.target.name} with the backend {self.backend.name} takes no providers",
                "leave them out, or build for a GPU with inductor",
            )
        chosen = _shared(config.passes, config.gpus, self.target)
        for item in chosen:
            item.check(config.partitions)
        instruments = [Report(progress)]
        self.manager = Manager(
            chosen,
            instruments=[*instruments, Dump(config.dump)] if config.dump else instruments,
            allow_unmatched=config.allow,
        )
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []

    def run(self) -> EngineFolder:
        self._phase("checkpoint", None)
        folder, partitions, model_config, dtypes = self._checkpoint()
        output = self.config.output or Path(f"{_stem(self.config.model)}.h3e")
        with EngineWriter(output, overwrite=self.config.overwrite) as writer:
            for path in writer.leftovers():
                if path.suffix == ".previous":
                    self._note(
                        f"{path} is the engine that a build was replacing when it was killed: rename it "
                        "back, or remove it where you have a newer one"
                    )
                    continue
                self._note(
                    f"{path} is left of a build that was killed: remove it, if no other machine writes it"
                )
            self._phase("trace", None)
            traced = trace(model_config, dtypes)
            self._phase("passes", len(self.manager.passes))
            program, runs = self.manager.run(traced, self.target)
            for region in program.regions.values():
                writer.write_text(region_record(region).graph, region_to_json(region))
            writer.write_text("ir/00_traced.txt", print_program(traced))
            writer.write_text("ir/01_final.txt", print_program(program))
            lowered = self._lower(program, writer)
            records = self._weights(program, partitions, writer)
            manifest = self._manifest(program, runs, folder, records, lowered)
            self._report(manifest, program, traced, runs, writer)
            self._phase("finish", None)
            writer.commit(manifest)
        return open_engine(output, verify=False)

    def _phase(self, name: str, total: int | None) -> None:
        now = time.perf_counter()
        if self.seconds:
            last = next(reversed(self.seconds))
            self.seconds[last] = now - self.seconds[last]
        self.seconds[name] = now
        self.progress.phase(name, total)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.progress.note(text)

    def _checkpoint(
        self,
    ) -> tuple[PipelineFolder | None, dict[str, Partition], h3.Config, dict[str, torch.dtype]]:
        config = self.config
        if config.weightless:
            return self._weightless_checkpoint()
        folder = find_checkpoint(config.model)
        partitions = {name: open_partition(folder, name) for name in config.partitions}
        first = partitions[config.partitions[0]]
        shapes = parameter_shapes(first.config)
        dtypes: dict[str, torch.dtype] = {}
        for partition in partitions.values():
            if partition.config != first.config:
                raise BuildError(
                    f"{partition.folder} and {first.folder} have different configurations",
                    "build one engine for each, with --partition",
                )
            check(partition, {name: (shape, dtypes.get(name)) for name, shape in shapes.items()})
            dtypes |= {name: partition.tensors.info(name).dtype for name in shapes}
        unusual = sorted(
            {dtype_name(dtype) for dtype in dtypes.values()} - {"float32", "bfloat16", "float16"}
        )
        if unusual:
            raise BuildError(
                f"{first.folder} stores weights as {unusual[0]}", "give the BF16 or an FP32 release"
            )
        return folder, partitions, first.config, dtypes

    def _weightless_checkpoint(
        self,
    ) -> tuple[PipelineFolder | None, dict[str, Partition], h3.Config, dict[str, torch.dtype]]:
        # Graphs need the configuration alone, and that of the release is known.
        name = self.config.model
        model_config = (
            h3.RELEASE_CONFIG if name == RELEASE else read_partition_config(name, self.config.partitions[0])
        )
        dtypes = {weight: h3.release_dtype(weight) for weight in parameter_shapes(model_config)}
        self._note("weightless: graphs only, weights and tables are left out")
        return None, {}, model_config, dtypes

    def _lower(self, program: Program, writer: EngineWriter) -> Lowered:
        stages = stage_of(program)
        work = [
            program.regions[form]
            for name in dict.fromkeys(call.region for call in program.calls)
            if any(stages[call.name] is not Stage.SCHEDULE for call in program.calls_of(name))
            for form in program.forms_of(name)
        ]
        if not self.backend.lowers:
            return Lowered({}, ())
        check_legal(work, program.dims, self.target.arch, self.config.providers)
        if not present(self.target):
            self._note(f"{self.target.name} is not in this machine: run `h3compile finalize` where it is")
            return Lowered({}, tuple(region.name for region in work))
        self._phase("lower", len(work))
        return lower(
            work, program.dims, self.backend, self.target, writer, self.progress, self.config.providers
        )

    def _weights(
        self, program: Program, partitions: Mapping[str, Partition], writer: EngineWriter
    ) -> dict[str, PartitionRecord]:
        calls = [call for call in program.calls if call.weights]
        records: dict[str, PartitionRecord] = {}
        layouts = {name: self._layouts(program, calls, partition) for name, partition in partitions.items()}
        writer.require_space(sum(copied_nbytes(r) for found in layouts.values() for r in found.values()))
        for name, partition in partitions.items():
            self._phase(f"weights of {name}", len(calls))
            ranges: dict[str, RangeRecord] = {}
            for call in calls:
                record = layouts[name][call.name]
                if self.config.link:
                    record = record.model_copy(update={"content": _content(program, call, record, partition)})
                ranges[call.name] = writer.write_range(
                    record,
                    _copied(program, call, record, partition),
                    f"weights/{name}/{call.name}.safetensors",
                )
                self.progress.advance()
            records[name] = PartitionRecord(
                checkpoint=str(partition.folder),
                files=record_files(partition.tensors.files()),
                digest=partition.tensors.digest(),
                ranges=ranges,
                tables=self._tables(program, partition, writer) if program.tables else None,
            )
        return records

    def _layouts(
        self, program: Program, calls: Sequence[Call], partition: Partition
    ) -> dict[str, RangeRecord]:
        keys = partition.tensors.keys() if self.config.link else ()
        files = {key: partition.tensors.info(key).file for key in keys}
        return {call.name: range_of(program, call, files or None) for call in calls}

    def _tables(self, program: Program, partition: Partition, writer: EngineWriter) -> TableRecord:
        device = torch.device("cuda" if self.target.kind == "cuda" and present(self.target) else "cpu")
        stages = stage_of(program)
        calls = [call for call in program.calls if stages[call.name] is Stage.SCHEDULE]
        by_name = {call.name: call for call in calls}
        timestep = program.facts.timestep

        def weights(name: str) -> list[torch.Tensor]:
            return [program.weights[weight].evaluate(partition.tensors) for weight in by_name[name].weights]

        executors = {name: eager(program.regions[name], device) for name in {call.region for call in calls}}
        timesteps = _timesteps(self.config.steps)
        self._phase(f"tables of {partition.name}, {len(timesteps)} timesteps", len(calls))
        folded = fold(
            [ScheduleCall(call.name, call.inputs, call.outputs, executors[call.region]) for call in calls],
            timesteps,
            timestep=timestep.name,
            dtype=timestep.dtype,
            tables=program.tables,
            weights=weights,
            device=device,
        )
        return writer.write_tables(f"tables/{partition.name}", timesteps, self._advancing(folded))

    def _advancing(
        self, items: Iterator[tuple[str, dict[str, torch.Tensor]]]
    ) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        for item in items:
            yield item
            self.progress.advance()

    def _manifest(
        self,
        program: Program,
        runs: Sequence[PassRun],
        folder: PipelineFolder | None,
        partitions: Mapping[str, PartitionRecord],
        lowered: Lowered,
    ) -> Manifest:
        facts = program.facts
        regions = [region_record(region) for region in program.regions.values()]
        return Manifest(
            model=facts.name,
            model_config_values=dict(facts.config),
            dtype=dtype_name(program.port_of("encoder_hidden_states").dtype),
            inputs=tuple(map(port_record, program.inputs)),
            input_stages={name: stage.value for name, stage in program.input_stages.items()},
            outputs=program.outputs,
            dims=dim_records(program),
            regions=tuple(r.model_copy(update={"artifact": lowered.artifacts.get(r.name)}) for r in regions),
            calls=call_records(program),
            tables=program.tables,
            variants=variant_records(program),
            measures=program.measures,
            plan=plan_record(program),
            parallel=parallel_record(program),
            activations=self._activations(program, lowered),
            partitions=dict(partitions),
            passes=tuple(
                PassRecord(spelled=run.spelled, tier=run.tier.value, matches=run.matches) for run in runs
            ),
            backend=self.backend.name,
            providers=dict(self.config.providers),
            target=self.target.name,
            arch=self.target.arch,
            versions=versions(),
            model_path=str(folder.root) if folder else None,
            schedules=self.config.steps if program.tables and partitions else (),
            weights="none" if not partitions else "linked" if self.config.link else "copied",
            pending=lowered.pending,
        )

    def _activations(self, program: Program, lowered: Lowered) -> tuple[str, ...]:
        lowers = self.backend.lowers
        own = own_dense(lowered.artifacts, self.config.providers, self.target.arch)
        try:
            return tuple(map(str, activations_of(program, own=own, fused=lowers, placed=lowers)))
        except ValueError as error:  # a plugin may have sizes of any form
            self._note(f"how much memory a forward needs is not known, and not checked by loads: {error}")
            return ()

    def _report(
        self,
        manifest: Manifest,
        program: Program,
        traced: Program,
        runs: Sequence[PassRun],
        writer: EngineWriter,
    ) -> None:
        self._phase("report", None)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "report.html"
            write_report(
                manifest,
                path,
                passes=runs,
                operators={name: operators(region) for name, region in program.regions.items()},
                weights_before={"step": sum(weight.nbytes for weight in traced.weights.values())},
                files={name: record.size for name, record in writer.files.items()},
                weights_after=program_weights_by_stage(program),
                seconds={name: spent for name, spent in self.seconds.items() if name != "report"},
                notes=self.notes,
                planned=planned(program, self.target, max(self.config.steps)),
            )
            writer.add_file("report.html", path)


def _copied(
    program: Program, call: Call, record: RangeRecord, partition: Partition
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a call that the engine holds itself, one at a time."""
    for slot, name in zip(record.slots, call.weights, strict=True):
        if slot.link is None:
            yield slot.name, program.weights[name].evaluate(partition.tensors)


def _content(program: Program, call: Call, record: RangeRecord, partition: Partition) -> str:
    """The digest of all weights of a call, links included."""
    buffer = torch.zeros(record.nbytes, dtype=torch.uint8)
    for slot, name in zip(record.slots, call.weights, strict=True):
        fill(buffer, slot, program.weights[name].evaluate(partition.tensors))
    return range_digest(buffer)


def _timesteps(steps: Sequence[int]) -> tuple[int, ...]:
    """Every t that the schedules of these grid points ask for, as float32 bits, ascending."""
    values = set(h3.CONDITION_TIMESTEPS)
    for count in steps:
        for shift in h3.SHIFTS.values():
            values |= set(h3.schedule_timesteps(count, shift))
    # For t >= 0 the order of the bits is that of the values.
    return tuple(sorted(set(to_bits(sorted(values)))))


def _stem(model: str) -> str:
    return Path(model).name.lower() or "engine"
