"""Packing: no two values that live together share a byte, and little more is taken than lives at once."""

from __future__ import annotations

import random

import pytest

from h3compile.plan.packing import ALIGNMENT, Lifetime, Packing, live_bytes, pack


def overlaps(values: list[Lifetime], packing: Packing) -> list[tuple[int, int]]:
    found = []
    for i, a in enumerate(values):
        for j, b in enumerate(values[:i]):
            together = a.begin < b.end and b.begin < a.end
            starts, others = packing.offsets[i], packing.offsets[j]
            if together and starts < others + b.nbytes and others < starts + a.nbytes:
                found.append((j, i))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_no_two_values_that_live_together_share_a_byte(seed: int) -> None:
    chance = random.Random(seed)
    values = []
    for begin in range(60):
        end = begin + 1 + chance.randrange(8)
        values.append(Lifetime(chance.choice([0, 1, 511, 512, 513, 40_000, 90_001]), begin, end))
    packing = pack(values)
    assert overlaps(values, packing) == []
    assert all(offset % ALIGNMENT == 0 for offset in packing.offsets)
    assert max(o + v.nbytes for o, v in zip(packing.offsets, values, strict=True)) <= packing.nbytes
    assert live_bytes(values) <= packing.nbytes <= 1.5 * live_bytes(values)


def test_a_checker_that_sees_an_overlap() -> None:
    values = [Lifetime(1024, 0, 2), Lifetime(1024, 1, 3)]
    assert overlaps(values, Packing((0, 512), 1536)) == [(0, 1)]
    assert overlaps(values, Packing((0, 1024), 2048)) == []


def test_values_that_follow_each_other_take_the_same_place() -> None:
    values = [Lifetime(4096, index, index + 1) for index in range(10)]
    assert pack(values) == Packing((0,) * 10, 4096)
    assert pack([]) == Packing((), 0)


def step(rows: int, qkv: int, parts: list[int]) -> list[Lifetime]:
    """Fifty blocks: the residual stream through all of them, ``parts`` of other widths in between."""
    values: list[Lifetime] = []
    begun, now = 0, 0
    for _ in range(50):
        stream = Lifetime(rows * 5376 * 2, begun, now + len(parts) + 2)
        values.append(stream)
        begun = now + len(parts) + 1
        values.append(Lifetime(rows * qkv, now + 1, now + 4))
        values += [Lifetime(rows * width, now + 2 + i, now + 5 + i) for i, width in enumerate(parts)]
        now = begun
    return values


@pytest.mark.parametrize("rows", [37_760, 11_009, 1_555])
def test_a_step_of_fifty_blocks_is_packed_in_a_moment(rows: int) -> None:
    values = step(rows, 21504 * 2, [14336, 14336, 7168 * 2, 5376 * 2, 28672 * 2, 14336])
    packing = pack(values)
    assert packing.nbytes <= 1.15 * live_bytes(values)
    assert overlaps(values[:60], Packing(packing.offsets[:60], packing.nbytes)) == []
