"""Timesteps as keys: the bits of t as float32."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from h3compile.errors import H3CompileError

__all__ = ["bits_of", "timestep_of", "to_bits"]


def bits_of(t: float) -> int:
    """The float32 bit pattern of ``t``, rounded to nearest; -0.0 counts as 0.0, which it equals.

    Raises `H3CompileError` unless 0 <= t <= 1.
    """
    if not math.isfinite(t) or not 0.0 <= t <= 1.0:
        raise H3CompileError(f"timestep {t} is outside [0, 1]", "pass t = 1 - sigma, unscaled")
    bits: int = struct.unpack("<I", struct.pack("<f", t + 0.0))[0]  # -0.0 + 0.0 is 0.0
    return bits


def timestep_of(bits: int) -> float:
    """The t with this bit pattern."""
    t: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return t


def to_bits(timesteps: Sequence[float]) -> tuple[int, ...]:
    """`bits_of` every timestep."""
    return tuple(bits_of(t) for t in timesteps)
