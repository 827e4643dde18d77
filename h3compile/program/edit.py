"""Editing a region: on a copy of its graph, with its ports in view."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import fx

from h3compile.program.region import Port, Region

__all__ = ["Editor"]


class Editor:
    """A copy of a region's graph, to be changed in place and made a region again.

    Nodes that nothing reads any more are dropped by `finish`; the program's verifier propagates the rest.
    """

    def __init__(self, region: Region) -> None:
        self._region = region
        self.graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for node in region.graph.nodes:
            mapping[node] = self.graph.node_copy(node, mapping.__getitem__)
        self.inputs = list(region.inputs)
        self.weights = list(region.weights)
        self.outputs = list(region.outputs)

    def nodes(self) -> Iterator[fx.Node]:
        """The operators, in order, as they are when this is called."""
        return iter([node for node in self.graph.nodes if node.op == "call_function"])

    def node_of(self, port: Port) -> fx.Node:
        """The placeholder of an input or a weight of the region."""
        return self._placeholder(port)

    def weight_of(self, node: object) -> Port | None:
        """The port behind ``node`` when it is a weight of the region."""
        if not isinstance(node, fx.Node) or node.op != "placeholder":
            return None
        return next((port for port in self.weights if _label(port) == node.target), None)

    def add(
        self,
        before: fx.Node,
        target: Callable[..., object],
        *arguments: fx.node.Argument,
        name: str,
        origin: fx.Node | None = None,
    ) -> fx.Node:
        """A new operator in front of ``before``, with the provenance of ``origin`` (else ``before``)."""
        with self.graph.inserting_before(before):
            node = self.graph.create_node("call_function", target, arguments, name=name)
        source = origin or before
        if source.meta.get("origin"):
            node.meta["origin"] = source.meta["origin"]
        return node

    def replace(
        self, node: fx.Node, target: Callable[..., object], *arguments: fx.node.Argument, name: str
    ) -> fx.Node:
        """A new operator in the place of ``node``, whose result has the same type."""
        new = self.add(node, target, *arguments, name=name)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        return new

    def result(self, before: fx.Node, maker: fx.Node, place: int, *, name: str) -> fx.Node:
        """Result number ``place`` of an operator that gives several."""
        return self.add(before, operator.getitem, maker, place, name=name, origin=maker)

    def add_output(self, node: fx.Node, port: Port) -> None:
        """Return ``node`` behind what the region returns already."""
        (output,) = self.graph.find_nodes(op="output")
        returned = output.args[0]
        assert isinstance(returned, tuple)
        output.args = ((*returned, node),)
        self.outputs.append(port)

    def add_input(self, port: Port) -> fx.Node:
        """A new input behind the others."""
        before = self._first_operator() if not self.weights else self._placeholder(self.weights[0])
        with self.graph.inserting_before(before):
            node = self.graph.placeholder(_label(port))
        node.meta["port"] = port
        self.inputs.append(port)
        return node

    def drop_inputs(self, names: Collection[str]) -> None:
        """Remove the inputs called ``names``, which nothing reads."""
        for port in [port for port in self.inputs if port.name in names]:
            self.graph.erase_node(self._placeholder(port))
            self.inputs.remove(port)

    def reshape_input(self, port: Port, shape: tuple[int | str, ...]) -> None:
        """Give the input ``port`` another shape; its readers are the caller's to change."""
        self.inputs[self.inputs.index(port)] = Port(port.name, port.dtype, shape)

    def add_weight(self, port: Port, after: Port | None) -> fx.Node:
        """A new weight behind the weight ``after``, or in front of them all."""
        at = 0 if after is None else self.weights.index(after) + 1
        before = self._first_operator() if at == len(self.weights) else self._placeholder(self.weights[at])
        with self.graph.inserting_before(before):
            node = self.graph.placeholder(_label(port))
        self.weights.insert(at, port)
        return node

    def retype_weight(self, port: Port, dtype: torch.dtype) -> Port:
        """Give the weight ``port`` another dtype; its readers are the caller's to change."""
        retyped = Port(port.name, dtype, port.shape)
        self.weights[self.weights.index(port)] = retyped
        return retyped

    def _placeholder(self, port: Port) -> fx.Node:
        nodes: list[fx.Node] = [node for node in self.graph.nodes if node.op == "placeholder"]
        return next(node for node in nodes if node.target == _label(port))

    def _first_operator(self) -> fx.Node:
        nodes: list[fx.Node] = list(self.graph.nodes)
        return next(node for node in nodes if node.op != "placeholder")

    def drop_weights(self, ports: Sequence[Port]) -> None:
        """Remove weights that nothing reads."""
        for port in ports:
            self.graph.erase_node(self._placeholder(port))
            self.weights.remove(port)

    def sweep(self) -> None:
        """Drop every operator that nothing reads."""
        for node in reversed(self.graph.nodes):
            if node.op == "call_function" and not node.users:
                self.graph.erase_node(node)

    def finish(self, name: str | None = None) -> Region:
        """The edited region, under its old name or a new one."""
        self.sweep()
        region = self._region
        return Region(
            name or region.name, self.graph, tuple(self.inputs), tuple(self.weights), tuple(self.outputs)
        )


def _label(port: Port) -> str:
    return port.name.replace(".", "_")
