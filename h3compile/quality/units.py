"""Numbers as people read them."""

from __future__ import annotations

__all__ = ["forwards", "size"]


def size(nbytes: int) -> str:
    """``nbytes`` in the largest binary unit that keeps it at one or more: ``24.2 GiB``."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value, unit = nbytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value < 1023.95:  # what would round to 1024.0 belongs to the larger unit
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"


def forwards(steps: int) -> str:
    """Both numbers of a schedule, since libraries disagree on which of them is called steps."""
    return f"{steps} grid points = {steps - 1} forwards"
