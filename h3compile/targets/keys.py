"""Keys of quantized attention on a device: what its tensor cores take, and what is best where nobody asks."""

from __future__ import annotations

__all__ = ["WITHOUT_INT8", "default_keys"]

# Architectures with FP8 whose tensor cores multiply no integers.
WITHOUT_INT8 = ("sm_103a",)


def default_keys(arch: str) -> tuple[str, int]:
    """The dtype of keys by its torch name, and how many share a scale, where the user leaves both out.

    Measured on an H200 (docs/attention.md): INT8 keys are a third more accurate than E4M3 and 2 % slower;
    with the mean of K removed a scale for every 16 keys gains 10 % and costs 11 % of the speed. For Blackwell
    data-center parts, whose later ones have no INT8 tensor cores, what B300 deployments use.
    """
    return ("float8_e4m3fn", 16) if arch.startswith("sm_10") else ("int8", 128)
