"""Copies from one order of rows to another, in words as long as what lies together allows."""

from __future__ import annotations

import torch

__all__ = ["copy_runs", "ordered"]

# PyTorch copies a permuted tensor element by element: words of sixteen bytes take an eighth of the loads that
# 16-bit floats do. The dtypes stand for their size alone.
_WORDS = (torch.complex128, torch.int64, torch.int32, torch.int16)


def copy_runs(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy the bits of ``source`` into ``target``, of the same shape and dtype; returns ``target``.

    Dimensions may lie in any order; words are long where the innermost one of both lies together.
    """
    word = _word(target, source)
    target.view(word).copy_(source.view(word))
    return target


def ordered(source: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of ``source``."""
    return copy_runs(source.new_empty(source.shape), source)


def _word(target: torch.Tensor, source: torch.Tensor) -> torch.dtype:
    """The longest word that the innermost runs of both are made of and begin at, or their own dtype."""
    longer = (word for word in _WORDS if word.itemsize > source.element_size())
    return next((word for word in longer if _made_of(word, target) and _made_of(word, source)), source.dtype)


def _made_of(word: torch.dtype, tensor: torch.Tensor) -> bool:
    item, size = tensor.element_size(), word.itemsize
    lengths = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    # A view does not ask where memory begins, and a GPU fails where a word does not begin at its own size.
    whole = all(length * item % size == 0 for length in lengths) and tensor.data_ptr() % size == 0
    return whole and tensor.stride(-1) == 1
