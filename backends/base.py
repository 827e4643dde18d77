"""What a backend is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from h3compile.program.facts import Dim
from h3compile.program.region import Region

__all__ = ["Backend"]


class Backend(Protocol):
    """Lowers regions to artifacts that a runner loads without compiling."""

    name: str
    # Whether regions need lowering at all; a backend that interprets graphs has nothing to do.
    lowers: bool

    def lower(
        self,
        region: Region,
        dims: Sequence[Dim],
        device: str,
        output: Path,
        providers: Mapping[str, str],
    ) -> None:
        """Compile ``region`` for ``device`` (``cpu`` or ``cuda``) into the new folder ``output``.

        No weight is needed. ``providers`` names the provider that an operator must have on a GPU.
        Raises `BuildError` when the region cannot be compiled for every legal length.
        """
        ...
