"""Small programs made by hand: what the houses `program` and `pipeline` are tested on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import fx

from h3compile.program.facts import Dim, InputFact, ModelFacts
from h3compile.program.program import Call, Level, Program
from h3compile.program.region import Port, Region
from h3compile.program.stages import Stage
from h3compile.program.verifier import verify
from h3compile.program.weights import Load

aten = torch.ops.aten

F32 = torch.float32
ROWS, TIMES = "rows", "timesteps"
WIDTH = 8

FACTS = ModelFacts(
    name="Toy",
    config={"width": WIDTH},
    dims=(Dim(ROWS, hint=6), Dim(TIMES, hint=2, largest=1 << 10)),
    inputs=(
        InputFact("x", F32, (ROWS, WIDTH), Stage.STEP),
        InputFact("t", F32, (TIMES,), Stage.SCHEDULE),
        InputFact("text", F32, (ROWS, WIDTH), Stage.REQUEST),
        InputFact("index", torch.int64, (ROWS,), Stage.STEP),
    ),
    outputs=("result",),
    repeats=(),
    segments=(),
    expected={},
)


def wide(name: str, rows: int | str = ROWS, width: int = WIDTH) -> Port:
    """A float32 port of ``rows`` x ``width``."""
    return Port(name, F32, (rows, width))


def region(
    name: str,
    inputs: tuple[Port, ...],
    weights: tuple[Port, ...],
    body: Callable[..., tuple[fx.Node, ...]],
) -> Region:
    """The region whose graph ``body(op, *placeholders)`` builds, where ``op(target, *args)`` adds a node."""
    graph = fx.Graph()
    nodes = []
    for port in (*inputs, *weights):
        node = graph.placeholder(port.name.replace(".", "_"))
        node.meta["port"] = port
        nodes.append(node)

    def op(target: Callable[..., object], *args: object, **kwargs: object) -> fx.Node:
        return graph.call_function(target, args, kwargs)  # type: ignore[arg-type]

    results = body(op, *nodes)
    graph.output(tuple(results))
    # What comes out, and its type, is found by propagation.
    outputs = tuple(Port(node.name, F32, ()) for node in results)
    return Region(name, graph, inputs, weights, outputs)


def program(
    regions: tuple[Region, ...],
    calls: tuple[Call, ...],
    outputs: tuple[str, ...],
    *,
    facts: ModelFacts = FACTS,
    level: Level = Level.OUTLINED,
    check: bool = True,
) -> Program:
    """A program of these regions, every weight loaded under its own name, verified unless told not to."""
    by_name = {item.name: item for item in regions}
    weights = {
        weight: Load(weight, port.shape, port.dtype)  # type: ignore[arg-type]
        for call in calls
        for weight, port in zip(call.weights, by_name[call.region].weights, strict=True)
    }
    facts = replace(facts, outputs=outputs)
    made = Program(facts, by_name, calls, outputs, weights, level)
    return verify(made) if check else made


def call(name: str, index: int, inputs: str, weights: str, outputs: str) -> Call:
    """A call, its values written as words."""
    return Call(name, index, tuple(inputs.split()), tuple(weights.split()), tuple(outputs.split()))


def toy() -> Program:
    """Two modulated blocks between an entry and an exit, with work of every stage in each block.

    A block has schedule work of its own (``mod``), request work that both blocks share (``twice``) and
    request work of its own (``own``).
    """

    def entry(op: Callable[..., fx.Node], x: fx.Node, t: fx.Node, text: fx.Node, w: fx.Node) -> tuple:
        column = op(aten.unsqueeze.default, t, 1)
        return op(aten.neg.default, x), op(aten.linear.default, column, w), op(aten.silu.default, text)

    def block(
        op: Callable[..., fx.Node],
        hidden: fx.Node,
        emb: fx.Node,
        context: fx.Node,
        index: fx.Node,
        m: fx.Node,
        c: fx.Node,
        w: fx.Node,
    ) -> tuple:
        mod = op(aten.linear.default, op(aten.silu.default, emb), m)
        scale = op(aten.add.Tensor, op(aten.index_select.default, mod, 0, index), 1.0)
        twice = op(aten.mul.Tensor, context, 2.0)
        own = op(aten.linear.default, twice, c)
        wide_h = op(aten.mul.Tensor, hidden, scale)
        up = op(aten.silu.default, op(aten.linear.default, wide_h, w))
        return (op(aten.add.Tensor, op(aten.add.Tensor, up, own), op(aten.add.Tensor, twice, hidden)),)

    def leave(op: Callable[..., fx.Node], hidden: fx.Node, w: fx.Node) -> tuple:
        return (op(aten.linear.default, hidden, w),)

    square = (WIDTH, WIDTH)
    x, t, text = wide("x"), Port("t", F32, (TIMES,)), wide("text")
    index = Port("index", torch.int64, (ROWS,))
    return program(
        (
            region("entry", (x, t, text), (Port("w", F32, (WIDTH, 1)),), entry),
            region(
                "block",
                (wide("hidden"), wide("emb", TIMES), wide("context"), index),
                (Port("mod.weight", F32, square), Port("own.weight", F32, square), Port("up", F32, square)),
                block,
            ),
            region("leave", (wide("hidden"),), (Port("w", F32, square),), leave),
        ),
        (
            call("entry", 0, "x t text", "entry.w", "h0 emb context"),
            call("block", 0, "h0 emb context index", "m0 c0 w0", "h1"),
            call("block", 1, "h1 emb context index", "m1 c1 w1", "h2"),
            call("leave", 0, "h2", "leave.w", "result"),
        ),
        ("result",),
    )


def counting(old: Region, name: str, skipped: int, considered: int) -> Region:
    """A copy of ``old`` that also returns these two counts, int32 [2]."""
    made, _ = copied(old)
    output = next(iter(reversed(made.graph.nodes)))
    first = next(iter(made.graph.nodes))
    with made.graph.inserting_before(output):
        parts = [
            made.graph.call_function(aten.new_full.default, (first, [1], count), {"dtype": torch.int32})
            for count in (skipped, considered)
        ]
        counts = made.graph.call_function(aten.cat.default, (parts,))
    output.args = ((*output.args[0], counts),)
    outputs = (*made.outputs, Port(counts.name, torch.int32, (2,)))
    return replace(made, name=name, outputs=outputs)


def counted() -> Program:
    """`toy` whose blocks each report that they skipped 1 of 4 tiles."""
    made = toy()
    block = counting(made.regions["block"], "block", 1, 4)
    calls = [
        replace(item, outputs=(*item.outputs, f"tiles{item.index}")) if item.region == "block" else item
        for item in made.calls
    ]
    regions = {**made.regions, "block": block}
    return verify(made.evolve(regions=regions, calls=tuple(calls), measures=("tiles0", "tiles1")))


def dense(made: Program, name: str = "block.dense") -> Region:
    """Another form of the block of `counted`: it skips nothing, and has relu where the block has silu."""
    form = counting(toy().regions["block"], name, 0, 0)
    up = [node for node in form.graph.nodes if node.target is aten.silu.default][-1]
    up.target = aten.relu.default
    return replace(form, inputs=made.regions["block"].inputs, weights=made.regions["block"].weights)


def tensors(made: Program, seed: int = 0) -> dict[str, torch.Tensor]:
    """A value for every weight of ``made``."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(weight.shape, generator=generator) / 3).to(weight.dtype)
        for name, weight in made.weights.items()
    }


def inputs(rows: int = 5, times: int = 2, seed: int = 1) -> dict[str, torch.Tensor]:
    """Inputs of a toy program."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, WIDTH, generator=generator),
        "t": torch.rand(times, generator=generator),
        "text": torch.randn(rows, WIDTH, generator=generator),
        "index": torch.randint(times, (rows,), generator=generator),
    }


class Tensors:
    """A tensor source over a mapping that counts what is read."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self.values = values
        self.reads: list[str] = []

    def read(self, key: str) -> torch.Tensor:
        self.reads.append(key)
        return self.values[key]


def copied(old: Region) -> tuple[Region, dict[str, fx.Node]]:
    """A copy of a region to be broken, and its nodes by name."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(old.graph, mapping))
    return replace(old, graph=graph), {node.name: node for node in graph.nodes}
