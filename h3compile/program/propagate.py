"""Shape and dtype propagation: every node of a region gets a fake tensor in ``meta["val"]``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from h3compile.program.dims import evaluate_dim
from h3compile.program.facts import Dim
from h3compile.program.region import Port, Region
from h3compile.program.retarget import retarget

__all__ = ["DimSpecialized", "fake_inputs", "port_of", "propagate"]


aten = torch.ops.aten

# Products whose fake implementations take operands of several dtypes; their kernels do not.
_OF_ONE_DTYPE = frozenset({aten.addmm.default, aten.linear.default, aten.matmul.default, aten.mm.default})


class DimSpecialized(Exception):
    """An operator would only work for some values of a dimension that must stay free."""


class _Symbols:
    """The symbolic sizes of one propagation, and the way back from symbols to names."""

    def __init__(self, dims: Iterable[Dim]) -> None:
        # No duck shaping: two dims with equal hints are still two dims. No specialization on 0 and 1:
        # one text row and one timestep are legal.
        self.env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.env)
        self.sizes: dict[str, torch.SymInt] = {}
        self.names: dict[str, str] = {}
        self._dims = {dim.name: dim for dim in dims}
        self._checked = 0
        for dim in self._dims.values():
            source = ConstantSource(dim.name)
            symbol = self.env.create_symbol(
                dim.hint,
                source,
                dynamic_dim=DimDynamic.DYNAMIC,
                constraint_dim=None,
                do_not_specialize_zero_one=True,
            )
            size = self.env.create_symintnode(symbol, hint=dim.hint, source=source)
            assert isinstance(size, torch.SymInt)
            self.sizes[dim.name] = size
            self.names[str(symbol)] = dim.name

    def fake(self, port: Port, device: torch.device) -> torch.Tensor:
        shape = [evaluate_dim(dim, self.sizes) for dim in port.shape]
        with self.mode:
            return torch.empty(shape, dtype=port.dtype, device=device)

    def check(self, where: str) -> None:
        """Raise `DimSpecialized` when what has run since the last check assumed something of a length."""
        for symbol, value in self.env.replacements.items():
            name = _named(str(symbol), self.names)
            raise DimSpecialized(f"{where} fixes the length {name} to {_named(str(value), self.names)}")
        for guard in self.env.guards[self._checked :]:
            self._check_guard(guard.expr, where)
        self._checked = len(self.env.guards)

    def _check_guard(self, guard: Any, where: str) -> None:  # a sympy relation
        if len(guard.free_symbols) != 1:
            return  # how two lengths compare is known to the model alone
        (symbol,) = guard.free_symbols
        dim = self._dims[self.names[str(symbol)]]
        for length in (*_SAMPLES, dim.largest):
            if dim.smallest <= length <= dim.largest and not guard.subs(symbol, length):
                text = _named(str(guard), self.names)
                raise DimSpecialized(f"{where} does not work for {dim.name} = {length}: it takes {text}")


# Lengths that a guard is tried on: odd, even, prime, and the alignments that kernels like to assume. Not 1:
# PyTorch tells a length from 1 to see whether it broadcasts, and its operators then do what is right.
_SAMPLES = (2, 3, 5, 7, 8, 16, 17, 64, 127, 128, 4097)


def _spell(size: int | torch.SymInt, names: Mapping[str, str]) -> int | str:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else _named(str(expression), names)


def _named(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)


def _check_dtypes(node: fx.Node, args: Iterable[object]) -> None:
    dtypes = dict.fromkeys(value.dtype for value in args if isinstance(value, torch.Tensor))
    if node.target in _OF_ONE_DTYPE and len(dtypes) > 1:
        raise TypeError(f"{node.name} ({node.target}) multiplies {' and '.join(map(str, dtypes))}")


def port_of(name: str, value: torch.Tensor, names: Mapping[str, str]) -> Port:
    """The port that describes a fake tensor; ``names`` maps shape symbols to dimension names."""
    return Port(name, value.dtype, tuple(_spell(size, names) for size in value.shape))


def fake_inputs(
    region: Region, dims: Iterable[Dim], device: str = "cpu"
) -> tuple[list[torch.Tensor], _Symbols]:
    """Fake tensors for every placeholder of ``region``, and the symbols they share."""
    symbols = _Symbols(dims)
    return [symbols.fake(port, torch.device(device)) for port in region.placeholders], symbols


class _Memo:
    """Results by operator and types of operands: fifty equal blocks cost what one does.

    Operators of a program are pure, so operands of equal type give a result of equal type; one fake
    tensor then stands for all of a type.
    """

    def __init__(self) -> None:
        self._types: dict[Hashable, Any] = {}
        self._results: dict[Hashable, Any] = {}

    def shared(self, value: Any) -> Any:
        """The one that stands for all values of this type; tuples and lengths are kept as they are."""
        if isinstance(value, torch.Tensor):
            layout = (str(value.shape), str(value.stride()), str(value.storage_offset()))
            return self._types.setdefault((value.dtype, value.device, *layout), value)
        if isinstance(value, list | tuple):
            return type(value)(self.shared(item) for item in value)
        return value

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """The result of ``node`` on shared operands, and whether the operator had to run for it."""
        key = (node.target, _hashable(args), _hashable(kwargs))
        if key in self._results:
            return self._results[key], False
        assert callable(node.target)
        self._results[key] = self.shared(node.target(*args, **kwargs))
        return self._results[key], True


def _hashable(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return id(value)  # shared values live as long as the memo
    if isinstance(value, torch.SymInt):
        return f"{value} rows"
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in value.items())
    return type(value), value


def propagate(region: Region, dims: Iterable[Dim], device: str = "cpu") -> Region:
    """``region`` with fresh fake values at every node, and its output ports as they come out.

    Every dimension stays symbolic. The graph is copied, never edited; device constants in it are
    rewritten to ``device``. Raises `DimSpecialized` when an operator pins a length, and whatever the
    operators raise when shapes or dtypes do not fit.
    """
    inputs, symbols = fake_inputs(region, dims, device)
    graph = retarget(region.graph, device)
    values: dict[fx.Node, Any] = {}  # tensors, lengths and tuples of tensors
    memo, feed = _Memo(), iter(inputs)
    outputs: tuple[Port, ...] = ()
    # The Python dispatcher: without it composite operators read symbolic sizes as numbers in torch 2.11.
    with symbols.mode, enable_python_dispatcher():
        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = next(feed)  # its own: a compiler must not take two inputs for one
                values[node] = memo.shared(node.meta["val"])
            elif node.op == "call_function":
                args = fx.node.map_arg(node.args, values.__getitem__)
                kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
                _check_dtypes(node, args)
                node.meta["val"], ran = memo.call(node, args, kwargs)
                values[node] = node.meta["val"]
                if ran:
                    symbols.check(f"{node.name} ({node.target})")
            else:
                outputs = tuple(
                    port_of(port.name, values[source], symbols.names)
                    for port, source in zip(region.outputs, node.args[0], strict=True)
                )
                continue
            if isinstance(values[node], torch.Tensor):
                node.meta["port"] = port_of(node.name, values[node], symbols.names)
    return Region(region.name, graph, region.inputs, region.weights, outputs)
