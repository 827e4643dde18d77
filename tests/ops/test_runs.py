"""Copies in long words: the words that are chosen, and the bits that arrive."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from h3compile.ops import runs
from h3compile.ops.numerics import FP8
from h3compile.ops.runs import copy_runs, ordered

DTYPES = (torch.bfloat16, torch.float32, torch.float64, FP8, torch.uint8)


def noise(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Every bit at random: NaN of all kinds among them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(size)
    return torch.randint(256, (size,), generator=generator).to(torch.uint8).view(dtype).view(shape)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def word(source: torch.Tensor) -> torch.dtype:
    return runs._word(source.new_empty(source.shape), source)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 16, 66, 128, 132])
@pytest.mark.parametrize("start", [0, 1, 8])
def test_bits_arrive_from_any_order(dtype: torch.dtype, width: int, start: int) -> None:
    whole = noise(3, 5, 2, width + start, dtype=dtype)
    for x in (whole[..., start:].permute(2, 0, 1, 3), whole[..., start:].transpose(0, 3), whole[::2, :, 1]):
        found = ordered(x)
        assert found.is_contiguous() and torch.equal(bits(found), bits(x))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (lambda x: x.permute(1, 0, 2), torch.complex128),
        (lambda x: x[..., 8:].permute(1, 0, 2), torch.complex128),  # 16 bytes further, 112 of them
        (lambda x: x[..., 4:].permute(1, 0, 2), torch.int64),
        (lambda x: x[..., 2:].permute(1, 0, 2), torch.int32),
        (lambda x: x[..., 1:].permute(1, 0, 2), torch.bfloat16),
        (lambda x: x[..., :60].permute(1, 0, 2), torch.int64),  # 120 bytes together
        (lambda x: x[..., ::2], torch.bfloat16),  # not together at all
        (lambda x: x.transpose(1, 2), torch.bfloat16),
        (lambda x: x.as_strided((3, 5, 16), (324, 66, 1)), torch.int32),  # rows begin at 132 bytes
    ],
)
def test_words_are_as_long_as_what_lies_together(
    source: Callable[[torch.Tensor], torch.Tensor], expected: torch.dtype
) -> None:
    assert word(source(noise(3, 5, 64, dtype=torch.bfloat16))) == expected


def test_memory_that_begins_at_no_word_is_copied_in_shorter_ones() -> None:
    held = noise(8 * 16 + 2, dtype=torch.uint8)
    # Where memory begins is not its offset: another owner's, two bytes into it.
    x = torch.from_numpy(held.numpy()[2:]).view(torch.bfloat16).view(4, 16)
    assert x.storage_offset() == 0 and x.data_ptr() % 16 == 2
    assert word(x) == torch.bfloat16
    assert torch.equal(bits(ordered(x)), bits(x))


def test_both_sides_must_be_made_of_the_word() -> None:
    source = noise(4, 16, dtype=torch.bfloat16)
    target = torch.zeros(4, 18, dtype=torch.bfloat16)[:, 1:17]
    assert copy_runs(target, source) is target
    assert torch.equal(bits(target), bits(source))


@pytest.mark.parametrize("shape", [(0, 16), (4, 0)])
def test_nothing_is_copied_too(shape: tuple[int, ...]) -> None:
    assert ordered(torch.empty(shape, dtype=torch.bfloat16)).shape == shape


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_arrive_on_a_gpu(dtype: torch.dtype) -> None:
    for width, start in ((128, 0), (132, 0), (128, 1), (66, 8)):
        x = noise(37, 3, 2, width + start, dtype=dtype).cuda()[..., start:].permute(2, 0, 1, 3)
        assert torch.equal(bits(ordered(x)).cpu(), bits(x.cpu()))
