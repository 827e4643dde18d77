"""The scales of SAGE's queries and keys: one a row and a key block, or one for a whole tensor."""

from __future__ import annotations

import torch

from h3compile.ops.launch import ceil_div
from h3compile.ops.online_softmax import K_TILE

__all__ = ["K_BLOCKS", "WHOLE", "kernel_block", "spread"]

# Keys that may share a scale, each query having its own.
K_BLOCKS = (16, 64, 128)
# In place of a number of keys: all queries share one scale, and all keys another. What other libraries'
# FP8 attention takes; for E4M3 alone, whose exponent makes up for most of what a finer scale would give.
WHOLE = 0


def kernel_block(k_block: int) -> int:
    """The keys of a block for our kernels, which read a scale a block in any case."""
    return K_TILE if k_block == WHOLE else k_block


def spread(
    q_scale: torch.Tensor, k_scale: torch.Tensor, heads: int, rows: int, k_block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [heads, rows] and [heads, ceil(rows / kernel_block)] that mean the same as the ones given."""
    if k_block != WHOLE:
        return q_scale, k_scale
    blocks = ceil_div(rows, kernel_block(k_block))
    return q_scale.expand(heads, rows).contiguous(), k_scale.expand(heads, blocks).contiguous()
