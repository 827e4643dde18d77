"""The ends of a step: a rank packs its own rows only, and what it computes of them is gathered once."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping

import torch
from torch import fx

from h3compile.ops.exchange_groups import ALL, ULYSSES
from h3compile.passes.rewrites.ranks_select import select
from h3compile.program.edit import Editor
from h3compile.program.parallel import Kind, Parallel
from h3compile.program.program import Program
from h3compile.program.region import Port, Region

__all__ = ["gather_outputs", "kinds_of", "select_rows"]

aten, ours = torch.ops.aten, torch.ops.h3compile


def kinds_of(program: Program, region: Region, inputs: Collection[str]) -> tuple[Kind, ...]:
    """The kinds of row that ``region`` packs: each has its places in an input of the model.

    ``inputs`` are the values that the region's inputs are called with.
    """
    given = {fact.name: fact for fact in program.facts.inputs}
    names = dict(zip((port.name for port in region.inputs), inputs, strict=True))
    found = []
    for node in region.graph.nodes:
        if node.target is not aten.index_copy.default:
            continue
        index = node.args[2]
        fact = given.get(names.get(index.target, ""))
        if fact is not None and len(fact.shape) == 1 and isinstance(fact.shape[0], str):
            found.append(Kind(fact.name, fact.shape[0]))
    return tuple(dict.fromkeys(found))


def select_rows(
    edit: Editor,
    values: Mapping[str, str],
    parallel: Parallel,
    *,
    local: Collection[str],
    whole: Collection[str] = (),
) -> list[fx.Node]:
    """Have ``edit`` read the rows of one rank: selected first, before anything is computed of them.

    ``values`` names, by input port, the value it is called with; those of ``local`` hold this rank's rows
    already, the ports ``whole`` stay with all rows. Rows are packed into one more place than the rank has: a
    rank without a row of a kind takes one to there, and it is cut off. Returns what packs them.
    """
    kinds = {kind.dim: kind for kind in parallel.kinds}
    ports = {port.name: port for port in parallel.ports}
    added = {port.name: edit.node_of(port) for port in edit.inputs if port.name in ports}

    def given(name: str) -> fx.Node:
        if name not in added:
            added[name] = edit.add_input(ports[name])
        return added[name]

    for port in list(edit.inputs):
        if port.name not in values:
            continue  # one of a rank's own already
        node, value = edit.node_of(port), values[port.name]
        kind = next((kinds[size] for size in port.shape if size in kinds), None)
        if value in local:
            edit.reshape_input(port, parallel.local_shape(port.shape))
        elif kind is not None and value == kind.index:
            for user in list(node.users):
                if user.target is aten.index_copy.default:
                    user.replace_input_with(node, given(kind.placed))
        elif kind is not None:
            select(edit, node, port.shape.index(kind.dim), given(kind.taken))
        elif parallel.rows in port.shape and port.name not in whole and node.users:
            select(edit, node, port.shape.index(parallel.rows), given(parallel.own))
    packed = _last_copies(edit)
    for last in packed:
        _spare_place(edit, last)
    return packed


def _last_copies(edit: Editor) -> list[fx.Node]:
    copies = [node for node in edit.nodes() if node.target is aten.index_copy.default]
    return [node for node in copies if not any(node is other.args[0] for other in copies)]


def _spare_place(edit: Editor, last: fx.Node) -> None:
    """One more row in what the copies up to ``last`` fill, cut off behind them."""
    first, dim = last, last.args[1]
    assert isinstance(dim, int)
    while first.target is aten.index_copy.default:
        source = first.args[0]
        assert isinstance(source, fx.Node)
        first = source
    sizes = first.args[1]
    assert first.target is aten.new_zeros.default and isinstance(sizes, list | tuple), first
    rows = sizes[dim]
    assert isinstance(rows, fx.Node)
    places = edit.add(first, operator.add, rows, 1, name="places")
    first.update_arg(1, [places if place == dim else size for place, size in enumerate(sizes)])
    packed = edit.add(last.next, aten.slice.Tensor, last, dim, 0, rows, name="stretch", origin=last)
    last.replace_all_uses_with(packed, delete_user_cb=lambda user: user is not packed)


def gather_outputs(edit: Editor, values: Mapping[str, str], parallel: Parallel) -> list[fx.Node]:
    """Gather what ``edit`` gives out by kind of row, all kinds in one exchange; returns the exchanges.

    Every rank then takes the rows of each kind from the rows of all ranks.
    """
    names = {kind.index for kind in parallel.kinds}
    indices = {edit.node_of(port) for port in edit.inputs if values.get(port.name) in names}
    found = [
        node for node in edit.nodes() if node.target is aten.index_select.default and node.args[2] in indices
    ]
    if not found:
        return []
    sources = [node.args[0] for node in found]
    last = found[-1]
    rows = _all_rows(edit, parallel)
    together = sources[0]
    if len(sources) > 1:
        together = edit.add(last, aten.cat.default, sources, -1, name="together")
    group = ULYSSES if parallel.ring == 1 else ALL
    gathered = edit.add(
        last, ours.gather_rows.default, together, rows, parallel.ranks, group, name="gathered"
    )
    start = 0
    for node, source in zip(found, sources, strict=True):
        assert isinstance(source, fx.Node)
        width = _width(source)
        part = edit.add(
            last, aten.slice.Tensor, gathered, -1, start, start + width, name="all_rows", origin=source
        )
        node.update_arg(0, part)
        if node is not last:
            last.prepend(node)  # from where it stood, before the exchange
        start += width
    return [gathered]


def _width(node: fx.Node) -> int:
    port = node.meta["port"]
    assert isinstance(port, Port)
    width = port.shape[-1]
    assert isinstance(width, int)
    return width


def _all_rows(edit: Editor, parallel: Parallel) -> fx.Node:
    """How many rows the sequence has."""
    port = next(port for port in edit.inputs if parallel.rows in port.shape)
    dim = port.shape.index(parallel.rows)
    first = next(edit.nodes())
    return edit.add(first, aten.sym_size.int, edit.node_of(port), dim, name="rows")
