"""For a program that is being built: the residency that `dlo` takes when it is not told, and its plan."""

from __future__ import annotations

from h3compile.plan.cost import Parallel
from h3compile.plan.memory import usable
from h3compile.plan.planner import PLACEMENTS, Planner, Question, tenants
from h3compile.plan.plans import Plan
from h3compile.plan.residency import Mode, Residency
from h3compile.plan.shapes import Clip
from h3compile.plan.shortage import shortage
from h3compile.plan.space import Space
from h3compile.plan.work import ProgramWork
from h3compile.targets import Node, Target

__all__ = ["fastest_residency", "plan_of"]


def fastest_residency(
    work: ProgramWork,
    target: Target,
    *,
    ranks: int = 1,
    modes: tuple[Mode, ...] = ("local", "allgather"),
    hbm: int | None = None,
    clip: Clip | None = None,
) -> Residency:
    """That of the fastest plan of ``work`` on one ``target``, in ``hbm`` bytes of it or all there are.

    Planned for ``clip``, 1344x768 and 124 frames unless said. ``work`` is that of one of ``ranks``, which can
    gather blocks from each other if ``modes`` allow it. `H3CompileError` where nothing fits, and where the
    target does not say how fast it is.
    """
    question = Question(
        Node(target, ranks),
        clip or Clip(),
        passes=work.passes,
        hbm=hbm,
        work=lambda passes: work,
        parallel=Parallel(1, ranks),
        modes=modes,
    )
    planner = Planner(question)
    found = planner.fastest()
    if found is None:
        raise shortage(planner)
    return found.residency


def plan_of(work: ProgramWork, target: Target, residency: Residency, clip: Clip | None = None) -> Plan:
    """The plan of a ``residency`` on one ``target``, of a clip of 1344x768 and 124 frames unless said.

    Text encoder and VAEs live where they first fit beside it, or elsewhere. `H3CompileError` where the target
    does not say how fast it is.
    """
    limit = usable(target)
    for placements in PLACEMENTS:
        space = Space(work, target, clip or Clip(), passes=work.passes, tenants=tenants(placements, 1))
        if limit is None or space.memory(residency).peak <= limit:
            break
    return Plan(Node(target, 1), space, residency, space.step(residency), limit)
