"""Sequence parallelism: how ranks share the rows of a packed sequence, and which rows a rank has.

A module that a runner needs too: nothing here knows of graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from h3compile.errors import BuildError
from h3compile.program.facts import Dim
from h3compile.program.region import Port

__all__ = ["Exchange", "Kind", "Parallel"]

Exchange = Literal["plain", "fp8"]


@dataclass(frozen=True)
class Kind:
    """A kind of row, such as video: the model input ``index`` [``dim``] says where its rows lie."""

    index: str
    dim: str

    @property
    def local_dim(self) -> str:
        """How many rows of this kind a rank has, at least 1."""
        return f"local_{self.dim}"

    @property
    def taken(self) -> str:
        """The input [``local_dim``]: which of the kind's rows this rank has."""
        return f"taken_{self.index}"

    @property
    def placed(self) -> str:
        """The input [``local_dim``]: where in the rank's stretch they lie."""
        return f"placed_{self.index}"


@dataclass(frozen=True)
class Parallel:
    """``ulysses`` times ``ring`` ranks, each with an equal stretch of the ``rows`` of a sequence.

    Rank r of P has rows r*L to (r+1)*L, L = ceil(S/P) for S rows; the last ranks may have padding. Attention
    is shared by heads among ``ulysses`` neighbours; their rows together are one of ``ring`` stretches, whose
    keys go round. ``exchange`` is what goes from rows to heads and back: ``plain``, as it is, or ``fp8``.
    Raises `BuildError` where a degree is below 1, or their product below 2.
    """

    ulysses: int
    ring: int = 1
    exchange: Exchange = "plain"
    rows: str = "rows"
    kinds: tuple[Kind, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.ulysses < 1 or self.ring < 1 or self.ranks < 2:
            raise BuildError(
                f"{self.ulysses} ranks that share heads and {self.ring} in a ring share nothing",
                "take at least two ranks",
            )

    @property
    def ranks(self) -> int:
        """How many ranks share a sequence."""
        return self.ulysses * self.ring

    @property
    def _stretches(self) -> bool:
        """Whether the stretch of a ring is more than the rows of a rank."""
        return self.ring > 1 and self.ulysses > 1

    @property
    def local_rows(self) -> str:
        """The length of a rank's stretch, padding included."""
        return f"local_{self.rows}"

    def local_shape(self, shape: tuple[int | str, ...]) -> tuple[int | str, ...]:
        """``shape`` with the rows of a rank in the place of all."""
        return tuple(self.local_rows if size == self.rows else size for size in shape)

    @property
    def stretch_rows(self) -> str:
        """The length of a ring's stretch, padding included: one after the other those of its ranks."""
        return f"stretch_{self.rows}" if self._stretches else self.local_rows

    @property
    def own(self) -> str:
        """The input [``local_rows``]: the rows of this rank; padding repeats the last row of the sequence."""
        return "own_row_indices"

    @property
    def stretch(self) -> str:
        """The input [``stretch_rows``]: the rows of this rank's ring stretch, padding likewise."""
        return "stretch_row_indices" if self._stretches else self.own

    @property
    def ports(self) -> tuple[Port, ...]:
        """The inputs that differ from rank to rank, int64."""
        shapes = {self.own: self.local_rows}
        for kind in self.kinds:
            shapes |= {kind.taken: kind.local_dim, kind.placed: kind.local_dim}
        if self._stretches:
            shapes[self.stretch] = self.stretch_rows
        return tuple(Port(name, torch.int64, (dim,)) for name, dim in shapes.items())

    def dims(self, model: Iterable[Dim]) -> tuple[Dim, ...]:
        """The free lengths of a rank, from those of the ``model``."""
        known = {dim.name: dim for dim in model}
        whole = known[self.rows]
        shares = [_share(whole, self.local_rows, self.ranks)]
        shares += [_share(known[kind.dim], kind.local_dim, self.ranks) for kind in self.kinds]
        if self._stretches:
            shares.append(_share(whole, self.stretch_rows, self.ring))
        return tuple(shares)

    @property
    def shares(self) -> dict[str, tuple[str, float]]:
        """Every length that a rank has instead of another: this one, and its share of it but for padding."""
        found = {self.local_rows: (self.rows, 1 / self.ranks)}
        found |= {kind.local_dim: (kind.dim, 1 / self.ranks) for kind in self.kinds}
        if self._stretches:
            found[self.stretch_rows] = (self.rows, 1 / self.ring)
        return found

    def values(self, rows: int, indices: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        """The inputs of ``ports`` for rank ``rank``, where the sequence has ``rows`` rows.

        ``indices`` are the model's inputs that the kinds are named by, int64 [n]; the results lie where they
        do. A rank without a row of a kind takes the first one there is, to a place behind its stretch. Raises
        `ValueError` for a rank that is none.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is none of {self.ranks}")
        local = -(-rows // self.ranks)
        start = rank * local
        device = indices[self.kinds[0].index].device if self.kinds else torch.device("cpu")
        found = {self.own: _stretch(start, local, rows, device)}
        for kind in self.kinds:
            lies = indices[kind.index]
            (taken,) = torch.where((lies >= start) & (lies < start + local))
            placed = lies[taken] - start
            if not len(taken):
                taken, placed = lies.new_zeros(1), lies.new_full((1,), local)
            found |= {kind.taken: taken, kind.placed: placed}
        if self._stretches:
            length = self.ulysses * local
            found[self.stretch] = _stretch(rank // self.ulysses * length, length, rows, device)
        return found

    def __str__(self) -> str:
        words = [f"{self.ranks} ranks"]
        if self.ulysses > 1:
            words.append(f"ulysses={self.ulysses}")
        if self.ring > 1:
            words.append(f"ring={self.ring}")
        return ", ".join(words) + (", exchange in FP8" if self.exchange == "fp8" else "")


def _share(whole: Dim, name: str, ranks: int) -> Dim:
    return Dim(name, -(-whole.hint // ranks), 1, -(-whole.largest // ranks))


def _stretch(start: int, length: int, rows: int, device: torch.device) -> torch.Tensor:
    return torch.arange(start, start + length, device=device).clamp(max=rows - 1)
