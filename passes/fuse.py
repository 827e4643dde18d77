"""`fuse`: one GEMM for q, k and v, and one operator for every chain of elementwise work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

import h3compile.ops  # noqa: F401  registers what the rewrites call
from h3compile.passes.rewrites.attention import fuse_query_and_key, name_attention
from h3compile.passes.rewrites.joint_qkv import Joined, join_projections
from h3compile.passes.rewrites.modulation import fuse_gated_norms, fuse_gates, fuse_modulated_norms
from h3compile.passes.rewrites.swiglu import fuse_swiglu
from h3compile.pipeline.base import Match, Pass, Rewrite, Tier
from h3compile.program.edit import Editor
from h3compile.program.program import Call, Program
from h3compile.program.region import Region
from h3compile.program.weights import Concat, Weight
from h3compile.targets import Target

__all__ = ["Fuse"]

# In this order: a later one reads what an earlier one made.
_REWRITES: Mapping[str, Callable[[Editor], list[fx.Node]]] = {
    "attention": name_attention,
    "qk-norm-rope": fuse_query_and_key,
    "modulated-norm": fuse_modulated_norms,
    "gate": fuse_gates,
    "gated-norm": fuse_gated_norms,
    "swiglu": fuse_swiglu,
}


@dataclass(frozen=True)
class Fuse(Pass):
    """Fuse projections, norms, modulations, gates, rotations and SwiGLU; each result is rounded once."""

    name: ClassVar[str] = "fuse"
    tier: ClassVar[Tier] = Tier.ROUNDING
    requires: ClassVar[tuple[str, ...]] = ("outline",)
    after: ClassVar[tuple[str, ...]] = ("fold-schedule", "hoist")
    default: ClassVar[bool] = True

    def apply(self, program: Program, target: Target) -> Rewrite:
        matches: list[Match] = []
        weights = dict(program.weights)
        regions: dict[str, Region] = {}
        calls: dict[str, Call] = {call.name: call for call in program.calls}
        for name, region in program.regions.items():
            edit = Editor(region)
            joined = join_projections(edit)
            found = [("qkv", joint.port.name) for joint in joined]
            for kind, rewrite in _REWRITES.items():
                found += [(kind, node.name) for node in rewrite(edit)]
            regions[name] = edit.finish()
            for call in program.calls_of(name):
                calls[call.name] = _bound(call, region, regions[name], joined, weights)
                matches += [Match(kind, f"{call.name}/{at}") for kind, at in found]
        rewritten = program.evolve(regions=regions, calls=tuple(calls.values()), weights=weights)
        return Rewrite(rewritten, tuple(matches))


def _bound(
    call: Call, before: Region, after: Region, joined: list[Joined], weights: dict[str, Weight]
) -> Call:
    """``call`` with joint weights in the place of their parts, which leave the table ``weights``."""
    names = dict(zip((port.name for port in before.weights), call.weights, strict=True))
    for joint in joined:
        parts = [names[part] for part in joint.parts]
        # The table's name differs from the port's by the path of the block in front of it.
        path = parts[0].removesuffix(joint.parts[0])
        names[joint.port.name] = f"{path}{joint.port.name}"
        weights[names[joint.port.name]] = Concat(tuple(weights.pop(part) for part in parts))
    return replace(call, weights=tuple(names[port.name] for port in after.weights))
