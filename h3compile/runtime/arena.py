"""Memory of a step in one piece: what is computed in it is placed before it runs, and freed with it.

Torch's allocator keeps what was freed for values of the same size; the values of a block have many sizes and
live side by side in ever other pairs, so that half as much again is reserved as ever lives at once. The
launch sequences of an engine are known, so a step is rehearsed, on tensors without memory, and every value is
given its place.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from h3compile.engine.layout import extent
from h3compile.engine.manifest import PortRecord
from h3compile.ops.memory import allocating
from h3compile.plan.packing import Lifetime, pack
from h3compile.program.serialize import parse_dtype
from h3compile.runtime.memory import without_memory
from h3compile.runtime.runner import Runner
from h3compile.runtime.stats import Stats

__all__ = ["Arena", "Placed", "StepMemory"]


@dataclass(frozen=True)
class Placed:
    """The allocations of a step in order: bytes and offset of each, no offset for one that outlives it."""

    sizes: tuple[int, ...]
    offsets: tuple[int | None, ...]
    nbytes: int


class _Rehearsal:
    """Gives tensors without memory and notes when they are let go, in numbers of allocations."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._ends: dict[int, int] = {}
        self._alive: dict[int, StorageWeakRef] = {}

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the meta device."""
        self._look()
        tensor = without_memory(size, stride, dtype)
        storage = tensor.untyped_storage()
        # Views of it keep it too.
        self._alive[len(self._sizes)] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._sizes.append(storage.nbytes())
        return tensor

    def placed(self) -> Placed:
        """Where everything goes, at the end of the step: what is alive still is part of its outputs."""
        self._look()
        inside = [index for index in range(len(self._sizes)) if index in self._ends]
        packing = pack([Lifetime(self._sizes[i], i, self._ends[i]) for i in inside])
        offsets = dict(zip(inside, packing.offsets, strict=True))
        return Placed(tuple(self._sizes), tuple(map(offsets.get, range(len(self._sizes)))), packing.nbytes)

    def _look(self) -> None:
        for index, storage in list(self._alive.items()):
            if storage.expired():  # type: ignore[no-untyped-call]
                del self._alive[index]
                self._ends[index] = len(self._sizes)


class Arena:
    """The memory of one step on ``device``: asked as its rehearsal was, it gives the places found there."""

    def __init__(self, placed: Placed, device: torch.device) -> None:
        self._placed = placed
        self._device = device
        self._next = 0
        self._bytes = torch.empty(placed.nbytes, dtype=torch.uint8, device=device)
        self._views: dict[torch.dtype, torch.Tensor] = {}

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next one; `RuntimeError` for one of another size than in the rehearsal."""
        index, self._next = self._next, self._next + 1
        placed = self._placed
        nbytes = extent(size, stride) * dtype.itemsize
        if index >= len(placed.sizes) or placed.sizes[index] != nbytes:
            raise RuntimeError(
                f"allocation {index} of a step has {nbytes} bytes, in its rehearsal it had not"
            )
        offset = placed.offsets[index]
        if offset is None or nbytes == 0:
            return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=self._device)
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = self._bytes.view(dtype)
        return view.as_strided(size, stride, offset // dtype.itemsize)


# Rehearsals that are kept: the lengths of a request, with one timestep and with two, and of the last few.
_KEPT = 8

# Of a rehearsal: the shapes of what the step is given, and the variants that stand in.
_Key = tuple[tuple[tuple[str, torch.Size], ...], tuple[tuple[str, str], ...]]


class StepMemory:
    """The arenas of an engine's steps on ``device``; nothing is held between two of them.

    ``rehearsal`` is the runner of the same calls without kernels; ``tables`` are what it is not given.
    """

    def __init__(
        self, rehearsal: Runner, tables: Sequence[PortRecord], device: torch.device, stats: Stats
    ) -> None:
        self._rehearsal = rehearsal
        self._tables = {port.name: port for port in tables}
        self._device = device
        self._stats = stats
        self._found: dict[_Key, Placed | None] = {}

    @contextmanager
    def step(
        self, given: Mapping[str, torch.Tensor], lengths: Mapping[str, int], stand_ins: Mapping[str, str]
    ) -> Iterator[None]:
        """While the block runs, operators and launch sequences take the memory of one arena."""
        key = (
            tuple((name, tensor.shape) for name, tensor in sorted(given.items())),
            tuple(sorted(stand_ins.items())),
        )
        if key not in self._found:
            while len(self._found) >= _KEPT:
                del self._found[next(iter(self._found))]
            self._found[key] = self._rehearse(given, lengths, stand_ins)
        placed = self._found[key]
        self._stats.bytes_activations = 0 if placed is None else placed.nbytes
        if placed is None:
            yield
            return
        with allocating(Arena(placed, self._device)):
            yield

    def _rehearse(
        self, given: Mapping[str, torch.Tensor], lengths: Mapping[str, int], stand_ins: Mapping[str, str]
    ) -> Placed | None:
        rehearsal = _Rehearsal()
        try:
            with allocating(rehearsal):
                shapes = {name: without_memory(t.shape, t.stride(), t.dtype) for name, t in given.items()}
                source = _Tables(self._tables, lengths)
                outputs = self._rehearsal.run(shapes, source, lambda: None, stand_ins=stand_ins)
                placed = rehearsal.placed()
                del outputs  # they had to live until then
                return placed
        except Exception as error:  # operators of others may do anything with a tensor that has no memory
            warnings.warn(
                f"the values of a step cannot be placed before it runs ({error}): torch allocates them one by"
                " one, and reserves about half as much again as `h3compile plan` says",
                stacklevel=2,
            )
            return None


class _Tables:
    """Tensors without memory in place of the rows of tables."""

    def __init__(self, ports: Mapping[str, PortRecord], lengths: Mapping[str, int]) -> None:
        self._ports = ports
        self._lengths = lengths

    def __getitem__(self, name: str) -> torch.Tensor:
        port = self._ports[name]
        shape = [size if isinstance(size, int) else self._lengths[size] for size in port.shape]
        return torch.empty(shape, dtype=parse_dtype(port.dtype), device="meta")
