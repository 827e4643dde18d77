"""A checkpoint's tensors: a folder of safetensors files, read a few tensors at a time."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from h3compile.errors import CheckpointError, nearest
from h3compile.program.shard import Shard, ShardFacts, TensorInfo

__all__ = ["Preloaded", "ShardedTensors", "digest_of"]

_INDEX = ".safetensors.index.json"
_NUMBERED = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")
_MEND = "download or write the checkpoint again"


class ShardedTensors:
    """The tensors of a folder with one safetensors file, or several and their index.

    Opening reads headers only. Reads return tensors with memory of their own and leave nothing open, so
    what the process holds is what the caller keeps.

    Raises `CheckpointError` when a file is missing, truncated or malformed, when the index and the files
    disagree, or when two files hold one tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        weight_map = _read_index(folder)
        names = sorted(set(weight_map.values())) if weight_map else _without_index(folder)
        self._shards = {name: Shard(folder / name, name) for name in names}
        self._where = self._locate()
        for key, name in weight_map.items():
            if key not in self._shards[name]:
                raise CheckpointError(f"the index of {folder} says {name} holds {key!r}: it does not", _MEND)

    def _locate(self) -> dict[str, str]:
        where: dict[str, str] = {}
        for name, shard in self._shards.items():
            for key in shard:
                if key in where:
                    raise CheckpointError(
                        f"{key!r} is in two files of {self.folder}: {where[key]} and {name}",
                        "keep the files of one variant only",
                    )
                where[key] = name
        return where

    def keys(self) -> tuple[str, ...]:
        """The names of all tensors, file by file."""
        return tuple(self._where)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    def info(self, key: str) -> TensorInfo:
        """Shape, dtype and file of a tensor, from the headers; `CheckpointError` when it is not there."""
        return self._shard(key).info(key)

    def read(self, key: str) -> torch.Tensor:
        """The tensor, on the CPU, contiguous; `CheckpointError` when it is not there."""
        return self._shard(key).read(key)

    def read_many(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Several tensors; every file they lie in is opened once."""
        by_shard: defaultdict[str, list[str]] = defaultdict(list)
        for key in dict.fromkeys(keys):
            by_shard[self._shard(key).name].append(key)
        tensors: dict[str, torch.Tensor] = {}
        for name, wanted in by_shard.items():
            tensors |= self._shards[name].read_many(wanted)
        return tensors

    @contextmanager
    def group(self, keys: Iterable[str]) -> Iterator[Preloaded]:
        """The tensors ``keys``, read together and let go at the end of the ``with`` block."""
        loaded = Preloaded(self.read_many(keys))
        try:
            yield loaded
        finally:
            loaded.release()

    def files(self) -> dict[str, ShardFacts]:
        """Name and facts of every file, by which a change is noticed later."""
        return {name: shard.facts for name, shard in self._shards.items()}

    def digest(self) -> str:
        """`digest_of` the files: equal for equal names, dtypes, shapes and distribution over files.

        It does not cover the values, which would take reading the whole checkpoint.
        """
        return digest_of(self.files())

    def _shard(self, key: str) -> Shard:
        if key not in self._where:
            raise CheckpointError(f"{self.folder} has no tensor {key!r}", nearest(key, self._where))
        return self._shards[self._where[key]]


class Preloaded:
    """A `TensorSource` over tensors in memory; a tensor outside of them is a `KeyError`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def read(self, key: str) -> torch.Tensor:
        """The tensor itself, not a copy."""
        return self._tensors[key]

    def release(self) -> None:
        """Forget every tensor."""
        self._tensors.clear()


def digest_of(files: Mapping[str, ShardFacts]) -> str:
    """SHA-256 over the names and header digests of ``files``, in the order of the names."""
    lines = "".join(f"{files[name].header_sha256}  {name}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, empty when the folder has no index."""
    found = sorted(folder.glob(f"*{_INDEX}"))
    if not found:
        return {}
    if len(found) > 1:
        raise CheckpointError(f"{folder} has {len(found)} index files", "keep the files of one variant only")
    try:
        index = json.loads(found[0].read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{found[0]} cannot be read ({error})", _MEND) from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{found[0]} has no weight_map", _MEND)
    for key, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{found[0]} puts {key!r} in {name!r}, which is no file name", _MEND)
    missing = [name for name in sorted(set(weight_map.values())) if not (folder / name).is_file()]
    if missing:
        count = f"{len(missing)} of {len(set(weight_map.values()))} files"
        raise CheckpointError(f"{folder} lacks {count} its index names, {missing[0]} first", _MEND)
    return weight_map


def _without_index(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise CheckpointError(f"{folder} has no safetensors file", "give a folder that holds the weights")
    for name in names:
        numbered = _NUMBERED.search(name)
        if numbered and sum(_NUMBERED.search(other) is not None for other in names) < int(numbered[2]):
            raise CheckpointError(f"{folder} lacks files: {name} is one of {int(numbered[2])}", _MEND)
    return names
