"""Reads off a region what it has to do: symbolic sizes through its graph, operators by their own cost.

Between products and operators of ours Inductor fuses what is row by row; `_Kernels` does the same walk: an
intermediate that one kernel makes and uses is never in memory. With ``fused=False`` every operator is a
kernel of its own, as in eager PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.utils._sympy.functions import CeilDiv, CleanDiv, FloorDiv

from h3compile.ops import OPERATORS
from h3compile.ops.attention import ATTENTION
from h3compile.ops.exchange import ROWS_TO_HEADS
from h3compile.ops.operator import Operand
from h3compile.ops.ring_attention import RING_ATTENTION
from h3compile.plan.collectives import RING_HOLDS, RING_MERGES
from h3compile.plan.polynomial import Polynomial, total, undominated
from h3compile.plan.work import Kind, Piece, RegionWork
from h3compile.program.facts import Dim
from h3compile.program.propagate import propagate
from h3compile.program.region import Region
from h3compile.program.serialize import dtype_name, op_name

__all__ = ["polynomial_of", "region_attended", "region_peak", "region_work"]

aten = torch.ops.aten

# A tile of outputs that a multiprocessor computes at a time. The kernels of the H200 take 192 x 192 in BF16
# and 128 x 128 in FP8 of a product, and 192 queries of attention; other sizes differ by less than a tenth
# of a wave.
_TILE = 192

# Bytes at which every weight of a range starts: `engine.layout.ALIGNMENT`, what the CUDA allocator
# guarantees.
_ALIGNMENT = 256

_OURS = {operator.target: operator for operator in OPERATORS}

# Kernels of an operator of ours, where more than one. Of a ring those of a turn: an attention, and what a
# stretch is laid together or sent by.
_LAUNCHES = {"sage_prepare": 6, "sage_quantize": 6, "ring_attention": 2}

_ATTENTION = ("attention", "sage_attention", "ring_attention")

# Operators whose result is another way to look at the memory of their first operand.
_VIEWS = frozenset(
    (
        "aten.chunk",
        "aten.expand",
        "aten.flatten",
        "aten.permute",
        "aten.reshape",
        "aten.select",
        "aten.slice",
        "aten.split",
        "aten.squeeze",
        "aten.transpose",
        "aten.unbind",
        "aten.unflatten",
        "aten.unsqueeze",
        "aten.view",
    )
)
_PRODUCTS = frozenset((aten.linear.default, aten.mm.default, aten.addmm.default))
_SDPA = aten.scaled_dot_product_attention.default
_DENSE = (_SDPA, ATTENTION.target)
# Writes rows into its first operand, in place where nothing else reads that: Inductor's reinplacing.
_SCATTERS = frozenset((aten.index_copy.default,))


def region_work(
    region: Region,
    dims: Iterable[Dim],
    *,
    tables: frozenset[str] = frozenset(),
    consumed: frozenset[str] = frozenset(),
    fused: bool = True,
) -> RegionWork:
    """The work of one region; ``tables`` are the inputs that a runner counts as tables."""
    kernels = _Kernels(propagate(region, dims), tables, consumed, fused, costs=True)
    pieces = tuple(event.piece for event in kernels.events if event.piece is not None)
    weights = sum(_aligned(math.prod(map(int, port.shape)) * port.dtype.itemsize) for port in region.weights)
    return RegionWork(pieces, weights, undominated(kernels.live()), kernels.attended(), kernels.exchanged())


def region_attended(region: Region, dims: Iterable[Dim], operators: Container[str]) -> Polynomial:
    """Bytes that libraries take for dense attention in ``region`` where they compute these ``operators``."""
    kernels = _Kernels(propagate(region, dims), frozenset(), frozenset(), fused=True, costs=False)
    return kernels.attended([operator.name for operator in OPERATORS if operator.name not in operators])


def region_peak(
    region: Region,
    dims: Iterable[Dim],
    *,
    tables: frozenset[str] = frozenset(),
    consumed: frozenset[str] = frozenset(),
    fused: bool = True,
    own: Container[str] | None = None,
) -> tuple[Polynomial, ...]:
    """`RegionWork.peak` alone; where ``own`` is given, with what libraries allocate, who compute all else.

    No operator is asked for its cost, so any that has a shape will do.
    """
    kernels = _Kernels(propagate(region, dims), tables, consumed, fused, costs=False)
    beside = Polynomial() if own is None else kernels.attended(own) + kernels.exchanged()
    return undominated(peak + beside for peak in kernels.live())


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class _Event:
    """One kernel, or call of an operator: memory it reads, memory it makes, and its work."""

    reads: frozenset[fx.Node]
    makes: Mapping[fx.Node, Polynomial]
    piece: Piece | None


class _Kernels:
    """A region as kernels in order, and what lives during each."""

    def __init__(
        self, region: Region, tables: frozenset[str], consumed: frozenset[str], fused: bool, *, costs: bool
    ) -> None:
        self._fused = fused
        self._costs = costs
        self._names = _symbol_names(region)
        self._nodes = [node for node in region.graph.nodes if node.op != "output"]
        (output,) = (node for node in region.graph.nodes if node.op == "output")
        self._returned = {self._base(node) for node in output.args[0]}
        placeholders = [node for node in self._nodes if node.op == "placeholder"]
        inputs = zip(placeholders, region.inputs, strict=False)
        given = {node: port.name for node, port in inputs if port.name not in tables}
        self._given = set(given)
        # What Inductor fuses may be computed again where it is needed later, from what it was computed of.
        self._kept = {
            node
            for node, name in given.items()
            if name not in consumed or (fused and any(map(self._is_fusible, self._users(node))))
        }
        self._stored = self._materialized()
        self.events = [event for node in self._nodes for event in self._event(node)]

    def live(self) -> Iterator[Polynomial]:
        """Bytes that live during every event: inputs that are kept throughout, the rest until last read."""
        last: dict[fx.Node, int] = {}
        for place, event in enumerate(self.events):
            for node in (*event.reads, *event.makes):
                last[node] = place
        last |= dict.fromkeys(self._returned, len(self.events))
        alive = {node: self._size(node) for node in self._given}
        yield total(alive.values())
        for place, event in enumerate(self.events):
            alive |= event.makes
            yield total(alive.values())
            for node in [n for n in alive if n not in self._kept and last.get(n, -1) <= place]:
                del alive[node]

    def attended(self, but: Container[str] = ()) -> Polynomial:
        """Bytes that libraries take for dense attention, ``but`` for these operators."""
        times = dict.fromkeys(_DENSE, 1) | {RING_ATTENTION.target: RING_MERGES}
        own = {target for target, operator in _OURS.items() if operator.name in but}
        return total(
            self._size(node) * times[node.target]
            for node in self._nodes
            if node.target in times and node.target not in own
        )

    def exchanged(self) -> Polynomial:
        """Bytes that exchanges hold at once: queries, keys, values, sent and received, or what a ring has."""
        both = (self._size(node) * 2 for node in self._nodes if node.target is ROWS_TO_HEADS.target)
        rings = (
            self._size(node) * RING_HOLDS for node in self._nodes if node.target is RING_ATTENTION.target
        )
        return total([*both, *rings])

    def _event(self, node: fx.Node) -> Iterator[_Event]:
        if (
            node.op == "placeholder"
            or self._is_view(node)
            or not isinstance(node.target, torch._ops.OpOverload)
        ):
            return
        if self._is_length(node):
            return
        if self._is_extern(node) or not self._fused:
            makes = self._made_by(node)
            reads = frozenset(self._base(n) for n in node.all_input_nodes if not self._is_length(n))
            yield _Event(reads, makes, self._extern_piece(node, makes) if self._costs else None)
        elif node in self._stored:
            loads = self._read_by(node)
            moved = total([*loads.values(), self._size(node)])
            piece = Piece(self._name(node), "rows", "float32", Polynomial(), moved)
            yield _Event(frozenset(loads), {node: self._size(node)}, piece)

    def _extern_piece(self, node: fx.Node, makes: Mapping[fx.Node, Polynomial]) -> Piece:
        assert isinstance(node.target, torch._ops.OpOverload)
        if (operator := _OURS.get(node.target)) is not None:
            given = fx.node.map_arg(node.args, _value)
            named = fx.node.map_arg(dict(node.kwargs), _value)
            operands = operator.operands(given, named)  # type: ignore[arg-type]
            cost = operator.cost(*operands)
            name = operator.name.partition(".")[0]
            kind: Kind = "gemm" if name == "linear_fp8" else "attention" if name in _ATTENTION else "rows"
            first = operands[0]
            assert isinstance(first, torch.Tensor)
            flop, tile = Polynomial(), Polynomial()
            turns = _turns(name, operands)
            if kind != "rows":
                flop = total(self._poly(count) for count in cost.flop.values())
                # Every turn of a ring has a last wave.
                tile = total([self._tile(kind, operands)] * turns)
            dtype = dtype_name(first.dtype) if kind != "rows" else "float32"
            launches = turns * _LAUNCHES.get(name, 1)
            return Piece(operator.name, kind, dtype, flop, self._poly(cost.bytes), tile, launches)
        inputs = list(dict.fromkeys(n for n in node.all_input_nodes if not self._is_length(n)))
        if node.target in _SCATTERS:
            moved = self._size(inputs[-1]) * 2  # what is read is written; the rest stays as it is
            return Piece(self._name(node), "rows", "float32", Polynomial(), moved)
        made = total(makes.values())
        moved = total([*(self._extent(n, node) for n in inputs), made])
        if node.target in _PRODUCTS or node.target is _SDPA:
            return self._product(node, moved)
        return Piece(self._name(node), "rows", "float32", Polynomial(), moved)

    def _name(self, node: fx.Node) -> str:
        """What computes rows: a kernel of Inductor's, named after its last operator, or PyTorch's own."""
        return _short(node).replace("aten.", "inductor.") if self._fused else _short(node)

    def _product(self, node: fx.Node, moved: Polynomial) -> Piece:
        values = [one.meta["val"] for one in node.all_input_nodes]
        dtype = dtype_name(node.meta["val"].dtype)
        if node.target is _SDPA:
            query, key = values[:2]
            flop = 4 * query.numel() * key.shape[-2]
            return Piece(
                _short(node), "attention", dtype, self._poly(flop), moved, self._tile("attention", values)
            )
        # The operand that is no weight has the depth last; linear has [N, K] weights, mm and addmm [K, N].
        left = values[1 if node.target is aten.addmm.default else 0]
        flop = 2 * node.meta["val"].numel() * left.shape[-1]
        return Piece(_short(node), "gemm", dtype, self._poly(flop), moved, self._tile("gemm", [left]))

    def _tile(self, kind: Kind, operands: Sequence[object]) -> Polynomial:
        first = operands[0]
        assert isinstance(first, torch.Tensor)
        depth = first.shape[-1]
        if kind == "gemm":
            return self._poly(2 * _TILE * _TILE * depth)
        # Ours have [1, rows, heads, D], SDPA [1, heads, rows, D], SAGE [heads, rows, D].
        keys = next(size for size in first.shape[:-1] if isinstance(size, torch.SymInt))
        return self._poly(4 * _TILE * depth * keys)

    def _materialized(self) -> set[fx.Node]:
        """The fusible nodes whose result is in memory.

        Those that a kernel which cannot be fused reads or the region returns, and those that are read by
        kernels on both sides of such a kernel: the earlier one stores what the later one loads.
        """
        level = self._levels()
        stored = set()
        for node in self._nodes:
            if not self._is_fusible(node):
                continue
            users = list(self._users(node))
            places = {level[user] for user in users if self._is_fusible(user)}
            if node in self._returned or any(map(self._is_extern, users)) or len(places) > 1:
                stored.add(node)
        return stored

    def _levels(self) -> dict[fx.Node, int]:
        """Before which kernels every fusible node must run: what only one reads goes along with it."""
        order = {node: place for place, node in enumerate(self._nodes)}
        externs = [order[node] for node in self._nodes if self._is_extern(node)]
        level: dict[fx.Node, int] = {}
        for node in reversed(self._nodes):
            if not self._is_fusible(node):
                continue
            users = list(self._users(node))
            stays = [level[user] for user in users if user in level]
            if any(map(self._is_extern, users)) or node in self._returned or not stays:
                stays.append(sum(place < order[node] for place in externs))
            level[node] = min(stays)
        return level

    def _users(self, node: fx.Node) -> Iterator[fx.Node]:
        """Who computes with ``node``, through views of it."""
        for user in node.users:
            if user.op == "output":
                continue
            if self._is_view(user):
                yield from self._users(user)
            else:
                yield user

    def _read_by(self, root: fx.Node) -> dict[fx.Node, Polynomial]:
        """What the kernel that stores ``root`` loads: nodes in memory, and the bytes it takes of each."""
        reads: dict[fx.Node, dict[fx.Node, Polynomial]] = {}
        seen = {root}
        pending = [(source, root) for source in root.all_input_nodes]
        while pending:
            node, reader = pending.pop()
            if self._is_length(node):
                continue
            base = self._base(node)
            if self._is_fusible(base) and base not in self._stored:
                if base not in seen:
                    seen.add(base)
                    pending += [(source, base) for source in base.all_input_nodes]
                continue
            reads.setdefault(base, {})[node] = self._extent(node, reader)
        return {
            base: min(total(parts.values()), self._size(base), key=_at_typical)
            for base, parts in reads.items()
        }

    def _extent(self, node: fx.Node, reader: fx.Node) -> Polynomial:
        """Bytes that ``reader`` loads of ``node``: a gather reads rows, from a table that caches hold."""
        size = self._size(node)
        if reader.target is aten.index_select.default and node is reader.args[0]:
            return min(self._size(reader), size, key=_at_typical)
        return size

    def _made_by(self, node: fx.Node) -> dict[fx.Node, Polynomial]:
        if node.target in _SCATTERS:
            return {}
        value = node.meta["val"]
        if not isinstance(value, list | tuple):
            return {node: self._size(node)}
        parts = {user.args[1]: user for user in node.users}
        made = {parts[place]: self._poly_bytes(part) for place, part in enumerate(value) if place in parts}
        unread = [self._poly_bytes(part) for place, part in enumerate(value) if place not in parts]
        return made | ({node: total(unread)} if unread else {})

    def _base(self, node: fx.Node) -> fx.Node:
        """The node whose memory ``node`` looks at."""
        while self._is_view(node) or node.target in _SCATTERS:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            if _is_getitem(node) and not self._is_view(source):
                return node  # a part of what an operator returned has memory of its own
            node = source
        return node

    def _is_view(self, node: fx.Node) -> bool:
        if _is_getitem(node):
            return True
        return node.op == "call_function" and _short(node) in _VIEWS

    def _is_extern(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        known = node.target in _PRODUCTS or node.target in _OURS or node.target in _SCATTERS
        return known or node.target is _SDPA

    def _is_fusible(self, node: fx.Node) -> bool:
        if node.op != "call_function" or self._is_view(node) or self._is_length(node):
            return False
        return not self._is_extern(node)

    def _is_length(self, node: fx.Node) -> bool:
        return not isinstance(node.meta.get("val"), torch.Tensor | list | tuple)

    def _size(self, node: fx.Node) -> Polynomial:
        value = node.meta["val"]
        parts = value if isinstance(value, list | tuple) else [value]
        return total(self._poly_bytes(part) for part in parts)

    def _poly_bytes(self, value: torch.Tensor) -> Polynomial:
        return self._poly(value.numel() * value.element_size())

    def _poly(self, value: int | torch.SymInt) -> Polynomial:
        if isinstance(value, int):
            return Polynomial.constant(value)
        return polynomial_of(value.node.expr, self._names)


def _at_typical(size: Polynomial) -> float:
    """Bytes where rows are many and timesteps few: a table is then smaller than what is gathered from it."""
    names = {name for term, _ in size.terms for name in term}
    return size.at({name: 2 if name == "timesteps" else 4096 for name in names})


def _value(node: fx.Node) -> Operand:
    value: Operand = node.meta["val"]
    return value


def _turns(name: str, operands: Sequence[Operand]) -> int:
    """How often an operator does its work: a ring once for the keys of each of its ranks."""
    if name != "ring_attention":
        return 1
    ring = operands[4]
    assert isinstance(ring, int)
    return ring


def _is_getitem(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and not isinstance(node.target, torch._ops.OpOverload)
        and (op_name(node.target) == "operator.getitem")
    )


def _short(node: fx.Node) -> str:
    """``aten.linear`` for ``aten.linear.default``."""
    return op_name(node.target).rpartition(".")[0]


def _symbol_names(region: Region) -> dict[sympy.Symbol, str]:
    """The symbols that a propagated region's sizes are made of, and their dims."""
    placeholders = [node for node in region.graph.nodes if node.op == "placeholder"]
    return {
        size.node.expr: dim
        for node, port in zip(placeholders, region.placeholders, strict=True)
        for size, dim in zip(node.meta["val"].shape, port.shape, strict=True)
        if isinstance(size, torch.SymInt) and isinstance(dim, str) and size.node.expr.is_Symbol
    }


def polynomial_of(expression: sympy.Expr, names: Mapping[sympy.Symbol, str]) -> Polynomial:
    """``expression`` with every division taken without rounding: off by less than one unit of its result.

    Raises `ValueError` where it is no polynomial.
    """
    for division in (FloorDiv, CleanDiv, CeilDiv):
        expression = expression.replace(division, lambda a, b: a / b)
    symbols = sorted(expression.free_symbols, key=str)
    if not symbols:
        return Polynomial.constant(float(expression))
    try:
        terms = sympy.Poly(expression.expand(), *symbols).terms()
    except sympy.PolynomialError as error:
        raise ValueError(f"{expression} is no polynomial") from error
    return Polynomial.of(
        {
            tuple(names[s] for s, power in zip(symbols, powers, strict=True) for _ in range(power)): float(
                value
            )
            for powers, value in terms
        }
    )
