"""Copies from one order of rows to another, in words as long as what lies together allows."""

from __future__ import annotations

import torch

__all__ = ["copy_runs", "ordered"]

# PyTorch copies a permuted tensor element by element: words of sixteen bytes take an eighth of the loads that
# 16-bit floats do. The dtypes stand for their size alone.
_WORDS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)


def copy_runs(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy the bits of ``source`` into ``target``, of the same shape and dtype; returns ``target``.

    The innermost dimension of both lies together; the others may lie in any order.
    """
    word = _word(target, source)
    target.view(word).copy_(source.view(word))
    return target


def ordered(source: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of ``source``, whose innermost dimension lies together."""
    return copy_runs(source.new_empty(source.shape), source)


def _word(*tensors: torch.Tensor) -> torch.dtype:
    """The longest word that the innermost runs of all ``tensors`` are made of, and begin at."""
    for word in _WORDS:
        size = word.itemsize
        if all(_divides(size, tensor) for tensor in tensors):
            return word
    raise AssertionError("a byte divides everything")


def _divides(size: int, tensor: torch.Tensor) -> bool:
    item = tensor.element_size()
    lengths = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return all(length * item % size == 0 for length in lengths) and tensor.data_ptr() % size == 0
