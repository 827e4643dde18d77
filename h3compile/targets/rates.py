"""How fast a device computes, and how fast data comes to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FLOPS", "Link", "LinkKind", "Rate"]

# What a target may say it computes: a kind of work, and the type its operands have. Sums are FP32, or INT32
# for INT8. "attention" of an 8-bit type is SAGE: queries and keys of that type, the rest E4M3.
FLOPS = (
    "gemm.bfloat16",
    "gemm.float8_e4m3fn",
    "gemm.int8",
    "gemm.float32",
    "attention.bfloat16",
    "attention.float8_e4m3fn",
    "attention.int8",
)

LinkKind = Literal["pcie", "nvlink", "c2c", "unified"]


@dataclass(frozen=True)
class Rate:
    """What a data sheet promises, and the share of it that is reached.

    ``nominal`` is in FLOP/s, dense, or in bytes/s; ``share`` is above 0 and at most 1; ``source`` says where
    both come from.
    """

    nominal: float
    share: float
    source: str

    @property
    def reached(self) -> float:
        """What to count on, in the unit of ``nominal``."""
        return self.nominal * self.share


@dataclass(frozen=True)
class Link:
    """A way for data into a device; ``rate`` in bytes/s, one direction, for each device by itself.

    ``unified``: the host's memory is the device's, and a copy reads and writes it.
    """

    kind: LinkKind
    rate: Rate
