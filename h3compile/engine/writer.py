"""Writes an engine folder whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType

import psutil
import torch

from h3compile.engine.layout import copied, copied_nbytes, fill
from h3compile.engine.manifest import MANIFEST, RANGE_KEY, FileRecord, Manifest, RangeRecord, TableRecord
from h3compile.errors import EngineError
from h3compile.program.shard import byte_view, header_bytes

__all__ = ["EngineWriter"]

_CHUNK = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)

_Bytes = bytes | memoryview


class EngineWriter:
    """Collects an engine in a hidden sibling folder; `commit` renames it to ``path``.

    Leaving the ``with`` block in any other way removes all that was written, and an engine that
    ``overwrite`` allowed to be replaced stays as it was. Paths inside the engine are relative, with ``/``.

    Raises `EngineError` when ``path`` exists and may not be replaced, when the disk is full, and when the
    folder cannot be written; `ValueError` for a path used twice or outside the engine.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        # A link to an engine stays a link: what it points at is replaced.
        self.path = path.resolve()
        self._overwrite = overwrite
        token = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._partial = self.path.with_name(f".{self.path.name}.{token}.partial")
        self._previous = self.path.with_name(f".{self.path.name}.{token}.previous")
        self._made: list[Path] = []
        self._files: dict[str, FileRecord] = {}
        self._ranges: dict[str, str] = {}  # SHA-256 of a range's file -> its path

    def __enter__(self) -> EngineWriter:
        _require_replaceable(self.path, self._overwrite)
        try:
            with self._disk_errors(self.path.name):
                self._make_parents()
                self._partial.mkdir()
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clean_up()

    @property
    def files(self) -> Mapping[str, FileRecord]:
        """What has been written so far."""
        return dict(self._files)

    def leftovers(self) -> list[Path]:
        """What writers of this engine left that were killed, as far as this machine's processes tell."""
        pattern = re.compile(rf"\.{re.escape(self.path.name)}\.(\d+)-[0-9a-f]{{8}}\.(partial|previous)")
        found = {path: pattern.fullmatch(path.name) for path in sorted(self.path.parent.iterdir())}
        return [path for path, match in found.items() if match and not psutil.pid_exists(int(match[1]))]

    def require_space(self, nbytes: int) -> None:
        """Raises `EngineError` unless ``nbytes`` are free where the engine is written."""
        free = shutil.disk_usage(self._partial).free
        if free < nbytes:
            raise self._full(f"the engine needs {nbytes:,} bytes")

    def write_text(self, path: str, text: str) -> None:
        """A UTF-8 file."""
        self.write_bytes(path, text.encode())

    def write_bytes(self, path: str, data: bytes) -> None:
        """A file with these bytes."""
        self._write(path, (data,), len(data))

    def add_file(self, path: str, source: Path) -> None:
        """A copy of the file ``source``."""
        with source.open("rb") as file:
            chunks = iter(lambda: file.read(_CHUNK), b"")
            self._write(path, chunks, os.fstat(file.fileno()).st_size)

    def add_folder(self, path: str, source: Path) -> None:
        """A copy of every file below the folder ``source``, which must hold one."""
        files = sorted(file for file in source.rglob("*") if not file.is_dir())
        if not files:
            raise ValueError(f"{source} holds no file")
        for file in files:
            self.add_file(f"{path}/{file.relative_to(source).as_posix()}", file)

    def adopt(self, engine: Path, files: Mapping[str, FileRecord], skip: Collection[str] = ()) -> None:
        """Takes over ``files`` of a checked engine, without their bytes where the disk can link them."""
        for path, record in files.items():
            if path in skip:
                continue
            target = self._claim(path)
            with self._disk_errors(path, record.size):
                try:
                    os.link(engine / path, target, follow_symlinks=True)
                except OSError as error:
                    if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                        raise
                    self.add_file(path, engine / path)
                    continue
            self._files[path] = record

    def write_range(
        self, record: RangeRecord, tensors: Iterable[tuple[str, torch.Tensor]], path: str
    ) -> RangeRecord:
        """Writes the slots of ``record`` that are not linked and returns it with its ``path`` and digest.

        ``tensors`` are (slot name, value) pairs in any order, exactly one for each slot without a link. Give
        a generator: at any time one value is held besides the range. A range that was already written, for
        another call or partition, is not written again.
        """
        slots = {slot.name: slot.model_copy(update={"offset": offset}) for slot, offset in copied(record)}
        buffer = torch.zeros(copied_nbytes(record), dtype=torch.uint8)  # gaps are zero: equal bytes each time
        missing = set(slots)
        for name, tensor in tensors:
            if name not in missing:
                raise ValueError(f"{path}: {name!r} is no slot to fill, or was filled before")
            fill(buffer, slots[name], tensor)
            missing.remove(name)
        if missing:
            raise ValueError(f"{path}: no tensor for {sorted(missing)}")
        if not slots:
            return record
        header = header_bytes({RANGE_KEY: (tuple(buffer.shape), buffer.dtype)})
        data = byte_view(buffer)
        digest = hashlib.sha256(header)
        digest.update(data)
        found = self._ranges.get(digest.hexdigest())
        if found is None:
            self._write(path, (header, data), len(header) + len(data), digest.hexdigest())
            found = self._ranges[digest.hexdigest()] = path
        linked = len(slots) < len(record.slots)
        return record.model_copy(update={"path": found, "sha256": None if linked else digest.hexdigest()})

    def write_tensors(self, path: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """A safetensors file with these tensors, in this order."""
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        header = header_bytes({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in kept.items()})
        parts = [byte_view(tensor) for tensor in kept.values()]
        self._write(path, (header, *parts), len(header) + sum(map(len, parts)))

    def write_tables(
        self, folder: str, timesteps: Sequence[int], calls: Iterable[tuple[str, Mapping[str, torch.Tensor]]]
    ) -> TableRecord:
        """Writes folded tables, one file a schedule call, as the calls come.

        ``timesteps`` are float32 bit patterns; every tensor's leading dimension must have their number.
        """
        files: dict[str, str] = {}
        for call, values in calls:
            for name, value in values.items():
                if value.shape[:1] != (len(timesteps),):
                    raise ValueError(f"{name} has shape {tuple(value.shape)} for {len(timesteps)} timesteps")
            files[call] = f"{folder}/{call}.safetensors"
            self.write_tensors(files[call], values)
        return TableRecord(timesteps=tuple(timesteps), files=files)

    def commit(self, manifest: Manifest) -> Manifest:
        """Puts the engine in place and returns ``manifest`` with its files, digests and fingerprint.

        Everything is on the disk before the rename, so a crash leaves the old state or the new one.
        """
        for path in manifest.paths():
            if path not in self._files and not any(file.startswith(f"{path}/") for file in self._files):
                raise ValueError(f"the manifest names {path}, which was not written")
        files = dict(sorted(self._files.items()))
        final = manifest.model_copy(update={"files": files})
        final = final.model_copy(update={"fingerprint": final.resolved_fingerprint()})
        self.write_bytes(MANIFEST, final.encode())
        # Not file by file: the disk has been writing them since, while the next ones were computed.
        for path, record in self._files.items():
            with self._disk_errors(path, record.size):
                _sync(self._partial / path)
        with self._disk_errors(MANIFEST):
            for folder in (self._partial, *(path for path in self._partial.rglob("*") if path.is_dir())):
                _sync(folder)
            self._publish()
        return final

    def _publish(self) -> None:
        # `_clean_up` completes or undoes this, wherever it is interrupted.
        if self.path.exists() and any(self.path.iterdir()):
            _require_replaceable(self.path, self._overwrite)
            self.path.rename(self._previous)
        self._partial.rename(self.path)
        _sync(self.path.parent)

    def _clean_up(self) -> None:
        if self._previous.exists():
            if self.path.exists():
                shutil.rmtree(self._previous)
            else:
                self._previous.rename(self.path)
        if self._partial.exists():
            shutil.rmtree(self._partial)
        for folder in reversed(self._made):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _make_parents(self) -> None:
        for folder in reversed(self.path.parents):
            if not folder.exists():
                folder.mkdir()
                self._made.append(folder)

    def _claim(self, path: str) -> Path:
        pure = PurePosixPath(path)
        if pure.is_absolute() or not pure.parts or ".." in pure.parts or str(pure) != path:
            raise ValueError(f"{path!r} is not a plain relative path")
        if path in self._files:
            raise ValueError(f"{path} is written twice")
        target = self._partial / pure
        with self._disk_errors(path):
            target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _write(self, path: str, chunks: Iterable[_Bytes], size: int, sha256: str | None = None) -> None:
        target = self._claim(path)
        digest, written = hashlib.sha256(), 0
        with self._disk_errors(path, size), target.open("xb", buffering=0) as file:
            for chunk in chunks:
                if sha256 is None:
                    digest.update(chunk)
                written += _write_all(file.fileno(), chunk)
        self._files[path] = FileRecord(size=written, sha256=sha256 or digest.hexdigest())

    @contextmanager
    def _disk_errors(self, path: str, size: int = 0) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise EngineError(f"cannot write {path} in {self.path.parent} ({error.strerror})") from error
            (self._partial / path).unlink(missing_ok=True)  # so that it does not count as used
            raise self._full(f"{path} needs {size:,} bytes") from error

    def _full(self, need: str) -> EngineError:
        free = shutil.disk_usage(self._partial.parent).free
        return EngineError(
            f"the disk is full: {need} and {self.path.parent} has {free:,} free",
            "free some space or write the engine elsewhere",
        )


def _require_replaceable(path: Path, overwrite: bool) -> None:
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not overwrite:
        raise EngineError(f"{path} already exists", "choose another name, or allow it to be overwritten")
    if not (path / MANIFEST).is_file():
        raise EngineError(f"{path} is not an engine and is not overwritten", "choose another name")


def _write_all(descriptor: int, chunk: _Bytes) -> int:
    rest = memoryview(chunk)
    while rest:
        rest = rest[os.write(descriptor, rest[:_CHUNK]) :]
    return len(chunk)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
