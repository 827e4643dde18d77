"""`hoist`: what depends only on the request is computed once a request, not once a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from h3compile.pipeline.base import Match, Pass, Rewrite, Tier
from h3compile.program.peel import peel
from h3compile.program.program import Program
from h3compile.program.stages import Stage
from h3compile.targets import Target

__all__ = ["Hoist"]


@dataclass(frozen=True)
class Hoist(Pass):
    """Move request-stage work (text refinement, rotary tables) out of the step."""

    name: ClassVar[str] = "hoist"
    tier: ClassVar[Tier] = Tier.EXACT
    requires: ClassVar[tuple[str, ...]] = ("outline",)
    default: ClassVar[bool] = True

    def apply(self, program: Program, target: Target) -> Rewrite:
        peeled = peel(program, Stage.REQUEST)
        return Rewrite(peeled.program, tuple(Match("value", value) for value in peeled.values))
