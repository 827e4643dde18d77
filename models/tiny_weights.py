"""Seeded weights for the tiny pipeline, scaled so that signals neither vanish nor explode."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

__all__ = ["cast", "fill", "smooth_patches"]

# Spread of a norm's gain around one, and of a bias around zero: small, yet missed when dropped.
_NORM_SPREAD = 0.1
_BIAS_SPREAD = 0.05


def fill(module: nn.Module, *, seed: int, scope: str, gains: Mapping[str, float] | None = None) -> None:
    """Overwrite every parameter of ``module`` with seeded values.

    Each parameter has a stream of its own, keyed by seed, scope and name: adding a layer leaves the other
    layers as they were, and numpy's streams are the same on every processor. Matrices and kernels get a
    standard deviation of ``gain / sqrt(fan_in)``, norms a mean of one, the rest a mean of zero.

    Args:
        module: changed in place; its parameters are float32.
        seed, scope: ``scope`` sets components of one seed apart.
        gains: a factor for a name suffix; of a bias or a vector, the standard deviation. First match wins.
    """
    for name, parameter in module.named_parameters():
        gain = next((value for suffix, value in (gains or {}).items() if name.endswith(suffix)), None)
        values = _values(name, parameter, gain, _stream(seed, f"{scope}/{name}"))
        with torch.no_grad():
            parameter.copy_(values)


def cast(module: nn.Module, dtype: torch.dtype, *, keep: frozenset[str] = frozenset()) -> None:
    """Cast the parameters to ``dtype``, but for those below a direct child named in ``keep``."""
    for name, parameter in module.named_parameters():
        if name.split(".", 1)[0] not in keep:
            parameter.data = parameter.data.to(dtype)


def smooth_patches(
    weight: torch.Tensor, *, patch: tuple[int, int, int, int], seed: int, scope: str, orders: int = 3
) -> None:
    """Make a patch projection paint low spatial frequencies, so that random latents look like moving colours.

    White noise inside every patch would spend the whole bit rate of a video codec on itself.

    Args:
        weight: (channels * frames * height * width, hidden), changed in place.
        patch: channels, frames, height and width of one patch.
        orders: cosines an axis; order k is weighed by 1 / (1 + k) on each axis.
    """
    channels, frames, height, width = patch
    rows = _cosines(height, orders)
    columns = _cosines(width, orders)
    coefficients = _stream(seed, f"{scope}/patches").standard_normal(
        (channels, orders, orders, weight.shape[1])
    )
    pattern = np.einsum("yi,xj,cijh->cyxh", rows, columns, coefficients / math.sqrt(weight.shape[1]))
    # A patch holds its colour for its few frames.
    values = np.broadcast_to(pattern[:, None], (channels, frames, height, width, weight.shape[1]))
    with torch.no_grad():
        weight.copy_(torch.from_numpy(values.reshape(tuple(weight.shape)).astype(np.float32)))


def _stream(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _values(
    name: str, parameter: torch.Tensor, gain: float | None, stream: np.random.Generator
) -> torch.Tensor:
    noise = torch.from_numpy(stream.standard_normal(tuple(parameter.shape), dtype=np.float32))
    if name.endswith("weight_g"):
        # weight_norm: the gain is the norm of each output row, whatever its fan-in.
        return (1.0 if gain is None else gain) * (1.0 + _NORM_SPREAD * noise)
    if _is_norm(name, parameter):
        return 1.0 + _NORM_SPREAD * noise
    if parameter.ndim < 2:
        return (_BIAS_SPREAD if gain is None else gain) * noise
    fan_in = math.prod(parameter.shape[1:])
    return (1.0 if gain is None else gain) / math.sqrt(fan_in) * noise


def _is_norm(name: str, parameter: torch.Tensor) -> bool:
    *_, owner, leaf = ["", *name.split(".")]
    return leaf == "weight" and parameter.ndim == 1 and "norm" in owner


def _cosines(size: int, orders: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    grid = (np.arange(size) + 0.5) / size
    return np.stack([np.cos(math.pi * k * grid) / (1 + k) for k in range(orders)], axis=1)
