"""One call's weights as one contiguous range of bytes, so that moving a block is one copy."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from h3compile.engine.manifest import RangeRecord, SlotRecord
from h3compile.program.serialize import dtype_name, parse_dtype
from h3compile.program.shard import byte_view

__all__ = [
    "ALIGNMENT",
    "SlotSpec",
    "copied",
    "copied_nbytes",
    "fill",
    "lay_out",
    "row_major",
    "slot_bytes",
    "slot_nbytes",
    "view",
]

# What the CUDA allocator guarantees, and more than any vector load or TMA descriptor asks for.
ALIGNMENT = 256


@dataclass(frozen=True)
class SlotSpec:
    """A weight to be placed: ``strides`` in elements, row-major when None; ``link`` as in `SlotRecord`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None
    link: tuple[str, str] | None = None


def lay_out(weights: Iterable[SlotSpec], alignment: int = ALIGNMENT) -> RangeRecord:
    """Places ``weights`` one after the other, each at a multiple of ``alignment`` bytes.

    The range's length is a multiple of ``alignment`` too, so ranges can follow one another. Raises
    `ValueError` when a name comes twice or strides let two elements share a place.
    """
    slots: list[SlotRecord] = []
    end = 0
    for spec in weights:
        strides = row_major(spec.shape) if spec.strides is None else spec.strides
        _require_distinct(spec.name, spec.shape, strides)
        slot = SlotRecord(
            name=spec.name,
            offset=end,
            shape=spec.shape,
            strides=strides,
            dtype=dtype_name(spec.dtype),
            link=spec.link,
        )
        slots.append(slot)
        end = _aligned(end + slot_nbytes(slot), alignment)
    if len({slot.name for slot in slots}) != len(slots):
        raise ValueError(f"a name comes twice in {[slot.name for slot in slots]}")
    return RangeRecord(nbytes=end, slots=tuple(slots))


def view(buffer: torch.Tensor, slot: SlotRecord) -> torch.Tensor:
    """The weight in ``slot`` as a view into ``buffer``: uint8, one dimension, any device. Nothing is copied.

    Raises `ValueError` when the buffer is not flat uint8 or too short.
    """
    dtype = parse_dtype(slot.dtype)
    elements = slot_bytes(buffer, slot).view(dtype)
    return elements.as_strided(slot.shape, slot.strides)


def fill(buffer: torch.Tensor, slot: SlotRecord, tensor: torch.Tensor) -> None:
    """Copies ``tensor`` into its slot. Raises `ValueError` unless shape and dtype are the slot's."""
    if tuple(tensor.shape) != slot.shape or tensor.dtype != parse_dtype(slot.dtype):
        raise ValueError(
            f"{slot.name} is {slot.dtype}{list(slot.shape)}, "
            f"the tensor {dtype_name(tensor.dtype)}{list(tensor.shape)}"
        )
    view(buffer, slot).copy_(tensor)


def range_digest(buffer: torch.Tensor) -> str:
    """SHA-256 of a range's bytes; its gaps must be zero, so that equal weights have equal digests."""
    return hashlib.sha256(byte_view(buffer)).hexdigest()


def slot_bytes(buffer: torch.Tensor, slot: SlotRecord) -> torch.Tensor:
    """The bytes of ``slot``, gaps between strided rows included, as a view into ``buffer``."""
    end = slot.offset + slot_nbytes(slot)
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous() or end > buffer.numel():
        raise ValueError(f"{slot.name} needs {end} bytes of a flat uint8 buffer, this is {buffer.shape}")
    return buffer[slot.offset : end]


def slot_nbytes(slot: SlotRecord) -> int:
    """Bytes from the first element of ``slot`` to its last."""
    return extent(slot.shape, slot.strides) * parse_dtype(slot.dtype).itemsize


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first of a tensor to its last, gaps included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def copied(record: RangeRecord, alignment: int = ALIGNMENT) -> Iterator[tuple[SlotRecord, int]]:
    """The slots an engine holds itself, with their offsets in its file: linked ones leave no hole there.

    Without links the offsets are the slots' own, and the file holds the range as it is.
    """
    end = 0
    for slot in record.slots:
        if slot.link is None:
            yield slot, end
            end = _aligned(end + slot_nbytes(slot), alignment)


def copied_nbytes(record: RangeRecord, alignment: int = ALIGNMENT) -> int:
    """Length in bytes of the range as the engine's file holds it."""
    ends = [_aligned(offset + slot_nbytes(slot), alignment) for slot, offset in copied(record, alignment)]
    return ends[-1] if ends else 0


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements, as torch counts them."""
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _require_distinct(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Every dimension must step over all that the smaller-strided ones span."""
    if len(shape) != len(strides):
        raise ValueError(f"{name} has {len(shape)} dimensions and {len(strides)} strides")
    if 0 in shape:
        return
    span = 1
    for stride, size in sorted((d, n) for n, d in zip(shape, strides, strict=True) if n > 1):
        if stride < span:
            raise ValueError(f"{name}: strides {strides} over {shape} let two elements share a place")
        span = (size - 1) * stride + span
