"""Moving a graph to another device.

A module of its own, because a runner needs it and must not import the symbolic shape machinery.
"""

from __future__ import annotations

import torch
from torch import fx

__all__ = ["retarget"]


def retarget(graph: fx.Graph, device: str) -> fx.Graph:
    """A copy of ``graph`` whose operators create their tensors on ``device``."""
    copy = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            copy.output(fx.node.map_arg(node.args[0], mapping.__getitem__))
            continue
        clone = copy.node_copy(node, mapping.__getitem__)
        mapping[node] = clone
        if "device" in clone.kwargs:
            clone.kwargs = {**clone.kwargs, "device": torch.device(device)}
    return copy
