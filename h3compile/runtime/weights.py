"""An engine's weights on the device: step and request ranges resident, schedule ranges cold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from h3compile.engine.layout import view
from h3compile.engine.manifest import RangeRecord
from h3compile.runtime.pool import Pool

if TYPE_CHECKING:
    from h3compile.engine.loader import EngineFolder

__all__ = ["LoadWeights", "Weights"]

# A call's range by name -> its weights, in the order of the region's weight ports.
LoadWeights = Callable[[str], tuple[torch.Tensor, ...]]


class _Buffer:
    """One range's bytes on the device. An object of its own because the pool holds it weakly."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data


class _Lane:
    """Brings ranges of up to ``capacity`` bytes from the engine to the device, one at a time.

    On a GPU through one pinned buffer: the link copies from pageable memory at a fraction of its rate.
    """

    def __init__(self, folder: EngineFolder, partition: str, device: torch.device, capacity: int) -> None:
        self._folder = folder
        self._partition = partition
        self._staging: torch.Tensor | None = None
        if device.type == "cuda":
            self._staging = torch.empty(capacity, dtype=torch.uint8, device="cpu", pin_memory=True)

    def bring(self, name: str, out: torch.Tensor) -> None:
        """Fills ``out`` with the bytes of range ``name``."""
        if self._staging is None:
            self._folder.load_range(self._partition, name, out)
            return
        host = self._staging[: out.numel()]
        self._folder.load_range(self._partition, name, host)
        out.copy_(host)  # blocking: the staging buffer is free again afterwards


class Weights:
    """The ranges of one partition.

    Those named ``resident`` are loaded at once, one copy a range, and shared through ``pool`` with every
    other engine on this device that has the same bytes. The others are read by `cold` when needed.
    """

    def __init__(
        self,
        folder: EngineFolder,
        partition: str,
        device: torch.device,
        pool: Pool,
        resident: Collection[str],
    ) -> None:
        self._folder = folder
        self._partition = partition
        self._device = device
        self._records = folder.manifest.partitions[partition].ranges
        self._buffers: dict[str, _Buffer] = {}
        lane: _Lane | None = None
        for name in resident:
            record = self._records[name]

            def make(name: str = name, record: RangeRecord = record) -> _Buffer:
                nonlocal lane
                if lane is None:
                    lane = self._lane(resident)
                data = torch.empty(record.nbytes, dtype=torch.uint8, device=device)
                lane.bring(name, data)
                return _Buffer(data)

            key = range_key(folder, partition, name, device)
            self._buffers[name] = pool.share(key, _Buffer, make)

    @property
    def nbytes(self) -> int:
        """Bytes of the resident ranges, each counted once."""
        distinct = {id(buffer): buffer.data.nbytes for buffer in self._buffers.values()}
        return sum(distinct.values())

    def resident(self, name: str) -> tuple[torch.Tensor, ...]:
        """The weights of a resident range, as views into its buffer."""
        return _views(self._buffers[name].data, self._records[name])

    @contextmanager
    def cold(self, names: Collection[str]) -> Iterator[LoadWeights]:
        """A function that reads one of the ranges ``names``; each reading overwrites the one before.

        Memory is that of the largest range, freed when the block ends.
        """
        capacity = max((self._records[name].nbytes for name in names), default=0)
        lane = self._lane(names)
        data = torch.empty(capacity, dtype=torch.uint8, device=self._device)

        def load(name: str) -> tuple[torch.Tensor, ...]:
            record = self._records[name]
            out = data[: record.nbytes]
            lane.bring(name, out)
            return _views(out, record)

        yield load

    def _lane(self, names: Collection[str]) -> _Lane:
        capacity = max((self._records[name].nbytes for name in names), default=0)
        return _Lane(self._folder, self._partition, self._device, capacity)


def range_key(folder: EngineFolder, partition: str, name: str, device: torch.device) -> tuple[str, ...]:
    """What a range is shared by: its digest, or its place in this very engine when it has none."""
    record = folder.manifest.partitions[partition].ranges[name]
    if record.identity is None:
        return ("range", str(device), folder.digest, partition, name)
    return ("range", str(device), record.identity)


def _views(data: torch.Tensor, record: RangeRecord) -> tuple[torch.Tensor, ...]:
    return tuple(view(data, slot) for slot in record.slots)
