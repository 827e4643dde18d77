"""SAGE's quantization in plain torch: what the kernels of `sage_prepare` compute."""

from __future__ import annotations

import torch

from h3compile.ops.launch import ceil_div
from h3compile.ops.numerics import E4M3_MAX, FP8
from h3compile.ops.online_softmax import K_TILE
from h3compile.ops.sage_scales import WHOLE, kernel_block, spread

__all__ = ["QK_TYPES", "Six", "key_order", "largest_scale", "quantized"]

# Spelling -> storage and largest magnitude.
QK_TYPES = {"fp8_e4m3": (FP8, E4M3_MAX), "int8": (torch.int8, 127.0)}

# SageAttention's floor: a block of zeros must not give an infinite scale.
_SMALLEST_AMAX = 1e-3

Six = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def key_order(device: torch.device | str = "cpu") -> torch.Tensor:
    """Which key of every 16 stands at each position of the stored values.

    Position 4t + 2b + c holds key 8b + 2t + c: the order in which a tensor core leaves 16 columns of
    scores in a thread's registers is then the order in which it takes 16 probabilities from them.
    """
    return torch.arange(16, device=device).reshape(2, 4, 2).permute(1, 0, 2).flatten()


def _rounded(x: torch.Tensor, scale: torch.Tensor, qk: str) -> torch.Tensor:
    dtype, largest = QK_TYPES[qk]
    scaled = (x / scale).clamp(-largest, largest)
    return scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)


def largest_scale(scales: torch.Tensor) -> torch.Tensor:
    """The scale of the whole tensor, [1, 1], from those of its parts."""
    return scales.amax().view(1, 1)


def quantized(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    qk: str,
    k_block: int,
    smooth: bool,
    valid: int | None,
) -> Six:
    """From query, key, value [rows, heads, D] in the wide dtype."""
    rows, heads, width = query.shape
    count = rows if valid is None else valid
    inside = (torch.arange(rows, device=query.device) < count)[:, None, None]
    largest = QK_TYPES[qk][1]
    if smooth:
        # Softmax does not see it: it adds the same number to all scores of a query.
        key = key - key[:count].mean(0)
    query, key, value = (torch.where(inside, part, 0).transpose(0, 1) for part in (query, key, value))
    q_scale = query.abs().amax(-1).clamp_min(_SMALLEST_AMAX) / largest
    block = kernel_block(k_block)
    blocks = ceil_div(rows, block)
    padded = torch.nn.functional.pad(key, (0, 0, 0, blocks * block - rows))
    k_scale = padded.view(heads, blocks, block, width).abs().amax((2, 3)).clamp_min(_SMALLEST_AMAX) / largest
    if k_block == WHOLE:
        q_scale, k_scale = largest_scale(q_scale), largest_scale(k_scale)
    q_rows, k_blocks = spread(q_scale, k_scale, heads, rows, k_block)
    k_rows = k_blocks.repeat_interleave(block, 1)[:, :rows, None]
    v_scale = value.abs().amax(1).clamp_min(_SMALLEST_AMAX) / E4M3_MAX
    scaled = (value / v_scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
    scaled = torch.nn.functional.pad(scaled, (0, 0, 0, ceil_div(rows, K_TILE) * K_TILE - rows))
    ordered = scaled.view(heads, -1, 16, width)[:, :, key_order(query.device)].flatten(1, 2)
    return (
        _rounded(query, q_rows[..., None], qk).contiguous(),
        q_scale.float().contiguous(),
        _rounded(key, k_rows, qk).contiguous(),
        k_scale.float().contiguous(),
        ordered.mT.to(FP8).contiguous(),
        v_scale.float().contiguous(),
    )
