"""Arithmetic that several references share."""

from __future__ import annotations

import torch

__all__ = ["E4M3_MAX", "FP8", "modulation", "normalized", "quantized_rows", "wide"]

FP8 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# Rows of zeros have a scale too.
_SMALLEST_AMAX = 1e-12


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in the dtype that kernels compute in: float32, or float64 when it is that already."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension times ``weight``, in the wide dtype, not rounded."""
    x = wide(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * wide(weight)


def modulation(table: torch.Tensor, index: torch.Tensor, width: int, part: int) -> torch.Tensor:
    """Part ``part`` (``width`` channels) of the table row of every sequence row, in the wide dtype."""
    return wide(table[:, part * width : (part + 1) * width].index_select(0, index))


def quantized_rows(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values of ``x``'s shape and a float32 scale for every row, shape (..., 1).

    The scale is amax/448 of the row, or the calibrated ``scale`` (one number), beyond which values
    saturate.
    """
    x = wide(x)
    if scale is None:
        scales = x.abs().amax(-1, keepdim=True).clamp_min(_SMALLEST_AMAX) / E4M3_MAX
    else:
        scales = scale.to(x.dtype).expand(*x.shape[:-1], 1)
    # Times the reciprocal, as kernels do: dividing rounds a few values to the neighbour.
    values = (x * (1 / scales)).clamp(-E4M3_MAX, E4M3_MAX).to(FP8)
    return values, scales.float().contiguous()
