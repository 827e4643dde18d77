"""Regions as JSON: readable, diffable, and loaded without executing anything.

Only operators of the ``aten`` and ``h3compile`` namespaces and a few of Python's own are written or
read, none that reaches files or changes its operands, and every name is an identifier: FX turns a graph
into Python source, in which a name that is more than a name would be code.
"""

from __future__ import annotations

import json
import keyword
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from h3compile.program.region import Port, Region

__all__ = [
    "constant_error",
    "dtype_name",
    "effect",
    "op_name",
    "parse_dtype",
    "region_from_json",
    "region_to_json",
]

FORMAT = 1

_PYTHON_OPS: Mapping[str, Callable[..., object]] = {
    "operator.getitem": operator.getitem,
    "operator.add": operator.add,
    "operator.sub": operator.sub,
    "operator.mul": operator.mul,
    "operator.floordiv": operator.floordiv,
}
_PYTHON_NAMES: Mapping[Callable[..., object], str] = {op: name for name, op in _PYTHON_OPS.items()}
_NAMESPACES = ("aten", "h3compile")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEYWORDS: Mapping[str, Mapping[str, object]] = {
    "layout": {"strided": torch.strided},
    "memory_format": {
        "contiguous_format": torch.contiguous_format,
        "preserve_format": torch.preserve_format,
    },
}


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """The dtype of that name; `ValueError` when torch has none."""
    dtype = vars(torch).get(name)  # not getattr: torch imports submodules when asked for them
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


def op_name(target: object) -> str:
    """``aten.linear.default`` for an operator overload, ``operator.getitem`` for a Python one.

    Raises `ValueError` on anything that is no operator of a program.
    """
    if isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES:
        return str(target)
    if callable(target) and target in _PYTHON_NAMES:
        return _PYTHON_NAMES[target]
    raise ValueError(f"{target!s} is not an operator a program may hold")


def effect(target: object) -> str | None:
    """What an operator does besides computing its result, or ``None``."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    schema = target._schema
    if schema.is_mutable:
        return "changes its operands"
    if any(argument.name == "filename" for argument in schema.arguments):
        return "opens a file"
    if not schema.returns and not schema.name.startswith("aten::_assert_"):
        return "returns nothing"
    return None


def _parse_op(name: str) -> Callable[..., object]:
    if name in _PYTHON_OPS:
        return _PYTHON_OPS[name]
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if namespace not in _NAMESPACES or not packet or not overload:
        raise ValueError(f"{name!r} is not an operator a program may hold")
    try:
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError as error:
        raise ValueError(f"this torch has no operator {name!r}") from error
    if not isinstance(op, torch._ops.OpOverload):
        raise ValueError(f"{name!r} is not an operator overload")
    if reason := effect(op):
        raise ValueError(f"{name!r} {reason}")
    return op


def _encode(value: object) -> object:
    match value:
        case fx.Node():
            return {"node": value.name}
        case None | bool() | int() | str():
            return value
        case float():
            return {"float": value.hex()}
        case torch.dtype():
            return {"dtype": dtype_name(value)}
        case torch.device():
            return {"device": value.type}
        case list() | tuple():
            return [_encode(item) for item in value]
    for kind, names in _KEYWORDS.items():
        for name, constant in names.items():
            if value is constant:
                return {kind: name}
    raise ValueError(f"{value!r} ({type(value).__name__}) is not a graph constant")


def constant_error(node: fx.Node) -> str | None:
    """Why an argument of ``node`` cannot stand in a graph file, or ``None``."""
    try:
        _encode((node.args, tuple(node.kwargs.values())))
        _names(node.kwargs)
    except ValueError as error:
        return str(error)
    return None


def _names(values: Iterable[object]) -> list[str]:
    """``values``, once each of them can be a name in the Python source that FX makes of a graph."""
    names = []
    for value in values:
        if not isinstance(value, str) or not _IDENTIFIER.fullmatch(value) or keyword.iskeyword(value):
            raise ValueError(f"{value!r} is not a name")
        names.append(value)
    return names


def _decode(value: object, nodes: Mapping[str, fx.Node]) -> fx.node.Argument:
    match value:
        case {"node": str(name)}:
            return nodes[name]
        case {"float": str(text)}:
            return float.fromhex(text)
        case {"dtype": str(name)}:
            return parse_dtype(name)
        case {"device": str(name)}:
            return torch.device(name)
        case list():
            return [_decode(item, nodes) for item in value]
        case None | bool() | int() | str():
            return value
        case dict() if len(value) == 1:
            kind, name = next(iter(value.items()))
            if kind in _KEYWORDS and name in _KEYWORDS[kind]:
                return _KEYWORDS[kind][name]  # type: ignore[return-value]
    raise ValueError(f"{value!r} is not a graph constant")


def _port_to_json(port: Port) -> dict[str, object]:
    return {"name": port.name, "dtype": dtype_name(port.dtype), "shape": list(port.shape)}


def _port_from_json(record: Mapping[str, object]) -> Port:
    name, dtype, shape = record["name"], record["dtype"], record["shape"]
    if not (isinstance(name, str) and isinstance(dtype, str) and isinstance(shape, list)):
        raise ValueError(f"{record!r} is not a port")
    if not all(isinstance(size, int | str) and not isinstance(size, bool) for size in shape):
        raise ValueError(f"{shape!r} is not a shape")
    return Port(name, parse_dtype(dtype), tuple(shape))


def region_to_json(region: Region) -> str:
    """The region as JSON, one node a line; the same region always gives the same text."""
    nodes = []
    outputs: object = None
    for node in region.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            outputs = [source.name for source in node.args[0]]
            continue
        record: dict[str, object] = {"name": node.name, "op": op_name(node.target)}
        record["args"] = [_encode(argument) for argument in node.args]
        if node.kwargs:
            record["kwargs"] = {key: _encode(argument) for key, argument in node.kwargs.items()}
        if node.meta.get("origin"):
            record["origin"] = node.meta["origin"]
        nodes.append(record)
    head: dict[str, object] = {
        "format": FORMAT,
        "name": region.name,
        "inputs": [_port_to_json(port) for port in region.inputs],
        "weights": [_port_to_json(port) for port in region.weights],
        "outputs": [_port_to_json(port) for port in region.outputs],
        "placeholders": [node.name for node in region.graph.nodes if node.op == "placeholder"],
        "returns": outputs,
    }
    lines = ",\n".join("  " + json.dumps(record) for record in nodes)
    fields = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
    return f'{{\n{fields},\n"nodes": [\n{lines}\n]\n}}\n'


def region_from_json(text: str) -> Region:
    """The region written by `region_to_json`. Raises `ValueError` on anything it would not write."""
    try:
        record = json.loads(text)
        if record["format"] != FORMAT:
            raise ValueError(f"graph format {record['format']!r} is not {FORMAT}")
        region = _region_from_record(record)
        written = region_to_json(region)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        # The shape of the record is not checked field by field: where it is another one, something raises.
        raise ValueError(f"not a region graph ({type(error).__name__}: {error})") from error
    if written != text:
        raise ValueError("not a region graph: it was edited, or written by something else")
    return region


def _region_from_record(record: Mapping[str, Any]) -> Region:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for name in _names(record["placeholders"]):
        nodes[name] = graph.placeholder(name)
    for entry in record["nodes"]:
        (name,) = _names([entry["name"]])
        args = tuple(_decode(argument, nodes) for argument in entry["args"])
        keys = _names(entry.get("kwargs", {}))
        kwargs = {key: _decode(entry["kwargs"][key], nodes) for key in keys}
        node = graph.create_node("call_function", _parse_op(entry["op"]), args, kwargs, name=name)
        if "origin" in entry:
            node.meta["origin"] = entry["origin"]
        nodes[name] = node
    graph.output(tuple(nodes[name] for name in record["returns"]))
    inputs, weights, outputs = (
        tuple(_port_from_json(port) for port in record[kind]) for kind in ("inputs", "weights", "outputs")
    )
    if len(record["placeholders"]) != len(inputs) + len(weights) or len(record["returns"]) != len(outputs):
        raise ValueError("not a region graph: its ports are not its placeholders and results")
    return Region(record["name"], graph, inputs, weights, outputs)
