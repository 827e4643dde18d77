"""What FP8 passes ask of a target."""

from __future__ import annotations

from h3compile.errors import BuildError
from h3compile.targets import Target

__all__ = ["require_fp8"]

# Ada and Hopper were the first with E4M3 tensor cores.
_FIRST_CAPABILITY = (8, 9)


def require_fp8(target: Target, name: str) -> None:
    """Raise `BuildError` where a GPU ``target`` cannot run the pass ``name``; references run on any CPU."""
    if target.capability is not None and target.capability < _FIRST_CAPABILITY:
        raise BuildError(
            f"{target.name} ({target.arch}) has no FP8 tensor cores", f"build without {name} for this target"
        )
