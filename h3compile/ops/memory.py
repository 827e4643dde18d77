"""Where the results of operators lie: in memory of torch's allocator, or of the step they are part of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from operator import mul
from typing import Protocol

import torch

__all__ = ["EmptyStrided", "Memory", "allocating", "empty", "empty_strided"]

# As Inductor's own: size, stride and dtype.
EmptyStrided = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]


class Memory(Protocol):
    """What a step gives to its operators."""

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with any content."""


# As the current stream is: set around a step, seen by what the same thread launches in it.
_CURRENT: ContextVar[Memory | None] = ContextVar("h3compile_memory", default=None)


@contextmanager
def allocating(memory: Memory) -> Iterator[None]:
    """While the block runs, `empty` and what `empty_strided` made take ``memory``, in this thread."""
    token = _CURRENT.set(memory)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def empty(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous tensor for what a kernel writes, of ``like``'s device, and its dtype unless one is given.

    For providers that launch kernels of ours. References and fakes use torch's own functions.
    """
    memory = _CURRENT.get()
    if memory is None:
        return like.new_empty(tuple(shape), dtype=dtype)
    strides = tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()
    return memory.empty(shape, strides, like.dtype if dtype is None else dtype)


def empty_strided(otherwise: EmptyStrided) -> EmptyStrided:
    """As ``otherwise``, which is called where no step gives memory."""

    def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        memory = _CURRENT.get()
        return otherwise(size, stride, dtype) if memory is None else memory.empty(size, stride, dtype)

    return empty
