"""Construction of regions from pieces of other graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from h3compile.program.region import Port, Region

__all__ = ["Piece", "closure", "computed", "cut", "is_tensor", "leaving", "returned"]


@dataclass(frozen=True)
class Piece:
    """A region cut out of a graph, with the nodes of that graph its ports stand for."""

    region: Region
    inputs: tuple[fx.Node, ...]
    weights: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def computed(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of ``graph`` that compute something, in order."""
    return [node for node in graph.nodes if node.op == "call_function"]


def returned(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The nodes whose values ``graph`` returns, in order."""
    output = next(iter(reversed(graph.nodes)))
    return tuple(output.args[0])


def is_tensor(node: fx.Node) -> bool:
    """Whether the node yields one tensor, and so may cross from one region to another."""
    return isinstance(node.meta.get("port"), Port)


def closure(
    nodes: Iterable[fx.Node], duplicable: Callable[[fx.Node], bool] = lambda node: False
) -> list[fx.Node]:
    """``nodes`` with all that they read and that cannot, or need not, cross between regions.

    Lengths and tuples of tensors cannot cross: they are computed again where they are read. So is
    whatever ``duplicable`` accepts. In graph order.
    """
    inside = set(nodes)
    todo = list(inside)
    while todo:
        for source in todo.pop().all_input_nodes:
            if source in inside or source.op != "call_function":
                continue
            if not is_tensor(source) or duplicable(source):
                inside.add(source)
                todo.append(source)
    if not inside:
        return []
    return [node for node in next(iter(inside)).graph.nodes if node in inside]


def leaving(part: Sequence[fx.Node], readers: Iterable[Sequence[fx.Node]]) -> list[fx.Node]:
    """The tensors of ``part`` that some other part reads and does not compute itself."""
    wanted = set()
    for reader in readers:
        inside = set(reader)
        wanted |= {source for node in reader for source in node.all_input_nodes if source not in inside}
    return [node for node in part if node in wanted and is_tensor(node)]


def cut(
    name: str, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], weights: Mapping[fx.Node, Port]
) -> Piece:
    """The region that computes ``nodes`` (closed, in graph order) and returns ``outputs``, some of them.

    What the nodes read from outside becomes a port, in order of first use: a weight where ``weights``
    names it, an input otherwise. Every tensor node must carry its ``meta["port"]``.
    """
    inside = set(nodes)
    reads = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    inputs = tuple(node for node in reads if node not in weights)
    slots = tuple(node for node in reads if node in weights)

    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in (*inputs, *slots):
        label = weights[node].name.replace(".", "_") if node in weights else _base(node.name)
        mapping[node] = graph.placeholder(label)
        mapping[node].target = mapping[node].name  # where the graph has made it unique
        mapping[node].meta = dict(node.meta)
    for node in nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), mapping.__getitem__)
        clone = graph.create_node(node.op, node.target, args, kwargs, name=_base(node.name))
        clone.meta = dict(node.meta)
        mapping[node] = clone
    graph.output(tuple(mapping[node] for node in outputs))
    region = Region(
        name,
        graph,
        tuple(_port(mapping[node]) for node in inputs),
        tuple(weights[node] for node in slots),
        tuple(_port(mapping[node]) for node in outputs),
    )
    return Piece(region, inputs, slots, tuple(outputs))


def _base(name: str) -> str:
    """A node's name without the number that kept it apart in the graph it comes from.

    Counted anew in its region, so that the region is the same text whatever the depth of the model.
    """
    return re.sub(r"(?<=\D)_\d+$", "", name)


def _port(node: fx.Node) -> Port:
    port = node.meta["port"]
    assert isinstance(port, Port), node
    return Port(node.name, port.dtype, port.shape)
