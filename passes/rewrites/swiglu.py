"""SwiGLU in either order of its halves becomes one operator."""

from __future__ import annotations

import operator

import torch
from torch import fx

from h3compile.program.edit import Editor
from h3compile.program.pattern import Op, Var, match

__all__ = ["fuse_swiglu"]

aten, ours = torch.ops.aten, torch.ops.h3compile

_HALVES = Op(aten.chunk.default, Var("x"), 2, -1)
_SWIGLU = Op(
    aten.mul.Tensor,
    Op(operator.getitem, _HALVES, Var("value")),
    Op(aten.silu.default, Op(operator.getitem, _HALVES, Var("gate"))),
)


def fuse_swiglu(edit: Editor) -> list[fx.Node]:
    """``halves[i] * silu(halves[1 - i])`` -> `swiglu`."""
    fused = []
    for root in edit.nodes():
        found = match(_SWIGLU, root)
        if found is None or {found.values["value"], found.values["gate"]} != {0, 1}:
            continue
        gate_first = found.values["gate"] == 0
        operands = (found.values["x"], gate_first)
        fused.append(edit.replace(root, ours.swiglu.default, *operands, name="activated"))
    edit.sweep()
    return fused
