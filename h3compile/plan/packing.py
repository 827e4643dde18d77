"""Offsets in one range of memory for values of known size and lifetime: a static memory plan."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["ALIGNMENT", "Lifetime", "Packing", "live_bytes", "pack"]

# Bytes. What torch's CUDA allocator guarantees, and so what kernels may count on.
ALIGNMENT = 512


@dataclass(frozen=True)
class Lifetime:
    """``nbytes`` that must be kept from ``begin`` to before ``end``, counted in allocations."""

    nbytes: int
    begin: int
    end: int


@dataclass(frozen=True)
class Packing:
    """An offset for every value, in order, and the bytes of the whole range."""

    offsets: tuple[int, ...]
    nbytes: int


def live_bytes(values: Iterable[Lifetime]) -> int:
    """The most that lives at once: no packing is smaller."""
    changes: dict[int, int] = {}
    for value in values:
        changes[value.begin] = changes.get(value.begin, 0) + _aligned(value.nbytes)
        changes[value.end] = changes.get(value.end, 0) - _aligned(value.nbytes)
    live = most = 0
    for moment in sorted(changes):
        live += changes[moment]
        most = max(most, live)
    return most


def pack(values: Sequence[Lifetime]) -> Packing:
    """The smallest packing that a few greedy orders give.

    A value takes the lowest place that is free during its whole life: the large ones first, or those of the
    largest size times lifetime, or those that live long. None wins always; for the steps of MiniMax-H3 one of
    them needs no byte more than what lives at once.
    """
    orders: tuple[Callable[[Lifetime], tuple[int, ...]], ...] = (
        lambda value: (-value.nbytes, value.begin),
        lambda value: (-value.nbytes * (value.end - value.begin), value.begin),
        lambda value: (value.begin - value.end, -value.nbytes),
    )
    least, best = live_bytes(values), None
    for order in orders:
        found = _placed(values, sorted(range(len(values)), key=lambda i: order(values[i])))
        if best is None or found.nbytes < best.nbytes:
            best = found
        if best.nbytes == least:
            break
    assert best is not None
    return best


def _placed(values: Sequence[Lifetime], order: Iterable[int]) -> Packing:
    offsets, whole = [0] * len(values), 0
    placed: list[tuple[int, int, int, int]] = []  # offset, end of the bytes, and the lifetime; by offset
    for index in order:
        value = values[index]
        size, at = _aligned(value.nbytes), 0
        for offset, end, begins, ends in placed:
            if begins < value.end and value.begin < ends:
                if offset - at >= size:
                    break
                at = max(at, end)
        offsets[index] = at
        if size:
            insort(placed, (at, at + size, value.begin, value.end))
        whole = max(whole, at + size)
    return Packing(tuple(offsets), whole)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
