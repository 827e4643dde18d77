"""Which bytes of a range a rank holds on its host, and where they come in the gathered whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["WHOLE", "Sharding"]

# Pieces begin where copies and gathers of a GPU are fastest.
_ALIGNMENT = 256


@dataclass(frozen=True)
class Sharding:
    """Rank ``rank`` of ``ranks`` holds every ``ranks``-th of the parts that a range is cut into.

    There are ``pieces`` rounds of them: round p gathers one part of every rank, in their order, so that they
    lie one after the other. One rank holds the whole range in one part.
    """

    rank: int
    ranks: int
    pieces: int

    def part(self, nbytes: int) -> int:
        """Bytes of a part of a range of ``nbytes``, the last ones filled up to the size of the others."""
        if self.ranks == 1:
            return nbytes
        return -(-nbytes // (self.ranks * self.pieces * _ALIGNMENT)) * _ALIGNMENT

    def held(self, nbytes: int) -> int:
        """Bytes that a rank holds on its host."""
        return self.part(nbytes) * self.pieces

    def gathered(self, nbytes: int) -> int:
        """Bytes of the gathered range, filling included."""
        return self.held(nbytes) * self.ranks

    def spans(self, nbytes: int) -> list[tuple[int, int]]:
        """Where this rank's parts begin and end in the range, piece by piece, without what fills it up."""
        part = self.part(nbytes)
        starts = [(piece * self.ranks + self.rank) * part for piece in range(self.pieces)]
        return [(min(start, nbytes), min(start + part, nbytes)) for start in starts]

    def round(self, target: torch.Tensor, nbytes: int, piece: int) -> torch.Tensor:
        """The bytes of ``target`` that round ``piece`` fills."""
        length = self.part(nbytes) * self.ranks
        return target[piece * length : (piece + 1) * length]

    @property
    def name(self) -> str:
        """Equal for ranks that hold the same bytes."""
        return "" if self.ranks == 1 else f" {self.rank}/{self.ranks} in {self.pieces}"


WHOLE = Sharding(0, 1, 1)
