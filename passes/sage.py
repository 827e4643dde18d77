"""`sage`: quantized attention, one scale a query row and one for every block of keys, or one a tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

import h3compile.ops  # noqa: F401  registers what the rewrite calls
from h3compile.errors import BuildError
from h3compile.ops.sage_quantized import QK_TYPES
from h3compile.ops.sage_scales import K_BLOCKS, WHOLE, kernel_block
from h3compile.passes.rewrites.attention import name_attention
from h3compile.passes.rewrites.fp8_target import require_fp8
from h3compile.passes.rewrites.sage import SageOptions, quantize_attention
from h3compile.pipeline.base import Match, Pass, Rewrite, Tier
from h3compile.program.analysis import execution_stages
from h3compile.program.conditions import Shorter
from h3compile.program.edit import Editor
from h3compile.program.program import Program
from h3compile.program.region import Port, Region
from h3compile.program.stages import Stage
from h3compile.program.variants import add_variant
from h3compile.targets import Target
from h3compile.targets.keys import WITHOUT_INT8, default_keys

__all__ = ["Sage"]

ours = torch.ops.h3compile

_SPELLED = {"float8_e4m3fn": "fp8_e4m3", "int8": "int8"}


@dataclass(frozen=True)
class Sage(Pass):
    """Quantize the operands of every attention of the step; the refiner's, once a request, stays dense.

    ``qk`` is ``fp8_e4m3`` or ``int8``, ``k_block`` the keys that share a scale; left out, the target
    decides. ``q_block=0,k_block=0`` gives all queries one scale and all keys another, for ``fp8_e4m3``: what
    FP8 attention of other libraries takes. ``smooth`` removes the mean of K first. A sequence shorter than
    one key block (128 keys where they share one scale) runs dense.
    """

    qk: str | None = None
    q_block: int = 1
    k_block: int | None = None
    smooth: bool = True

    name: ClassVar[str] = "sage"
    tier: ClassVar[Tier] = Tier.LOSSY
    requires: ClassVar[tuple[str, ...]] = ("outline",)
    after: ClassVar[tuple[str, ...]] = ("fold-schedule", "fp8", "fuse", "hoist")

    def __post_init__(self) -> None:
        if self.qk is not None and self.qk not in QK_TYPES:
            raise ValueError(f"qk is {self.qk!r}, not {' or '.join(QK_TYPES)}")
        if self.q_block not in (1, WHOLE):
            raise ValueError(f"q_block is {self.q_block}, and queries have a scale each: 1")
        if self.k_block is not None and self.k_block not in (WHOLE, *K_BLOCKS):
            raise ValueError(
                f"k_block is {self.k_block}, not one of {', '.join(map(str, K_BLOCKS))}, or 0 with q_block=0"
            )
        if (self.q_block == WHOLE) != (self.k_block == WHOLE):
            raise ValueError("one scale a tensor is for queries and keys: q_block=0,k_block=0")
        if self.k_block == WHOLE and self.qk not in (None, "fp8_e4m3"):
            raise ValueError(f"one scale a tensor is for qk=fp8_e4m3, not {self.qk}, which has no exponent")

    def options(self, target: Target) -> SageOptions:
        """The options as they are used for ``target``."""
        if self.k_block == WHOLE:
            return SageOptions("fp8_e4m3", WHOLE, self.smooth)
        defaults = _defaults(target)
        return SageOptions(self.qk or defaults.qk, self.k_block or defaults.k_block, self.smooth)

    def apply(self, program: Program, target: Target) -> Rewrite:
        require_fp8(target, self.name)
        options = self.options(target)
        if options.qk == "int8" and target.arch in WITHOUT_INT8:
            raise BuildError(
                f"the tensor cores of {target.name} ({target.arch}) multiply no integers",
                "build with sage(qk=fp8_e4m3)",
            )
        stages = execution_stages(program)
        matches: list[Match] = []
        for name, region in program.regions.items():
            calls = program.calls_of(name)
            if not calls or stages[calls[0].name] is not Stage.STEP:
                continue
            dense = Editor(region)
            name_attention(dense)
            edit = Editor(replace(region, graph=dense.graph))
            found = [node for node in edit.nodes() if node.target is ours.attention.default]
            lengths = {_length(node) for node in found}
            for node in found:
                quantize_attention(edit, node, options)
            if not found:
                continue
            program = program.evolve(regions={**program.regions, name: edit.finish()})
            program = _with_dense_form(program, name, dense.finish(f"{name}.dense"), lengths, options.k_block)
            matches += [Match("attention", f"{call.name}/{node.name}") for call in calls for node in found]
        return Rewrite(program, tuple(matches))


def _defaults(target: Target) -> SageOptions:
    kind, block = default_keys(target.arch)
    return SageOptions(_SPELLED[kind], block, True)


def _length(node: fx.Node) -> str:
    port = node.meta["port"]
    assert isinstance(port, Port)
    rows = port.shape[1]
    assert isinstance(rows, str), port
    return rows


def _with_dense_form(program: Program, base: str, dense: Region, lengths: set[str], k_block: int) -> Program:
    conditions = [Shorter(length, kernel_block(k_block)) for length in sorted(lengths)]
    return add_variant(program, base, dense, *conditions)
