"""The plan of an engine for its report: which blocks stay, and what that is predicted to take."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from h3compile.errors import H3CompileError
from h3compile.plan.choose import plan_of
from h3compile.plan.pictures import draw_plan, save
from h3compile.plan.plans import Plan
from h3compile.plan.shapes import Clip
from h3compile.plan.work_of import work_of
from h3compile.program.program import Program
from h3compile.program.residency import Residency
from h3compile.targets import Target

__all__ = ["Planned", "planned"]


@dataclass(frozen=True)
class Planned:
    """``facts``, name and value, in order; bytes by kind and ``where``; a picture as an address of its bytes.

    ``missing`` says why there is no prediction, or no picture, or what it leaves out.
    """

    residency: Residency
    facts: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    picture: str = ""
    missing: tuple[str, ...] = ()


def planned(program: Program, target: Target, steps: int) -> Planned | None:
    """The plan that ``program`` was built with, for a clip of ``steps`` grid points; None without one."""
    residency = program.residency
    if residency is None:
        return None
    if program.parallel is not None and residency.mode != "local":
        ranks = program.parallel.ranks
        return Planned(residency, missing=(f"of gathered blocks `h3compile plan --gpus {ranks}` predicts",))
    try:
        found = plan_of(work_of(program), target, residency, Clip(steps=steps))
    except H3CompileError as error:
        return Planned(residency, missing=(f"nothing is predicted: {error.cause}",))
    exchanged: tuple[str, ...] = ()
    if program.parallel is not None:
        ranks = program.parallel.ranks
        exchanged = (f"what {ranks} ranks exchange is left out: `h3compile plan --gpus {ranks}` has it",)
    kinds = {f"GPU, {phase}": amounts for phase, amounts in found.memory.device.items()} | {
        "host": found.host
    }
    try:
        return Planned(residency, _facts(found), kinds, _picture(found), exchanged)
    except H3CompileError as error:  # without matplotlib
        return Planned(residency, _facts(found), kinds, missing=(f"{error.cause}: {error.mend}", *exchanged))


def _facts(plan: Plan) -> dict[str, str]:
    slower = "as with all weights on the device"
    if plan.slowdown >= 5e-4:
        slower = f"{plan.slowdown:.1%} longer than {plan.resident_step:.4g} s with all weights on the device"
    where: dict[str, list[str]] = {}
    for tenant in plan.space.tenants:
        where.setdefault(tenant.placement, []).append(tenant.name)
    return {
        "Predicted for": plan.space.clip.summary,
        "A step": f"{plan.step:.4g} s, {slower}",
        "A request": f"{plan.request.total:.0f} s",
        "Components": "; ".join(f"{', '.join(names)} {placement}" for placement, names in where.items()),
    }


def _picture(plan: Plan) -> str:
    clip = plan.space.clip
    title = f"{plan.node.target.title}, predicted: {clip.width}x{clip.height}, {clip.frames} frames"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "plan.svg"
        save(draw_plan(plan, f"{title}, {plan.residency}"), path)
        return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"
