"""What a model must declare about itself so that the core can compile it without knowing its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from h3compile.program.stages import Stage

__all__ = ["Dim", "InputFact", "ModelFacts", "Repeat"]


@dataclass(frozen=True)
class Dim:
    """A length known only when the engine runs, in rows (or in distinct timesteps).

    ``hint`` is the length a compiler tunes for, ``smallest`` and ``largest`` the range that must work.
    """

    name: str
    hint: int
    smallest: int = 1
    largest: int = 1 << 18


@dataclass(frozen=True)
class InputFact:
    """A tensor input of the model: its dtype, its shape in numbers and `Dim` names, its stage."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    stage: Stage


@dataclass(frozen=True)
class Repeat:
    """A module list whose members are claimed to be equal but for their weights.

    The claim is only where to look: `outline` proves it, node by node.
    """

    region: str
    path: str
    count: int


@dataclass(frozen=True)
class ModelFacts:
    """The facts of one model, the single place where the core learns them."""

    name: str
    config: Mapping[str, int | float | tuple[int, ...]]
    dims: tuple[Dim, ...]
    inputs: tuple[InputFact, ...]
    outputs: tuple[str, ...]
    repeats: tuple[Repeat, ...]
    segments: tuple[str, ...]  # names for what lies before, between and after the repeats
    expected: Mapping[str, Mapping[str, int]]  # pass -> kind of match -> count
    unquantized: tuple[str, ...] = ()  # modules whose weights no pass may quantize

    @property
    def timestep(self) -> InputFact:
        """The one input of the schedule stage; its only dimension counts the distinct timesteps."""
        (fact,) = (fact for fact in self.inputs if fact.stage is Stage.SCHEDULE)
        return fact

    def dim(self, name: str) -> Dim:
        """The dimension called ``name``; `KeyError` when the model has none."""
        for dim in self.dims:
            if dim.name == name:
                return dim
        raise KeyError(name)
