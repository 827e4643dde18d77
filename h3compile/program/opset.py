"""Which operators a program may hold, level by level."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from h3compile.program.program import Level
from h3compile.program.serialize import op_name

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

# Operators whose result is not a function of their operands: equal graphs would give other bits.
_IMPURE_TAGS = (torch.Tag.nondeterministic_seeded,)


def illegal(node: fx.Node, level: Level) -> str | None:
    """Why ``node`` may not stand in a program of this level, or ``None``.

    Every operator must be nameable in a graph file, change none of its operands and draw no random
    numbers; past the trace, nothing may be left that computes nothing.
    """
    if node.op in ("placeholder", "output"):
        return None
    if node.op != "call_function":
        return f"{node.op} nodes are not part of a program"
    try:
        name = op_name(node.target)
    except ValueError as error:
        return str(error)
    if _mutates(node.target):  # type: ignore[arg-type]
        return f"{name} changes its operands"
    drops = name == "aten.dropout.default"  # with p = 0 or training off it draws nothing; canonicalize checks
    if not drops and any(tag in getattr(node.target, "tags", ()) for tag in _IMPURE_TAGS):
        random_use = name != "aten.scaled_dot_product_attention.default" or _dropout_of(node) != 0.0
        if random_use:
            return f"{name} draws random numbers"
    if level >= Level.CANONICAL and name in _TRACE_ONLY:
        return f"{name} should have left with canonicalize"
    return None


def _mutates(target: Callable[..., object]) -> bool:
    schema = getattr(target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _dropout_of(node: fx.Node) -> object:
    return node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
