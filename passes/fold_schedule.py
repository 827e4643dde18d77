"""`fold-schedule`: what depends only on the timestep becomes tables, and its weights go cold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from h3compile.errors import BuildError
from h3compile.pipeline.base import Match, Pass, Rewrite, Tier
from h3compile.program.analysis import execution_stages
from h3compile.program.cut import computed
from h3compile.program.peel import peel
from h3compile.program.program import Program
from h3compile.program.region import Port, Region
from h3compile.program.stages import Stage
from h3compile.targets import Target

__all__ = ["FoldSchedule"]

aten = torch.ops.aten

_ELEMENTWISE = frozenset(
    {
        aten.add.Tensor,
        aten.cos.default,
        aten.div.Tensor,
        aten.exp.default,
        aten.mul.Tensor,
        aten.silu.default,
        aten.sin.default,
        aten.to.dtype,
    }
)
_ALONG_A_DIM = frozenset({aten.cat.default, aten.slice.Tensor, aten.unsqueeze.default})


@dataclass(frozen=True)
class FoldSchedule(Pass):
    """Move schedule-stage work (timestep embedding, every AdaLN projection) into tables keyed by t.

    Each t is evaluated alone, so a table row has the same bits whichever schedule asked for it. Legal
    only where row i of every folded value depends on timestep i and no other, which is proven.
    """

    name: ClassVar[str] = "fold-schedule"
    tier: ClassVar[Tier] = Tier.EXACT
    requires: ClassVar[tuple[str, ...]] = ("outline",)
    after: ClassVar[tuple[str, ...]] = ("hoist",)
    default: ClassVar[bool] = True

    def apply(self, program: Program, target: Target) -> Rewrite:
        peeled = peel(program, Stage.SCHEDULE)
        folded = peeled.program
        stages = execution_stages(folded)
        for name in {call.region for call in folded.calls if stages[call.name] is Stage.SCHEDULE}:
            _prove_row_wise(folded.regions[name], program.facts.timestep.shape[0])
        matches = tuple(Match("table", value) for value in peeled.values)
        return Rewrite(folded.evolve(tables=peeled.values), matches)


def _prove_row_wise(region: Region, timesteps: int | str) -> None:
    """Raise `BuildError` unless row i of every value in ``region`` depends on timestep i alone."""
    for node in computed(region.graph):
        shape = _shape(node)
        if _is_constant(shape):
            continue  # the same for every timestep
        if shape[0] != timesteps or not _is_constant(shape[1:]):
            raise BuildError(f"{region.name}/{node.name} mixes timesteps: its shape is {shape}")
        if not _row_wise(node):
            raise BuildError(f"{region.name}/{node.name} ({node.target}) may mix timesteps")


def _row_wise(node: fx.Node) -> bool:
    if node.target in _ELEMENTWISE:
        return True
    if node.target is aten.linear.default:
        # Rows of the first operand; weight and bias must not depend on the timestep.
        return all(_is_constant(_shape(source)) for source in node.all_input_nodes[1:])
    if node.target in _ALONG_A_DIM:
        dim = node.args[1] if len(node.args) > 1 else 0
        return isinstance(dim, int) and dim != 0
    return False


def _shape(node: fx.Node) -> tuple[int | str, ...]:
    port = node.meta["port"]
    assert isinstance(port, Port)
    return port.shape


def _is_constant(shape: tuple[int | str, ...]) -> bool:
    return all(isinstance(size, int) for size in shape)
