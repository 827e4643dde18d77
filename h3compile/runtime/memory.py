"""Small facts about tensors in memory that the runtime's modules share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["aligned", "free_bytes", "gib", "nbytes", "same_bits", "without_memory"]

# Kernels peel unaligned heads off their loops: one alignment everywhere keeps one order of summation.
_ALIGNMENT = 64

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself if it starts at a multiple of 64 bytes, else a copy with equal strides that does."""
    if tensor.data_ptr() % _ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.preserve_format)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one device are equal bit for bit: NaN equals itself, and -0.0 is not 0.0.

    On a GPU this waits for the device.
    """
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    integer = _INTEGERS[left.itemsize]
    return torch.equal(left.view(integer), right.view(integer))


def nbytes(*tensors: torch.Tensor) -> int:
    """Bytes of all ``tensors`` together."""
    return sum(tensor.nbytes for tensor in tensors)


def without_memory(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this form on the meta device."""
    return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="meta")


def free_bytes(device: torch.device) -> int | None:
    """Bytes of ``device`` that this process may still take; None on a CPU, whose memory is the host's."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    # What this process's allocator holds and does not use is free too.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def gib(count: int) -> str:
    """``count`` bytes for a message, in GiB."""
    return f"{count / 2**30:.2f} GiB"
