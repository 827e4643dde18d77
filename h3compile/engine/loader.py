"""Opens an engine folder: every check comes before any of its content is used."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import torch
from pydantic import ValidationError

from h3compile.engine.layout import copied, fill, range_digest, slot_bytes, view
from h3compile.engine.links import LinkedCheckpoint
from h3compile.engine.manifest import (
    MANIFEST,
    RANGE_KEY,
    SCHEMA_VERSION,
    FileRecord,
    Manifest,
    PartitionRecord,
    RangeRecord,
    SlotRecord,
    fingerprint_of,
)
from h3compile.errors import CheckpointError, EngineError, nearest
from h3compile.program.shard import Shard

__all__ = ["EngineFolder", "open_engine"]

_MEND = "build or copy the engine again"
_THREADS = 8  # digests are bound by memory beyond this


def open_engine(path: Path, *, expect: str | None = None, verify: bool = True) -> EngineFolder:
    """Opens an engine after checking it; nothing in it is executed or unpickled.

    ``expect`` is the digest the user wants to see: `EngineFolder.digest` of the engine that was built. With
    ``verify`` every file's SHA-256 is computed, and a linked checkpoint is compared with its record;
    without, only that the files are there, in their sizes.

    Raises `EngineError` naming the file at fault.
    """
    if not path.exists():
        raise EngineError(f"there is no engine at {path}", "build one with h3compile build")
    if not (path / MANIFEST).is_file():
        raise EngineError(f"{path} is not an engine", f"give a folder with {MANIFEST} in it")
    manifest, digest = _read_manifest(path / MANIFEST)
    if expect is not None and expect.strip().lower().removeprefix("sha256:") != digest:
        raise EngineError(f"{path} has the digest {digest}, not the expected one", "use the engine you meant")
    _check_references(path, manifest)
    _check_presence(path, manifest.files)
    engine = EngineFolder(path, manifest, digest, verify=verify)
    if verify:
        _check_digests(path, manifest.files)
        for partition in manifest.partitions:
            engine.check_checkpoint(partition)
    return engine


class EngineFolder:
    """An opened engine: ``path``, ``manifest``, and ``digest``, the SHA-256 of its ``engine.json``."""

    def __init__(self, path: Path, manifest: Manifest, digest: str, *, verify: bool = True) -> None:
        self.path = path
        self._verify = verify
        self.manifest = manifest
        self.digest = digest
        # Weights are read long after they were checked: what was written to since is not what was checked.
        self._written = {name: (path / name).stat().st_mtime_ns for name in manifest.files}
        self._links = {
            name: LinkedCheckpoint(Path(record.checkpoint), record.files)
            for name, record in manifest.partitions.items()
            if record.checkpoint is not None
        }

    def file(self, path: str) -> Path:
        """Where a listed file, or a folder of listed files, lies; `EngineError` when none is listed."""
        if path not in self.manifest.files and not self._below(path):
            raise EngineError(f"{self.path} lists no file {path}", _MEND)
        return self.path / path

    def content_digest(self, path: str) -> str:
        """SHA-256 of a file, or of the names and digests in a folder: equal only for equal content."""
        if path in self.manifest.files:
            return self.manifest.files[path].sha256
        below = self._below(path)
        if not below:
            raise EngineError(f"{self.path} lists no file {path}", _MEND)
        lines = "".join(f"{below[name]}  {name}\n" for name in sorted(below))
        return hashlib.sha256(lines.encode()).hexdigest()

    def read_text(self, path: str) -> str:
        """The content of a listed UTF-8 file."""
        return self.file(path).read_text("utf-8")

    def load_range(self, partition: str, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """The weights of one call as a flat uint8 tensor on the CPU, for `layout.view`.

        ``out``, where given, is filled and returned: uint8, contiguous, on the CPU (pinned or not), of the
        range's length. Copied slots come from the engine, linked ones from the checkpoint, which is compared
        with its record first. Raises `EngineError` when the range does not exist or cannot be read.
        """
        record = self._range(partition, name)
        buffer = torch.empty(record.nbytes, dtype=torch.uint8) if out is None else out
        _require_buffer(buffer, record)
        links = [slot for slot in record.slots if slot.link]
        if not links and record.path:
            self._shard(record.path).read_into(RANGE_KEY, buffer)
            return buffer
        buffer.zero_()  # the gaps, so that equal weights are equal bytes
        if record.path:
            data = self._shard(record.path).read(RANGE_KEY)
            for slot, offset in copied(record):
                target = slot_bytes(buffer, slot)
                target.copy_(data[offset : offset + target.numel()])
        for slot in links:
            self._read_link(partition, slot, buffer)
        # Size, time and header of a file can stay while its numbers change.
        if self._verify and record.content and range_digest(buffer) != record.content:
            raise EngineError(
                f"the checkpoint this engine links to has changed: other weights for {name} of {partition}",
                "build the engine again, or with copied weights",
            )
        return buffer

    def load_spans(
        self, partition: str, name: str, spans: Sequence[tuple[int, int]], out: torch.Tensor
    ) -> torch.Tensor:
        """Parts of a range into ``out``, each of the ``spans`` (first byte, end) into an equal share of it.

        Only these are read where the engine holds a copy of the weights; what a span does not fill of its
        share is zero. Raises `EngineError` as `load_range`.
        """
        record = self._range(partition, name)
        shares = out.chunk(len(spans))
        copied = record.path is not None and not any(slot.link for slot in record.slots)
        whole = None if copied else self.load_range(partition, name)
        shard = self._shard(record.path) if copied and record.path else None
        for (start, end), share in zip(spans, shares, strict=True):
            share[end - start :].zero_()
            if shard is not None:
                shard.read_part(RANGE_KEY, start, share[: end - start])
            elif whole is not None:
                share[: end - start].copy_(whole[start:end])
        return out

    def load_table(self, partition: str, call: str) -> dict[str, torch.Tensor]:
        """The folded values of one schedule call, on the CPU, by value name: dimension 0 is the timestep."""
        tables = self._partition(partition).tables
        if tables is None or call not in tables.files:
            raise EngineError(f"{self.path} has no table for {call}", _MEND)
        shard = self._shard(tables.files[call])
        return shard.read_many(shard.keys())

    def check_checkpoint(self, partition: str) -> None:
        """Raises `EngineError` when a checkpoint that ``partition`` links to is gone or has changed."""
        record = self._partition(partition)
        if any(slot.link for found in record.ranges.values() for slot in found.slots):
            self._linked(partition).check()

    def _read_link(self, partition: str, slot: SlotRecord, buffer: torch.Tensor) -> None:
        assert slot.link is not None
        file, key = slot.link
        shard = self._linked(partition).shard(file)
        if view(buffer, slot).is_contiguous():
            shard.read_into(key, slot_bytes(buffer, slot))
        else:
            fill(buffer, slot, shard.read(key))

    def _linked(self, partition: str) -> LinkedCheckpoint:
        if partition not in self._links:
            raise EngineError(f"{self.path} links to a checkpoint that it does not name", _MEND)
        return self._links[partition]

    def _partition(self, name: str) -> PartitionRecord:
        partitions = self.manifest.partitions
        if name not in partitions:
            raise EngineError(f"{self.path} has no partition {name!r}", nearest(name, partitions))
        return partitions[name]

    def _range(self, partition: str, name: str) -> RangeRecord:
        ranges = self._partition(partition).ranges
        if name not in ranges:
            why = "it was built without weights" if self.manifest.weights == "none" else _MEND
            raise EngineError(f"{self.path} holds no weights for {name!r} of {partition}", why)
        return ranges[name]

    def _shard(self, path: str) -> Shard:
        try:
            shard = Shard(self.file(path), path)
        except CheckpointError as error:
            raise EngineError(error.cause, _MEND) from error
        if shard.facts.mtime_ns != self._written[path]:
            raise EngineError(f"{self.path / path} has changed since the engine was opened", "load it again")
        return shard

    def _below(self, folder: str) -> dict[str, str]:
        """Names inside ``folder`` -> SHA-256."""
        prefix = f"{folder}/"
        return {
            name.removeprefix(prefix): record.sha256
            for name, record in self.manifest.files.items()
            if name.startswith(prefix)
        }


def _read_manifest(path: Path) -> tuple[Manifest, str]:
    try:
        data = path.read_bytes()
        record = json.loads(data)
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read ({error})", _MEND) from None
    version = record.get("schema_version") if isinstance(record, dict) else None
    if not isinstance(version, int) or version < 1:
        raise EngineError(f"{path} is not the record of an engine", _MEND)
    if version > SCHEMA_VERSION:
        raise EngineError(
            f"{path.parent} was built by a newer h3compile (schema {version}, not {SCHEMA_VERSION})",
            "upgrade h3compile",
        )
    try:
        manifest = Manifest.model_validate(record)
    except ValidationError as error:
        raise EngineError(f"{path} {_describe(error)}", _MEND) from None
    if manifest.fingerprint != fingerprint_of(record):
        raise EngineError(f"{path} has been changed: its fingerprint is another", _MEND)
    return manifest, hashlib.sha256(data).hexdigest()


def _describe(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    match first["type"]:
        case "extra_forbidden":
            return f"has a field this h3compile does not know: {field}"
        case "missing":
            return f"lacks the field {field}"
    return f"has a wrong value in {field} ({first['msg']})"


def _check_references(path: Path, manifest: Manifest) -> None:
    for name in manifest.files:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or str(pure) != name or "\\" in name:
            raise EngineError(f"{path / MANIFEST} names {name!r}, which leads out of the engine", _MEND)
    for name in manifest.paths():
        if name not in manifest.files and not any(file.startswith(f"{name}/") for file in manifest.files):
            raise EngineError(f"{path / MANIFEST} refers to {name}, which is not among its files", _MEND)
    known = {region.name for region in manifest.regions}
    for name in manifest.pending:
        if name not in known:
            raise EngineError(f"{path / MANIFEST} waits for a region {name!r} that it does not have", _MEND)
    for base, variants in manifest.variants.items():
        for name in (base, *(variant.region for variant in variants)):
            if name not in known:
                raise EngineError(f"{path / MANIFEST} has variants of {base} and no region {name!r}", _MEND)
    made = {value for call in manifest.calls for value in call.outputs}
    for value in manifest.measures:
        if value not in made:
            raise EngineError(f"{path / MANIFEST} keeps a value {value!r} that no call makes", _MEND)


def _check_presence(path: Path, files: Mapping[str, FileRecord]) -> None:
    for name, record in files.items():
        if not (path / name).is_file():
            raise EngineError(f"{path / name} is missing", _MEND)
        size = (path / name).stat().st_size
        if size != record.size:
            raise EngineError(f"{path / name} has {size:,} bytes, not {record.size:,}", _MEND)
    for folder, subfolders, names in os.walk(path):
        # A linked folder is not walked into, so it would hide its files: it counts as one.
        found = [*names, *(name for name in subfolders if Path(folder, name).is_symlink())]
        for name in sorted(found):
            relative = Path(folder, name).relative_to(path).as_posix()
            if relative not in files and relative != MANIFEST:
                raise EngineError(f"{path / relative} does not belong to the engine", "remove it")


def _check_digests(path: Path, files: Mapping[str, FileRecord]) -> None:
    # The largest first, so that no thread is left alone with one at the end.
    names = sorted(files, key=lambda name: -files[name].size)
    pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
    try:
        for name, digest in zip(names, pool.map(lambda name: _digest(path / name), names), strict=True):
            if digest != files[name].sha256:
                raise EngineError(f"{path / name} is damaged: its SHA-256 is another", _MEND)
    finally:
        pool.shutdown(cancel_futures=True)


def _digest(path: Path) -> str:
    try:
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise EngineError(f"{path} cannot be read ({error.strerror})", _MEND) from None


def _require_buffer(buffer: torch.Tensor, record: RangeRecord) -> None:
    flat = buffer.dtype == torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous()
    if not flat or buffer.device.type != "cpu" or buffer.numel() != record.nbytes:
        raise ValueError(f"a flat uint8 CPU tensor of {record.nbytes} bytes is needed, not {buffer.shape}")
