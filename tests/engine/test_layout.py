"""Ranges: aligned, disjoint, and views that are the tensors that went in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h3compile.engine.layout import (
    ALIGNMENT,
    SlotSpec,
    copied,
    copied_nbytes,
    fill,
    lay_out,
    row_major,
    slot_bytes,
    slot_nbytes,
    view,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)


@st.composite
def specs(draw: st.DrawFn) -> list[SlotSpec]:
    """Weights of any rank up to 3, dimensions in any order in memory, rows possibly padded."""
    result = []
    for index in range(draw(st.integers(0, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        strides = None
        if draw(st.booleans()):
            order = draw(st.permutations(range(len(shape))))
            steps, span = [0] * len(shape), 1
            for dim in order:
                steps[dim] = span
                span = span * max(shape[dim], 1) + draw(st.integers(0, 3))
            strides = tuple(steps)
        link = ("file", "key") if draw(st.booleans()) else None
        result.append(SlotSpec(f"w{index}", shape, draw(st.sampled_from(DTYPES)), strides, link))
    return result


def value(spec: SlotSpec, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, spec.shape, generator=generator).to(spec.dtype)


@settings(deadline=None, max_examples=150)
@given(specs())
def test_slots_are_aligned_disjoint_and_give_back_what_was_filled(weights: list[SlotSpec]) -> None:
    record = lay_out(weights)
    assert [slot.name for slot in record.slots] == [spec.name for spec in weights]
    assert record.nbytes % ALIGNMENT == 0
    end = 0
    for slot in record.slots:
        assert slot.offset % ALIGNMENT == 0
        assert slot.offset >= end
        end = slot.offset + slot_nbytes(slot)
    assert end <= record.nbytes < end + ALIGNMENT

    buffer = torch.full((record.nbytes,), 0xA5, dtype=torch.uint8)
    tensors = [value(spec, seed) for seed, spec in enumerate(weights)]
    for slot, tensor in zip(record.slots, tensors, strict=True):
        fill(buffer, slot, tensor)
    for spec, slot, tensor in zip(weights, record.slots, tensors, strict=True):
        found = view(buffer, slot)
        assert found.dtype == spec.dtype
        assert found.stride() == (spec.strides or row_major(spec.shape))
        assert torch.equal(found.to(torch.float64), tensor.to(torch.float64))
        if found.numel():
            assert found.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    # Nothing outside of the slots was touched.
    covered = torch.zeros(record.nbytes, dtype=torch.bool)
    for slot in record.slots:
        covered[slot.offset : slot.offset + slot_nbytes(slot)] = True
    assert (buffer[~covered] == 0xA5).all()


@settings(deadline=None)
@given(specs())
def test_copied_slots_are_packed_in_order_and_fill_the_file(weights: list[SlotSpec]) -> None:
    record = lay_out(weights)
    own = lay_out([spec for spec in weights if spec.link is None])
    assert [(slot.name, offset) for slot, offset in copied(record)] == [
        (slot.name, slot.offset) for slot in own.slots
    ]
    assert copied_nbytes(record) == own.nbytes


def test_a_transposed_weight_keeps_its_strides() -> None:
    weight = torch.arange(12.0).reshape(3, 4).to(torch.float8_e4m3fn).t()
    record = lay_out([SlotSpec("w", (4, 3), torch.float8_e4m3fn, weight.stride())])
    buffer = torch.zeros(record.nbytes, dtype=torch.uint8)
    fill(buffer, record.slots[0], weight)
    found = view(buffer, record.slots[0])
    assert found.stride() == (1, 4)
    assert found.float().tolist() == weight.float().tolist()
    # What lies in memory is the row-major original: a GEMM sees a transposed operand, not a copy.
    assert buffer[:12].view(torch.float8_e4m3fn).float().tolist() == list(range(12))


@pytest.mark.parametrize(
    ("shape", "strides", "message"),
    [
        ((3, 4), (0, 1), "share a place"),
        ((3, 4), (2, 1), "share a place"),
        ((2, 2), (1, 1), "share a place"),
        ((3, 4), (4, -1), "share a place"),
        ((3, 4), (1,), "2 dimensions and 1 strides"),
    ],
)
def test_overlapping_strides_are_refused(
    shape: tuple[int, ...], strides: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        lay_out([SlotSpec("w", shape, torch.float32, strides)])


def test_a_name_comes_once() -> None:
    spec = SlotSpec("w", (1,), torch.float32)
    with pytest.raises(ValueError, match="a name comes twice"):
        lay_out([spec, spec])


def test_wrong_tensors_and_buffers_are_refused() -> None:
    record = lay_out([SlotSpec("w", (2, 3), torch.float32)])
    slot, buffer = record.slots[0], torch.zeros(record.nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"w is float32\[2, 3\], the tensor float32\[3, 2\]"):
        fill(buffer, slot, torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"the tensor bfloat16\[2, 3\]"):
        fill(buffer, slot, torch.zeros(2, 3).bfloat16())
    for wrong in (buffer[:23], buffer.float(), buffer.view(2, -1), torch.zeros(512, dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match="needs 24 bytes of a flat uint8 buffer"):
            view(wrong, slot)
    assert slot_bytes(buffer, slot).numel() == 24
