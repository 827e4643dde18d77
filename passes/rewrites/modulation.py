"""Norms, modulations and gated residuals become one operator each, which gathers from the table itself."""

from __future__ import annotations

import operator

import torch
from torch import fx

from h3compile.program.edit import Editor
from h3compile.program.pattern import Found, Op, Var, match

__all__ = ["fuse_gated_norms", "fuse_gates", "fuse_modulated_norms"]

aten, ours = torch.ops.aten, torch.ops.h3compile


def _part(number: str) -> Op:
    """For every row of the sequence, part ``number`` of the row of the modulation table it belongs to."""
    chunks = Op(aten.chunk.default, Var("table"), Var("parts"), -1)
    return Op(aten.index_select.default, Op(operator.getitem, chunks, Var(number)), 0, Var("index"))


_NORM = Op(aten.rms_norm.default, Var("x"), [Var("width")], Var("weight"), Var("eps"))
_MODULATED = Op(
    aten.add.Tensor,
    Op(aten.mul.Tensor, _NORM, Op(aten.add.Tensor, _part("scale"), 1)),
    _part("shift"),
)
_GATED = Op(aten.add.Tensor, Var("x"), Op(aten.mul.Tensor, _part("gate"), Var("branch")))
_NORM_OF_GATED = Op(
    ours.norm_modulate.default,
    # Read again by the next sum: the fused operator gives it as well.
    Op(
        ours.gate_residual.default,
        *(Var(name) for name in ("x", "branch", "table", "index", "gate")),
        name="sum",
        shared=True,
    ),
    Var("weight"),
    Var("table"),
    Var("index"),
    Var("shift"),
    Var("scale"),
    Var("eps"),
)


def fuse_modulated_norms(edit: Editor) -> list[fx.Node]:
    """``rms_norm(x) * (1 + table[i, scale]) + table[i, shift]`` -> `norm_modulate`."""
    fused = []
    for root in edit.nodes():
        found = match(_MODULATED, root)
        if found is None:
            continue
        operands = _operands(found, "x", "weight", "table", "index", "shift", "scale", "eps")
        fused.append(edit.replace(root, ours.norm_modulate.default, *operands, name="modulated"))
    edit.sweep()
    return fused


def fuse_gates(edit: Editor) -> list[fx.Node]:
    """``x + table[i, gate] * branch`` -> `gate_residual`."""
    fused = []
    for root in edit.nodes():
        found = match(_GATED, root)
        if found is None:
            continue
        operands = _operands(found, "x", "branch", "table", "index", "gate")
        fused.append(edit.replace(root, ours.gate_residual.default, *operands, name="residual"))
    edit.sweep()
    return fused


def fuse_gated_norms(edit: Editor) -> list[fx.Node]:
    """A `norm_modulate` of a `gate_residual` -> `gate_norm_modulate`, which gives the residual too."""
    fused = []
    for root in edit.nodes():
        found = match(_NORM_OF_GATED, root)
        if found is None:
            continue
        total = found.node("sum")
        operands = _operands(
            found, "x", "branch", "weight", "table", "index", "gate", "shift", "scale", "eps"
        )
        both = edit.add(root, ours.gate_norm_modulate.default, *operands, name="gated")
        total.replace_all_uses_with(edit.result(root, both, 0, name="residual"))
        edit.replace(root, operator.getitem, both, 1, name="modulated")
        fused.append(both)
    edit.sweep()
    return fused


def _operands(found: Found, *names: str) -> tuple[fx.node.Argument, ...]:
    return tuple(found.values[name] for name in names)
