"""`engine.json`: everything a loader needs to know before it touches another file of the engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from h3compile.program.conditions import Condition, Noisier, Shorter

__all__ = [
    "MANIFEST",
    "RANGE_KEY",
    "SCHEMA_VERSION",
    "ArtifactRecord",
    "CallRecord",
    "CheckpointFile",
    "DimRecord",
    "FileRecord",
    "KindRecord",
    "Manifest",
    "NoisierRecord",
    "ParallelRecord",
    "PartitionRecord",
    "PassRecord",
    "PlanRecord",
    "PortRecord",
    "RangeRecord",
    "RegionRecord",
    "ShorterRecord",
    "SlotRecord",
    "TableRecord",
    "VariantRecord",
    "fingerprint_of",
]

# 2 added ``variants`` and ``measures``, 3 ``plan`` and ``parallel``, 4 ``activations``.
SCHEMA_VERSION = 4
MANIFEST = "engine.json"
RANGE_KEY = "range"  # the one tensor in the file of a range

# Fields that say how a build came out, not what was asked for.
_OUTCOME = ("fingerprint", "files", "pending")


class _Record(BaseModel):
    # A field this version does not know means a newer writer: refuse it rather than ignore it.
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Record):
    """Size in bytes and SHA-256 of one file of the engine."""

    size: int
    sha256: str


class PortRecord(_Record):
    """A tensor port: dtype by its torch name, shape in numbers and dimension names."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class DimRecord(_Record):
    """A length that is free at run time: what kernels were tuned for, and the legal range."""

    hint: int
    smallest: int = 1
    largest: int


class ArtifactRecord(_Record):
    """A lowered region: which backend made it, for which device, and its files."""

    backend: str
    target: str
    path: str  # relative to the engine: a file or a folder
    providers: dict[
        str, str
    ] = {}  # our operators, with the static shape where it matters -> who computes them


class RegionRecord(_Record):
    """A region: its ports, its graph (always kept), and its artifact once it is lowered."""

    name: str
    inputs: tuple[PortRecord, ...]
    weights: tuple[PortRecord, ...]
    outputs: tuple[PortRecord, ...]
    graph: str  # relative path of the JSON graph
    artifact: ArtifactRecord | None = None


class CallRecord(_Record):
    """One execution of a region, in program order; ``range`` names the weights it binds.

    ``stage`` is ``schedule``, ``request`` or ``step``.
    """

    region: str
    index: int
    stage: Literal["schedule", "request", "step"]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    range: str | None = None


class ShorterRecord(_Record):
    """A step whose sequence has fewer than ``than`` of the free length ``dim``."""

    kind: Literal["shorter"] = "shorter"
    dim: str
    than: int = Field(gt=0)


class NoisierRecord(_Record):
    """A step whose largest sigma, 1 - its smallest timestep, is above ``than``."""

    kind: Literal["noisier"] = "noisier"
    than: float = Field(ge=0.0, le=1.0)


class VariantRecord(_Record):
    """A region that serves the calls of another in the steps where ``when`` holds."""

    region: str
    when: ShorterRecord | NoisierRecord = Field(discriminator="kind")

    @property
    def condition(self) -> Condition:
        """The condition, to be asked and to be printed."""
        if self.when.kind == "shorter":
            return Shorter(self.when.dim, self.when.than)
        return Noisier(self.when.than)


class SlotRecord(_Record):
    """One weight inside a range: byte offset, shape, strides in elements, dtype.

    ``link`` is the (file, key) of the checkpoint tensor it is, when the engine does not copy it.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    link: tuple[str, str] | None = None


class RangeRecord(_Record):
    """The weights of one call as one contiguous, aligned range of bytes.

    ``slots`` are in the order of the region's weight ports. ``path`` is the safetensors file that
    holds the copied bytes; a fully linked range has none. ``sha256`` is that of the file, by which two
    engines (or two partitions) in one process share what is equal. A range with links has ``content``
    instead, the SHA-256 of all its bytes, by which a checkpoint that changed is noticed.
    """

    nbytes: int
    slots: tuple[SlotRecord, ...]
    path: str | None = None
    sha256: str | None = None
    content: str | None = None

    @property
    def identity(self) -> str | None:
        """Equal for ranges of equal bytes."""
        return self.sha256 or self.content


class CheckpointFile(_Record):
    """A checkpoint file as it was when the engine was built.

    ``header_sha256`` covers the safetensors header: names, shapes and offsets.
    """

    size: int
    mtime_ns: int
    header_sha256: str


class TableRecord(_Record):
    """Modulation tables folded at build.

    ``timesteps`` are the float32 bit patterns of the folded t, ascending in value. ``files`` maps a
    schedule call's name to the safetensors file with one tensor a call output, whose leading
    dimension runs over ``timesteps``.
    """

    timesteps: tuple[int, ...]
    files: dict[str, str]


class PartitionRecord(_Record):
    """One set of weights for the program: a checkpoint partition such as ``transformer``."""

    checkpoint: str | None  # the folder it was read from; None for a weightless build
    files: dict[str, CheckpointFile]
    digest: str | None  # over names and header digests of all files
    ranges: dict[str, RangeRecord]
    tables: TableRecord | None = None


class PlanRecord(_Record):
    """Where the weights of the repeated step calls live; a load may ask for another plan.

    ``blocks`` are those calls in step order. ``resident`` ones stay on the device; the others take turns in
    ``slots`` places there. ``mode`` says who holds a streamed block on the host: every rank all of it, or
    each its shard, gathered on the device in ``pieces`` parts.
    """

    blocks: tuple[str, ...]
    resident: tuple[str, ...]
    slots: int = Field(ge=0)
    mode: Literal["local", "allgather"] = "local"
    pieces: int = Field(default=1, ge=1)


class KindRecord(_Record):
    """A kind of row that ranks share: the input that says where its rows lie, and its length."""

    index: str
    dim: str


class ParallelRecord(_Record):
    """How many ranks share the rows of a sequence, and how they exchange them.

    ``ulysses`` ranks share the heads of a stretch, ``ring`` stretches pass their keys round. Those ``inputs``
    of the engine that name a rank's rows follow from this: each rank makes them from the layout it is given.
    """

    ulysses: int = Field(ge=1)
    ring: int = Field(ge=1)
    exchange: Literal["plain", "fp8"]
    rows: str
    kinds: tuple[KindRecord, ...]


class PassRecord(_Record):
    """A pass as it ran: spelled with its options, its tier, and what it matched."""

    spelled: str
    tier: Literal["exact", "rounding", "lossy"]
    matches: dict[str, int]


class Manifest(_Record):
    """The root record of an engine folder."""

    schema_version: int = SCHEMA_VERSION
    model: str
    model_config_values: dict[str, int | float | tuple[int, ...]]
    dtype: str  # what `module.dtype` answers
    inputs: tuple[PortRecord, ...]
    input_stages: dict[str, str]
    outputs: tuple[str, ...]
    dims: dict[str, DimRecord]
    regions: tuple[RegionRecord, ...]
    calls: tuple[CallRecord, ...]
    tables: tuple[str, ...]  # schedule-stage values that steps read
    # Region -> what may stand in for it; the first whose condition holds does, for all calls of the step.
    variants: dict[str, tuple[VariantRecord, ...]] = Field(default_factory=dict)
    measures: tuple[str, ...] = ()  # step-stage values kept for reports: int32 [2], skipped and considered
    plan: PlanRecord | None = None  # None: every weight of request and step stays on the device
    parallel: ParallelRecord | None = None  # None: one rank has all rows
    # Bytes that live at once in a forward of one rank, beside weights and tables: the largest of these
    # polynomials in ``dims``, such as ``107912*rows + 392*video_rows``. Empty: nobody knows.
    activations: tuple[str, ...] = ()
    partitions: dict[str, PartitionRecord]
    passes: tuple[PassRecord, ...]
    backend: str
    providers: dict[str, str] = {}  # what the user named: operator -> provider
    target: str
    arch: str  # sm_90a, cpu-avx512, ...
    versions: dict[str, str]
    model_path: str | None  # the pipeline's folder, for `run` and `serve`
    schedules: tuple[int, ...]  # the step counts (grid points) folded at build
    weights: Literal["copied", "linked", "none"]
    pending: tuple[str, ...] = ()  # regions whose final lowering waits for the target
    fingerprint: str = ""
    files: dict[str, FileRecord] = Field(default_factory=dict)

    def resolved_fingerprint(self) -> str:
        """SHA-256 over the whole resolved configuration: every field but the outcome fields.

        Built from the complete record, so a field added later is covered without being listed.
        """
        return fingerprint_of(self.model_dump(mode="json"))

    def paths(self) -> tuple[str, ...]:
        """Every path the record refers to, without repetition; an artifact's may be a folder."""
        found = [region.graph for region in self.regions]
        found += [region.artifact.path for region in self.regions if region.artifact]
        for partition in self.partitions.values():
            found += [record.path for record in partition.ranges.values() if record.path]
            found += partition.tables.files.values() if partition.tables else ()
        return tuple(dict.fromkeys(found))

    def encode(self) -> bytes:
        """The text of ``engine.json``; the same record always gives the same bytes."""
        return (json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1) + "\n").encode()

    def digest(self) -> str:
        """SHA-256 of ``engine.json``, which names the digest of every other file.

        This is the value a user may pin, and what ``sha256sum engine.json`` prints: it stands for the
        whole engine.
        """
        return hashlib.sha256(self.encode()).hexdigest()


def fingerprint_of(record: Mapping[str, object]) -> str:
    """`Manifest.resolved_fingerprint` of a record as JSON has it.

    A record read from an older engine lacks the fields added since, so it is judged as it was written.
    """
    resolved = {field: value for field, value in record.items() if field not in _OUTCOME}
    return hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()
