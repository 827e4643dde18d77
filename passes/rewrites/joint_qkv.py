"""Query, key and value projections of one input become one GEMM."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import fx

from h3compile.program.edit import Editor
from h3compile.program.region import Port

__all__ = ["Joined", "join_projections"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Joined:
    """A weight that takes the place of several, joined along their rows."""

    port: Port
    parts: tuple[str, ...]


def join_projections(edit: Editor) -> list[Joined]:
    """Join every three linears of ``edit`` that read one value, without bias, with weights of equal shape.

    The three results become slices of one. Each weight must be read by its linear alone.
    """
    readers: Mapping[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in edit.nodes():
        if node.target is aten.linear.default and len(node.args) == 2 and _owned(edit, node.args[1]):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            readers[source].append(node)
    return [_join(edit, source, linears) for source, linears in readers.items() if _alike(edit, linears)]


def _owned(edit: Editor, weight: object) -> bool:
    return isinstance(weight, fx.Node) and edit.weight_of(weight) is not None and len(weight.users) == 1


def _ports(edit: Editor, linears: list[fx.Node]) -> list[Port]:
    return [port for linear in linears if (port := edit.weight_of(linear.args[1])) is not None]


def _alike(edit: Editor, linears: list[fx.Node]) -> bool:
    kinds = {(port.dtype, port.shape) for port in _ports(edit, linears)}
    return len(linears) == 3 and len(kinds) == 1


def _join(edit: Editor, source: fx.Node, linears: list[fx.Node]) -> Joined:
    ports = _ports(edit, linears)
    rows, width = ports[0].shape
    assert isinstance(rows, int)
    joint = Port(_joint_name([port.name for port in ports]), ports[0].dtype, (3 * rows, width))
    weight = edit.add_weight(joint, ports[-1])
    product = edit.add(linears[0], aten.linear.default, source, weight, name="qkv")
    for place, linear in enumerate(linears):
        part = edit.add(
            linears[0], aten.slice.Tensor, product, -1, place * rows, (place + 1) * rows, name="projected"
        )
        linear.replace_all_uses_with(part)
    edit.sweep()
    edit.drop_weights(ports)
    return Joined(joint, tuple(port.name for port in ports))


def _joint_name(names: list[str]) -> str:
    """``attn.to_qkv.weight`` for ``attn.to_q.weight``, ``attn.to_k.weight`` and ``attn.to_v.weight``."""
    head = _common_start(names)
    tail = _common_start([name[::-1] for name in names])[::-1]
    return head + "".join(name[len(head) : len(name) - len(tail)] for name in names) + tail


def _common_start(names: list[str]) -> str:
    equal = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in equal)
