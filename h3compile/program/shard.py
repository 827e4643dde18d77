"""One safetensors file: its header, checked, and reads that hold no mapping open.

The safetensors library judges the header. The bytes are then read into place instead of mapped: a
mapping would keep every touched page of a 60 GB checkpoint in the process.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from h3compile.errors import CheckpointError

__all__ = ["Shard", "ShardFacts", "TensorInfo", "byte_view", "header_bytes", "read_exactly"]

_MEND = "download or write the file again"

_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in _DTYPES.items()}


class TensorInfo(NamedTuple):
    """A stored tensor: its shape, its dtype, and the name of the file that holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str


@dataclass(frozen=True)
class ShardFacts:
    """What identifies a file without reading its tensors.

    ``header_sha256`` covers the header's bytes, hence every name, dtype, shape and offset.
    """

    size: int
    mtime_ns: int
    header_sha256: str


@dataclass(frozen=True)
class _Extent:
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # from the start of the file
    nbytes: int


class Shard:
    """A safetensors file that was whole when it was opened; every read opens and closes it again.

    Raises `CheckpointError` when the file is missing, truncated or malformed, holds a dtype that is not
    read, or has changed since it was opened.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = name or path.name
        try:
            with safe_open(path, framework="np"):  # checks the whole header against the file's length
                pass
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = file.read(size)
                stat = os.fstat(file.fileno())
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing", _MEND) from None
        except SafetensorError as error:
            raise CheckpointError(f"{path} is {_diagnosis(path, error)}", _MEND) from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from None
        self.facts = ShardFacts(stat.st_size, stat.st_mtime_ns, hashlib.sha256(header).hexdigest())
        self._extents = dict(self._parse(header))

    def _parse(self, header: bytes) -> Iterator[tuple[str, _Extent]]:
        start = 8 + len(header)
        for key, entry in json.loads(header).items():
            if key == "__metadata__":
                continue
            dtype = _DTYPES.get(entry["dtype"])
            if dtype is None:
                raise CheckpointError(
                    f"{self.path} stores {key!r} as {entry['dtype']}, a dtype that is not read",
                    f"store it as one of {', '.join(_DTYPES)}",
                )
            begin, end = entry["data_offsets"]
            yield key, _Extent(tuple(entry["shape"]), dtype, start + begin, end - begin)

    def __contains__(self, key: str) -> bool:
        return key in self._extents

    def __iter__(self) -> Iterator[str]:
        return iter(self._extents)

    def keys(self) -> tuple[str, ...]:
        """The names of the tensors, in the header's order."""
        return tuple(self._extents)

    def info(self, key: str) -> TensorInfo:
        """Shape, dtype and file of a tensor; `KeyError` when there is none of that name."""
        extent = self._extents[key]
        return TensorInfo(extent.shape, extent.dtype, self.name)

    def read(self, key: str) -> torch.Tensor:
        """The tensor in memory of its own, on the CPU, contiguous."""
        return self.read_many((key,))[key]

    def read_many(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Several tensors with one opening of the file, read in the order in which they lie in it."""
        wanted = sorted(keys, key=lambda key: self._extents[key].offset)
        tensors = {key: self._empty(key) for key in wanted}
        with self._open() as file:
            for key in wanted:
                self._fill(file, key, tensors[key])
        return tensors

    def read_into(self, key: str, out: torch.Tensor) -> None:
        """The tensor's bytes into ``out``: contiguous, on the CPU, with as many bytes as are stored.

        Only the bytes are taken over: a caller may pass a uint8 view of the destination.
        """
        if out.nbytes != self._extents[key].nbytes:
            raise ValueError(f"{key} has {self._extents[key].nbytes} bytes, the destination {out.nbytes}")
        with self._open() as file:
            self._fill(file, key, out)

    def read_part(self, key: str, start: int, out: torch.Tensor) -> None:
        """The tensor's bytes from ``start`` on into ``out``, contiguous and on the CPU, as many as it has."""
        extent = self._extents[key]
        if not 0 <= start <= start + out.nbytes <= extent.nbytes:
            raise ValueError(f"{key} has {extent.nbytes} bytes, not {out.nbytes} from {start} on")
        with self._open() as file:
            self._fill(file, key, out, start)

    def _empty(self, key: str) -> torch.Tensor:
        extent = self._extents[key]
        return torch.empty(extent.shape, dtype=extent.dtype)

    def _open(self) -> FileIO:
        try:
            file = FileIO(self.path, "rb")
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error.strerror})", _MEND) from None
        stat = os.fstat(file.fileno())
        if (stat.st_size, stat.st_mtime_ns) != (self.facts.size, self.facts.mtime_ns):
            file.close()
            raise CheckpointError(f"{self.path} has changed since it was opened", "start again")
        return file

    def _fill(self, file: FileIO, key: str, out: torch.Tensor, start: int = 0) -> None:
        file.seek(self._extents[key].offset + start)
        try:
            read_exactly(file, out)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read at {key!r} ({error.strerror or error})", _MEND
            ) from None


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied: numpy has no name for half of torch's dtypes."""
    # A tensor without dimensions cannot be viewed as bytes: flatten first.
    return tensor.view(-1).view(torch.uint8).numpy().data


def read_exactly(file: FileIO, out: torch.Tensor) -> None:
    """Fills the bytes of ``out``, contiguous and on the CPU, from where ``file`` stands.

    Raises `OSError` when the file ends before they are filled.
    """
    target = byte_view(out)
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])  # the kernel hands over at most 2 GiB at a time
        if not count:
            raise OSError("the file ends too early")
        done += count


def header_bytes(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], alignment: int = 256) -> bytes:
    """The safetensors header for ``tensors`` stored one after the other in this order.

    It is padded with spaces, as the format allows, so that the first tensor starts at a multiple of
    ``alignment`` bytes of the file. The same tensors always give the same bytes.
    """
    entries: dict[str, dict[str, object]] = {}
    offset = 0
    for key, (shape, dtype) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        entries[key] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def _diagnosis(path: Path, error: SafetensorError) -> str:
    """Truncated or otherwise damaged: the library's message does not tell the two apart."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8:
            return f"truncated: it has {size} bytes"
        if head.startswith(b"version "):
            return "a Git LFS pointer, not the tensors it stands for"
        text = file.read(length) if 8 + length <= size else b""
    if not text:
        return f"truncated, or no safetensors file: its header says {length} bytes and {size} are there"
    try:
        entries = json.loads(text)
        ends = [entry["data_offsets"][1] for key, entry in entries.items() if key != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return f"damaged ({error})"
    if expected > size:
        return f"truncated: its header says {expected} bytes and {size} are there"
    return f"damaged ({error})"
