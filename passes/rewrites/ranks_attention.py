"""Attention shared by heads: in front of it rows are exchanged for heads, behind it heads for rows."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from h3compile.errors import BuildError
from h3compile.ops.exchange_groups import RING
from h3compile.ops.sage_scales import WHOLE
from h3compile.passes.rewrites.attention import name_attention
from h3compile.passes.rewrites.ranks_exchange import heads_to_rows, rows_to_heads
from h3compile.passes.rewrites.ranks_select import select
from h3compile.program.edit import Editor
from h3compile.program.parallel import Parallel
from h3compile.program.region import Port, Region

__all__ = ["heads_of", "share_attention"]

aten, ours = torch.ops.aten, torch.ops.h3compile

# Attention -> in which dimension of a query its heads are counted.
_ATTENTION: Mapping[object, int] = {
    aten.scaled_dot_product_attention.default: 1,
    ours.attention.default: 2,
    ours.attention.skip: 2,
    ours.sage_attention.default: 0,
    ours.sage_attention.skip: 0,
}
_PROJECTIONS = (aten.linear.default, ours.linear_fp8.default)

# Operators that are told the number of heads: at which place among their arguments.
_TOLD: Mapping[object, int] = {ours.qk_norm_rope.default: 5, ours.sage_prepare.default: 5}
# Where `sage_prepare` is told how many keys share a scale.
_K_BLOCK: Mapping[object, int] = {ours.sage_prepare.default: 8, ours.sage_prepare.separate: 4}

# Operators that treat every head alike and alone, as they stand between projection and attention.
_EACH_HEAD = frozenset(
    {
        operator.getitem,
        aten.add.Tensor,
        aten.cat.default,
        aten.chunk.default,
        aten.mul.Tensor,
        aten.neg.default,
        aten.permute.default,
        aten.rms_norm.default,
        aten.slice.Tensor,
        aten.to.dtype,
        aten.unflatten.int,
        aten.unsqueeze.default,
        ours.qk_norm_rope.default,
        ours.sage_prepare.default,
        ours.sage_prepare.separate,
    }
)
# The dimension of a head's channels in [1, rows, heads, D].
_CHANNELS = (-1, 3)
# Behind attention, up to where all heads of a row are one row of channels.
_BEHIND = frozenset({operator.getitem, aten.permute.default, aten.to.dtype})
_JOINED = aten.flatten.using_ints


@dataclass(frozen=True)
class _Shared:
    """An attention with what lies around it: the heads of all ranks, and what is computed head by head."""

    node: fx.Node
    heads: int
    width: int  # of a head
    projections: tuple[fx.Node, ...]
    inside: frozenset[fx.Node]  # from the projections on, attention included
    joined: fx.Node


def share_attention(edit: Editor, parallel: Parallel) -> tuple[list[fx.Node], set[str]]:
    """Give each rank heads of its own in every attention of ``edit``, and in a ring queries of its own.

    Without a ring the attention sees all rows, whoever holds them, so that statistics over rows (a mean of
    keys, a scale of a value channel) are those of one rank. Returns the attentions, and the input ports of
    all rows: those that are read head by head, such as rotary tables. Raises `BuildError` where the heads
    cannot be shared by so many ranks, an operator among them is not known to treat heads alone, or a ring
    would split what needs all keys.
    """
    if parallel.ring > 1:
        name_attention(edit)
    found = [_surrounded(node) for node in edit.nodes() if node.target in _ATTENTION]
    for shared in found:
        _require_divisible(shared.heads, parallel.ulysses)
        if parallel.ring > 1:
            _require_dense(shared.node)
    ports = {port.name: port for shared in found for port in _read_inside(edit, shared, parallel.rows)}
    if not found:
        return [], set()
    if not ports:
        raise BuildError(f"nothing tells {found[0].node.name} how many rows it has", "build without sp")
    rows = _count(edit, next(iter(ports.values())), parallel.rows, "all_rows")
    seen = rows if parallel.ring == 1 else _stretched(edit, list(ports.values()), rows, parallel)
    nodes = [_exchange(edit, shared, rows, seen, parallel) for shared in found]
    return nodes, set(ports)


def heads_of(region: Region) -> int | None:
    """How many heads the first attention of ``region`` has; None where there is none."""
    for node in region.graph.nodes:
        if node.target in _ATTENTION:
            return _surrounded(node).heads
    return None


def _require_dense(node: fx.Node) -> None:
    if node.target is ours.attention.default:
        return
    name = "skip" if node.target is ours.attention.skip else "sage"
    why = {"skip": "skips keys by what all of them are", "sage": "quantizes keys by the mean of all of them"}
    raise BuildError(
        f"{name} {why[name]}, and in a ring a rank sees a part at a time",
        f"share heads alone, sp(ulysses=N), or take out {name}",
    )


def _stretched(edit: Editor, tables: list[Port], rows: fx.Node, parallel: Parallel) -> fx.Node:
    """Have the heads read their ``tables`` at the rows of this rank's stretch; returns how many these are."""
    port = next(port for port in parallel.ports if port.name == parallel.stretch)
    index = edit.add_input(port)
    for table in tables:
        select(edit, edit.node_of(table), table.shape.index(parallel.rows), index, keep=rows)
    return _count(edit, port, parallel.stretch_rows, "stretch_rows")


def _count(edit: Editor, port: Port, dim: str, name: str) -> fx.Node:
    first = next(edit.nodes())
    return edit.add(first, aten.sym_size.int, edit.node_of(port), port.shape.index(dim), name=name)


def _require_divisible(heads: int, ranks: int) -> None:
    if heads % ranks:
        legal = ", ".join(str(count) for count in range(2, heads + 1) if heads % count == 0)
        raise BuildError(
            f"{ranks} ranks cannot share {heads} heads", f"take a number that divides {heads} heads: {legal}"
        )


def _surrounded(node: fx.Node) -> _Shared:
    query = node.args[0]
    assert isinstance(query, fx.Node)
    shape = _port(query).shape
    heads, width = shape[_ATTENTION[node.target]], shape[-1]
    assert isinstance(heads, int) and isinstance(width, int), shape
    inside: dict[fx.Node, None] = {node: None}
    projections: dict[fx.Node, None] = {}
    waiting = list(node.all_input_nodes)
    while waiting:
        source = waiting.pop()
        if source.op == "placeholder" or source in inside:
            continue
        if source.target in _PROJECTIONS:
            projections[source] = None
            continue
        if source.target not in _EACH_HEAD or not _alone(source, heads, width):
            raise _unknown(source)
        if source.target in _K_BLOCK and source.args[_K_BLOCK[source.target]] == WHOLE:
            raise BuildError(
                "sage(q_block=0,k_block=0) gives all heads one scale, and sp puts heads on different ranks",
                "give sage another k_block, or take out sp",
            )
        inside[source] = None
        waiting += source.all_input_nodes
    return _Shared(node, heads, width, tuple(projections), frozenset(inside), _joined(node))


def _alone(node: fx.Node, heads: int, width: int) -> bool:
    """Whether ``node``, as it is told of ``heads`` of ``width`` channels, computes each from itself."""
    match node.target:
        case aten.cat.default:
            return node.args[1] in _CHANNELS
        case aten.chunk.default:
            return node.args[2] in _CHANNELS
        case aten.rms_norm.default:
            return bool(node.args[1] == [width])
        case aten.unflatten.int:
            return node.args[1:] == (-1, [heads, -1])
        case aten.slice.Tensor if _of_projection(node):
            whole = all(isinstance(end, int) and end % (heads * width) == 0 for end in node.args[2:])
            return node.args[1] in (-1, 2) and len(node.args) == 4 and whole
        case aten.slice.Tensor:
            return node.args[1] in _CHANNELS
    return node.target not in _TOLD or bool(node.args[_TOLD[node.target]] == heads)


def _of_projection(node: fx.Node) -> bool:
    source = node.args[0]
    return isinstance(source, fx.Node) and source.target in _PROJECTIONS


def _joined(node: fx.Node) -> fx.Node:
    """Where the heads of a row become one row of channels behind the attention ``node``."""
    at = node
    while at.target is not _JOINED:
        # The counts of an attention that skips stay beside: each rank counts its own tiles.
        users = [user for user in at.users if user.target is not operator.getitem or user.args[1] == 0]
        if len(users) != 1 or users[0].target not in {*_BEHIND, _JOINED}:
            raise _unknown(users[0] if users else at)
        at = users[0]
    return at


def _unknown(node: fx.Node) -> BuildError:
    return BuildError(
        f"sp does not know whether {node.name} ({node.target}) treats every head alone", "build without sp"
    )


def _port(node: fx.Node) -> Port:
    port = node.meta["port"]
    assert isinstance(port, Port)
    return port


def _read_inside(edit: Editor, shared: _Shared, rows: str) -> list[Port]:
    """The inputs with ``rows`` that operators among the heads read."""
    found = []
    for port in edit.inputs:
        readers = set(edit.node_of(port).users)
        if rows not in port.shape or readers.isdisjoint(shared.inside):
            continue
        if not readers <= shared.inside:
            raise BuildError(f"{port.name} is read head by head and row by row", "build without sp")
        found.append(port)
    return found


def _exchange(edit: Editor, shared: _Shared, rows: fx.Node, seen: fx.Node, parallel: Parallel) -> fx.Node:
    """Exchange around one attention that sees ``seen`` of all ``rows``; returns what computes it."""
    for node in shared.inside:
        _adapt(node, shared, parallel.ulysses)
    first = shared.projections[0]
    local = edit.add(first.next, aten.sym_size.int, first, 1, name="local_rows")
    for projection in shared.projections:
        parts = _parts(projection, shared)
        heads = rows_to_heads(edit, projection, seen, parts, shared.width, parallel)
        projection.replace_all_uses_with(heads, delete_user_cb=lambda user: user in shared.inside)
    behind = set(shared.joined.users)
    back = heads_to_rows(edit, shared.joined, local, shared.width, parallel)
    shared.joined.replace_all_uses_with(back, delete_user_cb=lambda user: user in behind)
    if parallel.ring == 1:
        return shared.node
    operands = (*shared.node.args[:3], rows, parallel.ring, RING)
    return edit.replace(shared.node, ours.ring_attention.default, *operands, name="attention")


def _parts(projection: fx.Node, shared: _Shared) -> int:
    """How many of query, key and value ``projection`` gives, one behind the other."""
    width = _port(projection).shape[-1]
    assert isinstance(width, int)
    parts, rest = divmod(width, shared.heads * shared.width)
    if rest or parts not in (1, 3):
        raise BuildError(
            f"{projection.name} gives {width} channels, and {shared.heads} heads have {shared.width} each",
            "build without sp",
        )
    return parts


def _adapt(node: fx.Node, shared: _Shared, ranks: int) -> None:
    """Tell ``node`` of the heads of one rank where it names those of all."""
    if node.target in _TOLD:
        node.update_arg(_TOLD[node.target], shared.heads // ranks)
    elif node.target is aten.unflatten.int:
        node.update_arg(2, [shared.heads // ranks, -1])
    elif node.target is aten.slice.Tensor and _of_projection(node):
        source, dim, start, end = node.args
        assert isinstance(start, int) and isinstance(end, int)
        node.args = (source, dim, start // ranks, end // ranks)
