"""Weights an engine does not copy: the checkpoint they stay in, and whether it is still the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from h3compile.engine.manifest import CheckpointFile
from h3compile.errors import CheckpointError, EngineError
from h3compile.program.shard import Shard, ShardFacts

__all__ = ["LinkedCheckpoint", "record_files"]

_MEND = "build the engine again, or with copied weights"


def record_files(files: Mapping[str, ShardFacts]) -> dict[str, CheckpointFile]:
    """The facts of checkpoint files as the manifest keeps them."""
    return {name: CheckpointFile(**asdict(facts)) for name, facts in files.items()}


class LinkedCheckpoint:
    """The checkpoint folder that a partition was built from.

    A file is compared with its record, size, modification time and header, before a tensor of it is read.
    """

    def __init__(self, folder: Path, files: Mapping[str, CheckpointFile]) -> None:
        self._folder = folder
        self._records = dict(files)
        self._checked: dict[str, Shard] = {}

    def check(self) -> None:
        """Raises `EngineError` unless every file is as it was when the engine was built."""
        for name in self._records:
            self.shard(name)

    def shard(self, name: str) -> Shard:
        """The file called ``name``; `EngineError` when it is gone or has changed."""
        if name not in self._checked:
            self._checked[name] = self._open(name)
        return self._checked[name]

    def _open(self, name: str) -> Shard:
        record, path = self._records.get(name), self._folder / name
        if record is None or Path(name).name != name:
            raise EngineError(f"the engine links to {name!r}, which is no file of its checkpoint", _MEND)
        changed = EngineError(f"the checkpoint this engine links to has changed: {path}", _MEND)
        try:
            stat = path.stat()
        except OSError:
            raise EngineError(f"the checkpoint this engine links to is not there: {path}", _MEND) from None
        if (stat.st_size, stat.st_mtime_ns) != (record.size, record.mtime_ns):
            raise changed
        try:
            shard = Shard(path)
        except CheckpointError as error:
            raise changed from error
        if CheckpointFile(**asdict(shard.facts)) != record:
            raise changed
        return shard
