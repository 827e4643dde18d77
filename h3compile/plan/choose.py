"""The residency of a program that is being built: what the pass `dlo` takes when it is not told."""

from __future__ import annotations

from h3compile.plan.planner import Planner, Question
from h3compile.plan.residency import Residency
from h3compile.plan.shapes import Clip
from h3compile.plan.shortage import shortage
from h3compile.plan.work import ProgramWork
from h3compile.targets import Node, Target

__all__ = ["fastest_residency"]


def fastest_residency(
    work: ProgramWork, target: Target, *, hbm: int | None = None, clip: Clip | None = None
) -> Residency:
    """That of the fastest plan of ``work`` on one ``target``, in ``hbm`` bytes of it or all there are.

    Planned for ``clip``, 1344x768 and 124 frames unless said. `H3CompileError` where nothing fits, and where
    the target does not say how fast it is.
    """
    question = Question(
        Node(target, 1), clip or Clip(), passes=work.passes, hbm=hbm, work=lambda passes: work
    )
    planner = Planner(question)
    found = planner.fastest()
    if found is None:
        raise shortage(planner)
    return found.residency
