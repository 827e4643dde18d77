"""Where the weights of the repeated step calls live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from h3compile.errors import BuildError

__all__ = ["Mode", "Residency", "repeated"]

Mode = Literal["local", "allgather"]

# Shards of an AllGather lie in two areas in turn: one is filled from the host while the other is gathered.
_AREAS = 2


@dataclass(frozen=True)
class Residency:
    """Which of the streamable calls stay on the device, and how the others come there.

    ``blocks`` are the streamable calls in step order and ``resident`` those of them that stay, in the same
    order. The others take turns in ``slots`` device places, each as large as the largest of them. ``mode``
    says where a block comes from: ``local``, the host memory of its own rank in one flat copy, or
    ``allgather``, a shard from every rank. ``pieces`` is into how many copies a shard is cut, so that a
    piece is gathered while the next one is copied; 1 in ``local`` mode. Raises `BuildError` when the
    fields contradict each other.
    """

    blocks: tuple[str, ...]
    resident: tuple[str, ...]
    slots: int
    mode: Mode = "local"
    pieces: int = 1

    def __post_init__(self) -> None:
        if len(set(self.blocks)) != len(self.blocks):
            raise BuildError("a block is listed twice in the residency", "list each streamable call once")
        kept = set(self.resident)
        strangers = sorted(kept - set(self.blocks))
        if strangers:
            raise BuildError(
                f"no streamable block is called {strangers[0]!r}", "keep only blocks of the step resident"
            )
        if tuple(name for name in self.blocks if name in kept) != self.resident:
            raise BuildError("the resident blocks are not in step order", "list each once, in step order")
        streamed = len(self.blocks) - len(self.resident)
        if streamed and self.slots < 1:
            raise BuildError(
                f"{streamed} blocks are streamed and there is no slot for them",
                "give at least one slot, or keep every block resident",
            )
        if not streamed and self.slots:
            raise BuildError(
                f"every block is resident and slots={self.slots} would stay empty",
                "give slots=0, or keep fewer blocks resident",
            )
        if self.pieces < 1:
            raise BuildError(f"a block cannot be cut into {self.pieces} copies", "give at least one piece")
        if self.mode == "local" and self.pieces != 1:
            raise BuildError(
                f"pieces={self.pieces} does nothing in local mode, where a block is one flat copy",
                "give pieces=1, or mode=allgather",
            )

    @property
    def streamed(self) -> tuple[str, ...]:
        """The blocks that take turns in the slots, in step order."""
        kept = set(self.resident)
        return tuple(name for name in self.blocks if name not in kept)

    @property
    def areas(self) -> int:
        """Device places for a piece of a rank's shard on its way into a gather; none in ``local`` mode."""
        return _AREAS if self.mode == "allgather" else 0

    def __str__(self) -> str:
        kept = f"{len(self.resident)} of {len(self.blocks)} blocks resident"
        if not self.streamed:
            return kept
        places = "1 slot" if self.slots == 1 else f"{self.slots} slots"
        pieces = f" in {self.pieces} pieces" if self.pieces > 1 else ""
        return f"{kept}, the others in {places}, {self.mode}{pieces}"


def repeated(calls: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """The calls that can be streamed: those whose region is called more than once.

    ``calls`` are (region, call) of the step's calls that have weights, in order.
    """
    calls = tuple(calls)
    counts = Counter(region for region, _ in calls)
    return tuple(name for region, name in calls if counts[region] > 1)
