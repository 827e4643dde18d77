"""The lengths of a region under Inductor: fresh symbols to compile with, and what was assumed about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._dynamo.testing import rand_strided
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from h3compile.errors import BuildError

__all__ = ["Length", "SymbolicInputs", "at_largest", "fake_values", "lengths_of"]

# Inductor's 0/1 reasoning is about layout: a row count of 1 may be broadcast or squeezed, and its stride
# is free. Guards that a count of 1 alone would break are therefore kept in the record, not refused.
_LAYOUT_LENGTH = 1


@dataclass(frozen=True)
class Length:
    """A symbolic size of a region: its name, the value to tune for and the largest legal one."""

    symbol: str
    name: str
    hint: int
    largest: int


def fake_values(graph: fx.Graph) -> list[torch.Tensor]:
    """The fake tensors of the placeholders. Raises `BuildError` for one that has none."""
    values = []
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise BuildError(
                f"input {node.name!r} of the region has no tensor value", "propagate shapes first"
            )
        values.append(value)
    return values


def _expression(size: int | torch.SymInt) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _source_name(env: ShapeEnv, symbol: sympy.Symbol) -> str | None:
    for source in env.var_to_sources.get(symbol, ()):
        if isinstance(source, ConstantSource):
            return source.source_name
    return None


def lengths_of(graph: fx.Graph, largest: Mapping[str, int], default: int) -> tuple[Length, ...]:
    """Every symbol in the shapes of the placeholders, in order of appearance.

    A length is called after the constant source its symbol was created with, else after the place it is
    first read from. ``largest`` gives legal maxima by name; a symbol without one is limited by its own
    range if that is finite, else by ``default``.
    """
    lengths: dict[str, Length] = {}
    for node, value in zip(graph.find_nodes(op="placeholder"), fake_values(graph), strict=True):
        for axis, size in enumerate(value.shape):
            if not isinstance(size, torch.SymInt):
                continue
            env: ShapeEnv = size.node.shape_env
            expression = _expression(size)
            for symbol in sorted(expression.free_symbols, key=str):
                if str(symbol) in lengths:
                    continue
                name = _source_name(env, symbol) or f"dimension {axis} of {node.name}"
                bound = env.var_to_range[symbol].upper
                limit = largest.get(name, min(int(bound), default) if bound.is_Integer else default)
                hint = size.node.hint if expression == symbol and size.node.has_hint() else limit
                lengths[str(symbol)] = Length(str(symbol), name, max(2, min(int(hint), limit)), limit)
    return tuple(lengths.values())


class SymbolicInputs:
    """Fake inputs over symbols of their own, so that nothing a compiler assumes reaches the program.

    No symbol is specialized on 0 or 1: one text row and one timestep are legal.
    """

    def __init__(
        self, values: Sequence[torch.Tensor], lengths: Iterable[Length], device: torch.device
    ) -> None:
        self.lengths = tuple(lengths)
        self.env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.env)
        self._symbols: dict[str, sympy.Symbol] = {}
        self._sizes: dict[str, int | torch.SymInt] = {}
        for length in self.lengths:
            source = ConstantSource(length.name)
            symbol = self.env.create_symbol(
                length.hint,
                source,
                dynamic_dim=DimDynamic.DYNAMIC,
                constraint_dim=StrictMinMaxConstraint(vr=ValueRanges(1, length.largest), warn_only=False),
                do_not_specialize_zero_one=True,
            )
            self._symbols[length.symbol] = symbol
            size = self.env.create_symintnode(symbol, hint=length.hint, source=source)
            assert not isinstance(size, (float, bool))
            self._sizes[length.symbol] = size
        self._names = {self._symbols[length.symbol]: sympy.Symbol(length.name) for length in self.lengths}
        self.tensors = [self._fake(value, device) for value in values]

    def _renew(self, size: int | torch.SymInt) -> int | torch.SymInt:
        if not isinstance(size, torch.SymInt):
            return size
        result = _evaluate(_expression(size), self._sizes)
        assert isinstance(result, (int, torch.SymInt))
        return result

    def _fake(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        shape = [self._renew(size) for size in value.shape]
        stride = [self._renew(step) for step in value.stride()]
        with self.mode:
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=device)

    def real(self, lengths: Iterable[Length]) -> list[torch.Tensor]:
        """Random tensors (zeros for integers) of the inputs' types, at the hints of ``lengths``."""
        hints = {self._symbols[length.symbol]: length.hint for length in lengths}

        def sizes(values: Iterable[int | torch.SymInt]) -> list[int]:
            return [int(_expression(value).xreplace(hints)) for value in values]

        return [
            rand_strided(sizes(fake.shape), sizes(fake.stride()), fake.dtype, fake.device)
            for fake in self.tensors
        ]

    def spelled(self, sizes: Iterable[int | torch.SymInt]) -> tuple[int | str, ...]:
        """Sizes in numbers and expressions over the names of the lengths."""
        expressions = (_expression(size).xreplace(self._names) for size in sizes)
        return tuple(int(size) if size.is_number else str(size) for size in expressions)

    def assumptions(self) -> tuple[str, ...]:
        """What the compiled code takes for granted about the lengths, with names for symbols.

        Raises `BuildError` naming the length when one was fixed to a value, or tied to another.
        """
        for symbol, value in self.env.replacements.items():
            if symbol in self._names and value != symbol:
                raise BuildError(
                    f"the compiled region fixes {self._names[symbol]} to {value.xreplace(self._names)}",
                    "keep this length free in the model, or lower the region with --backend eager",
                )
        return tuple(dict.fromkeys(str(guard.expr.xreplace(self._names)) for guard in self.env.guards))

    def _proven(self, guard: sympy.Basic, smallest: int) -> bool:
        ranges = {
            self._symbols[length.symbol]: ValueRanges(smallest, length.largest) for length in self.lengths
        }
        bound = bound_sympy(guard, ranges)
        return bound.is_singleton() and bool(bound.lower)

    def refused(self) -> tuple[tuple[Length, ...], str] | None:
        """The first assumption that some legal lengths break, and the lengths it is about; else None."""
        for guard in self.env.guards:
            if self._proven(guard.expr, _LAYOUT_LENGTH + 1):
                continue
            about = tuple(
                length for length in self.lengths if self._symbols[length.symbol] in guard.expr.free_symbols
            )
            return about, str(guard.expr.xreplace(self._names))
        return None


def _evaluate(expression: sympy.Expr, sizes: Mapping[str, int | torch.SymInt]) -> int | torch.SymInt:
    match expression:
        case sympy.Integer():
            return int(expression)
        case sympy.Symbol():
            return sizes[str(expression)]
        case sympy.Add():
            total: int | torch.SymInt = 0
            for part in expression.args:
                total = total + _evaluate(part, sizes)
            return total
        case sympy.Mul():
            product: int | torch.SymInt = 1
            for part in expression.args:
                product = product * _evaluate(part, sizes)
            return product
        case FloorDiv():
            return _evaluate(expression.args[0], sizes) // _evaluate(expression.args[1], sizes)
    raise BuildError(f"a region input has the size {expression}", "pass its length as a dimension of its own")


def at_largest(lengths: Iterable[Length], among: Iterable[Length]) -> tuple[Length, ...]:
    """``lengths`` with those ``among`` tuned for their largest value."""
    chosen = {length.symbol for length in among}
    return tuple(
        replace(length, hint=length.largest) if length.symbol in chosen else length for length in lengths
    )
