"""A region: an FX graph with named inputs, in which every weight is an input."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

__all__ = ["Port", "Region"]


@dataclass(frozen=True)
class Port:
    """A tensor that enters or leaves a region: name, dtype, shape in numbers and `Dim` names."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        dims = ", ".join(str(dim) for dim in self.shape)
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}[{dims}]"


@dataclass(frozen=True)
class Region:
    """One compiled unit.

    The placeholders of ``graph`` are first ``inputs``, then ``weights``, by name and in order; its
    output is a tuple in the order of ``outputs``. Graphs are never edited in place: a pass copies.
    """

    name: str
    graph: fx.Graph
    inputs: tuple[Port, ...]
    weights: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @property
    def placeholders(self) -> tuple[Port, ...]:
        """Every port that enters, in the order of the graph's placeholders."""
        return (*self.inputs, *self.weights)

    def module(self) -> fx.GraphModule:
        """The graph as a callable module that owns no tensor."""
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def renamed(self, name: str) -> Region:
        """The same region under another name."""
        return replace(self, name=name)
