"""`skip`: key tiles whose probabilities would be negligible are left out (Skip-Softmax, BLASST)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

import h3compile.ops  # noqa: F401  registers what the rewrite calls
from h3compile.errors import BuildError
from h3compile.passes.rewrites.attention import name_attention
from h3compile.pipeline.base import Match, Pass, Rewrite, Tier
from h3compile.program.analysis import execution_stages
from h3compile.program.conditions import Noisier
from h3compile.program.edit import Editor
from h3compile.program.program import Call, Program
from h3compile.program.region import Port, Region
from h3compile.program.stages import Stage
from h3compile.program.variants import add_variant
from h3compile.targets import Target

__all__ = ["Skip"]

ours = torch.ops.h3compile

# Both forms of attention, and the same with Skip-Softmax.
_FORMS = {
    ours.attention.default: ours.attention.skip,
    ours.sage_attention.default: ours.sage_attention.skip,
}


@dataclass(frozen=True)
class Skip(Pass):
    """Skip key tiles in the attention of the step, in the steps whose largest sigma is at most ``until``.

    A tile is skipped when all its scores are below the running maximum by more than
    log2(threshold / keys). The threshold is given, or follows from a calibrated fit: ``fit=a+b`` and
    ``sparsity=S`` give ``a * exp(b * S)``.
    """

    threshold: float | None = None
    until: float = 0.97
    sparsity: float | None = None
    fit: tuple[float, ...] = ()

    name: ClassVar[str] = "skip"
    tier: ClassVar[Tier] = Tier.LOSSY
    requires: ClassVar[tuple[str, ...]] = ("outline",)
    after: ClassVar[tuple[str, ...]] = ("fold-schedule", "fp8", "fuse", "hoist", "sage")

    def __post_init__(self) -> None:
        if not 0.0 <= self.until <= 1.0:
            raise ValueError(f"until is {self.until}, and a sigma lies between 0 and 1")
        if self.threshold is not None and not (self.threshold >= 0.0 and math.isfinite(self.threshold)):
            raise ValueError(f"threshold is {self.threshold}, and must be a number from 0 on")
        if (self.sparsity is None) != (not self.fit):
            raise ValueError("sparsity and fit are given together: sparsity=0.5,fit=A+B")
        if self.sparsity is not None and self.threshold is not None:
            raise ValueError("threshold and sparsity exclude each other")
        if self.fit and len(self.fit) != 2:
            raise ValueError(f"fit has {len(self.fit)} numbers, not the two of a * exp(b * sparsity)")
        if self.sparsity is not None and not 0.0 <= self.sparsity < 1.0:
            raise ValueError(f"sparsity is {self.sparsity}, and a share of tiles lies from 0 to below 1")
        if self.fit and not _positive(self.resolved_threshold):
            raise ValueError(
                f"fit and sparsity give a threshold of {self.resolved_threshold}, no positive number"
            )

    @property
    def resolved_threshold(self) -> float:
        """The threshold that is used: lambda times the number of keys."""
        if self.sparsity is not None:
            scale, rate = self.fit
            try:
                return scale * math.exp(rate * self.sparsity)
            except OverflowError:
                return math.inf
        return _THRESHOLD if self.threshold is None else self.threshold

    def apply(self, program: Program, target: Target) -> Rewrite:
        stages = execution_stages(program)
        matches: list[Match] = []
        measured: list[str] = []
        for name in list(program.regions):
            calls = program.calls_of(name)
            if not calls or stages[calls[0].name] is not Stage.STEP:
                continue
            base = program.regions[name]
            skipping, found = _skipping(base, self.resolved_threshold, name)
            if not found:
                continue
            if len(found) > 1:
                raise BuildError(f"region {name} has {len(found)} attentions, and skip counts tiles of one")
            others = {
                variant.region: _skipping(program.regions[variant.region], 0.0, variant.region)[0]
                for variant in program.variants.get(name, ())
            }
            counted = {call.name: _counting(call) for call in calls}
            measured += [call.outputs[-1] for call in counted.values()]
            program = program.evolve(
                regions={**program.regions, **others, name: skipping},
                calls=tuple(counted.get(call.name, call) for call in program.calls),
            )
            if self.until < 1.0:
                unskipped, _ = _skipping(base, 0.0, f"{name}.unskipped")
                program = add_variant(program, name, unskipped, Noisier(self.until))
            matches += [Match("attention", f"{call.name}/{found[0].name}") for call in calls]
        return Rewrite(program.evolve(measures=(*program.measures, *measured)), tuple(matches))


# The published setting for H3 with Skip-Softmax.
_THRESHOLD = 0.05


def _positive(number: float) -> bool:
    return number > 0.0 and math.isfinite(number)


def _skipping(region: Region, threshold: float, name: str) -> tuple[Region, list[fx.Node]]:
    """``region`` with Skip-Softmax at ``threshold``, its counts as a last output, and what it matched."""
    edit = Editor(region)
    name_attention(edit)
    found = [node for node in edit.nodes() if node.target in _FORMS]
    for node in found:
        form = _FORMS[node.target]  # type: ignore[index]
        both = edit.add(node, form, *node.args, threshold, name="sparse")
        node.replace_all_uses_with(edit.result(node, both, 0, name="attention"))
        edit.add_output(edit.result(node, both, 1, name="skipped"), Port("skipped", torch.int32, (2,)))
    return edit.finish(name), found


def _counting(call: Call) -> Call:
    return replace(call, outputs=(*call.outputs, f"{call.name}.skipped"))
