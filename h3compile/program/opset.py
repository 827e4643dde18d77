"""Which operators a program may hold, level by level."""

from __future__ import annotations

import torch
from torch import fx

from h3compile.program.program import Level
from h3compile.program.serialize import constant_error, effect, op_name

__all__ = ["illegal"]

aten = torch.ops.aten

# What only a freshly traced graph may hold; `canonicalize` removes it.
_TRACE_ONLY = frozenset(
    {
        "aten._assert_async.msg",
        "aten._assert_scalar.default",
        "aten._assert_tensor_metadata.default",
        "aten.dropout.default",
        "aten.type_as.default",
    }
)

# Memory as it was found: no function of the operands.
_UNINITIALIZED = frozenset(
    {
        "aten.empty.memory_format",
        "aten.empty_like.default",
        "aten.empty_permuted.default",
        "aten.empty_strided.default",
        "aten.new_empty.default",
        "aten.new_empty_strided.default",
    }
)

# Drawing no random numbers, these are marked as if they did; what they draw is asked of their operands.
_DROPOUT = "aten.dropout.default"  # leaves with canonicalize, which looks at its operands
_ATTENTION = "aten.scaled_dot_product_attention.default"


def illegal(node: fx.Node, level: Level) -> str | None:
    """Why ``node`` may not stand in a program of this level, or ``None``.

    Every operator and its constants must be writable to a graph file. Its result must be a function of
    its operands, and its only effect. Past the trace, what `canonicalize` removes may not come back.
    """
    if node.op in ("placeholder", "output"):
        return None
    if node.op != "call_function":
        return f"{node.op} nodes are not part of a program"
    try:
        name = op_name(node.target)
    except ValueError as error:
        return str(error)
    if reason := effect(node.target):
        return f"{name} {reason}"
    if _random(node, name):
        return f"{name} draws random numbers"
    if name in _UNINITIALIZED:
        return f"{name} leaves its memory as it was"
    if level >= Level.CANONICAL and name in _TRACE_ONLY:
        return f"{name} should have left with canonicalize"
    return constant_error(node)


def _random(node: fx.Node, name: str) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if name == _ATTENTION:
        probability = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return not (isinstance(probability, int | float) and probability == 0.0)
    return name != _DROPOUT
