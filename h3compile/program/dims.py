"""Dimension expressions: shapes in numbers, dimension names and their sums and products."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import TypeVar

__all__ = ["evaluate_dim"]

T = TypeVar("T")

_OPERATORS: Mapping[type[ast.operator], Callable[[object, object], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def evaluate_dim(dim: int | str, sizes: Mapping[str, T]) -> T | int:
    """The value of a dimension such as ``"3*timesteps"`` where every name has a size.

    The sizes may be numbers or symbolic integers. Nothing but names, integers and ``+ - * //`` is
    understood, because shapes are read from files. Raises `ValueError` on anything else.
    """
    if isinstance(dim, int):
        return dim

    def visit(node: ast.expr) -> object:
        match node:
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                return value
            case ast.Name(id=name) if name in sizes:
                return sizes[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](visit(left), visit(right))
        raise ValueError(f"{dim!r} is not a dimension expression over {', '.join(sorted(sizes))}")

    try:
        return visit(ast.parse(dim, mode="eval").body)  # type: ignore[return-value]
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(f"{dim!r} is not a dimension expression ({type(error).__name__})") from error
