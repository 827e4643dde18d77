"""An engine's weights on the device: those that stay there, and the cold ones that pass through."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from h3compile.engine.layout import view
from h3compile.engine.manifest import RangeRecord
from h3compile.runtime.lanes import DONE, Ticket
from h3compile.runtime.pool import Pool
from h3compile.runtime.sharding import WHOLE, Sharding

if TYPE_CHECKING:
    from h3compile.engine.loader import EngineFolder

__all__ = ["DeviceRange", "LoadWeights", "Weights", "range_key", "views"]

# A call's range by name -> its weights, in the order of the region's weight ports.
LoadWeights = Callable[[str], tuple[torch.Tensor, ...]]


class DeviceRange:
    """A range's place on the device, one for all engines there that have the same bytes."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self._lock = threading.Lock()
        self._filled: Ticket | None = None

    @property
    def filled(self) -> bool:
        """Whether the bytes are there, or on their way."""
        return self._filled is not None

    def fill(self, copy: Callable[[torch.Tensor], Ticket]) -> None:
        """Has ``copy`` bring the bytes; where somebody else brought them, waits until they are there."""
        with self._lock:
            if self._filled is None:
                self._filled = copy(self.data)
                return
        self.wait()

    def wait(self) -> None:
        """Returns when the bytes are there; somebody must have begun to bring them."""
        assert self._filled is not None, "nobody fills this range"
        self._filled.wait()


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

    def bring(self, name: str, out: torch.Tensor) -> Ticket:
        """Fills ``out`` with the bytes of range ``name``."""
        if self._staging is None:
            self._folder.load_range(self._partition, name, out)
            return DONE
        host = self._staging[: out.numel()]
        self._folder.load_range(self._partition, name, host)
        out.copy_(host)  # blocking: the staging buffer is free again afterwards
        return DONE


class Weights:
    """The ranges of one partition.

    Those named ``resident`` are loaded at once, one copy a range, and shared through ``pool`` with every
    other engine on this device that has the same bytes. Those named ``later`` get their place now, as
    ``sharding`` gathers them, and their bytes from whoever fills `place`. The others are read by `cold`
    when needed.
    """

    def __init__(
        self,
        folder: EngineFolder,
        partition: str,
        device: torch.device,
        pool: Pool,
        resident: Collection[str],
        later: Collection[str] = (),
        sharding: Sharding = WHOLE,
    ) -> None:
        self._folder = folder
        self._partition = partition
        self._device = device
        self._records = folder.manifest.partitions[partition].ranges
        self._buffers = {name: self._place(name, pool, WHOLE) for name in resident}
        self._buffers |= {name: self._place(name, pool, sharding) for name in later}
        lane = self._lane([name for name in resident if not self._buffers[name].filled])
        for name in resident:
            self._buffers[name].fill(partial(lane.bring, name))

    @property
    def nbytes(self) -> int:
        """Bytes of the ranges that have a place on the device, each counted once."""
        distinct = {id(buffer): buffer.data.nbytes for buffer in self._buffers.values()}
        return sum(distinct.values())

    def resident(self, name: str) -> tuple[torch.Tensor, ...]:
        """The weights of a resident range, as views into its buffer."""
        return views(self._buffers[name].data, self._records[name])

    def place(self, name: str) -> DeviceRange:
        """Where a range stays on the device."""
        return self._buffers[name]

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
            return views(out, record)

        yield load

    def _place(self, name: str, pool: Pool, sharding: Sharding) -> DeviceRange:
        def make() -> DeviceRange:
            nbytes = sharding.gathered(self._records[name].nbytes)
            return DeviceRange(torch.empty(nbytes, dtype=torch.uint8, device=self._device))

        key = range_key(self._folder, self._partition, name, f"{self._device}{sharding.name}")
        return pool.share(key, DeviceRange, make)

    def _lane(self, names: Collection[str]) -> _Lane:
        capacity = max((self._records[name].nbytes for name in names), default=0)
        return _Lane(self._folder, self._partition, self._device, capacity)


def range_key(folder: EngineFolder, partition: str, name: str, where: str) -> tuple[str, ...]:
    """What a range is shared by ``where`` it lies: its digest, or its place in an engine that has none."""
    record = folder.manifest.partitions[partition].ranges[name]
    if record.identity is None:
        return ("range", where, folder.digest, partition, name)
    return ("range", where, record.identity)


def views(data: torch.Tensor, record: RangeRecord) -> tuple[torch.Tensor, ...]:
    """The weights of a range whose bytes begin at ``data``, flat uint8 of its length or longer."""
    return tuple(view(data, slot) for slot in record.slots)
