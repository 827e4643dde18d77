"""What the rewrites must leave alone: graphs drawn by hand, each one step away from what is matched."""

from __future__ import annotations

import operator
from collections import Counter

import pytest
import torch
from torch import fx

import h3compile.ops  # noqa: F401  registers what the graphs call
from h3compile.passes.rewrites.attention import fuse_query_and_key, name_attention
from h3compile.passes.rewrites.fp8_linear import quantize_linear
from h3compile.passes.rewrites.joint_qkv import join_projections
from h3compile.passes.rewrites.modulation import fuse_gated_norms, fuse_gates, fuse_modulated_norms
from h3compile.passes.rewrites.sage import SageOptions, quantize_attention
from h3compile.passes.rewrites.swiglu import fuse_swiglu
from h3compile.program.edit import Editor
from h3compile.program.region import Port, Region

aten, ours = torch.ops.aten, torch.ops.h3compile
BF16 = torch.bfloat16
HEADS, WIDTH = 2, 16
INNER = HEADS * WIDTH


class Sketch:
    """A region drawn by hand: placeholders first, then operators, then `editor`."""

    def __init__(self, *inputs: str, **weights: tuple[int, ...]) -> None:
        self.graph = fx.Graph()
        self.inputs = tuple(Port(name, BF16, (1, "rows", 64)) for name in inputs)
        self.weights = tuple(Port(name, BF16, shape) for name, shape in weights.items())
        self.at = {port.name: self.graph.placeholder(port.name) for port in (*self.inputs, *self.weights)}

    def __call__(self, target: object, *args: object, **named: object) -> fx.Node:
        node = self.graph.call_function(target, args, named)  # type: ignore[arg-type]
        node.meta["port"] = Port(node.name, BF16, (1, "rows", 64))
        return node

    def editor(self, *outputs: fx.Node) -> Editor:
        self.graph.output(outputs)
        ports = tuple(Port(f"out{place}", BF16, (1, "rows", 64)) for place, _ in enumerate(outputs))
        return Editor(Region("drawn", self.graph, self.inputs, self.weights, ports))


def count(edit: Editor, target: object) -> int:
    return Counter(node.target for node in edit.nodes())[target]


# --- q, k and v ---


def projections(shapes: dict[str, tuple[int, ...]], *, bias: bool = False, twice: str = "") -> Editor:
    draw = Sketch("x", "bias", **shapes)
    extra = (draw.at["bias"],) if bias else ()
    made = [draw(aten.linear.default, draw.at["x"], draw.at[name], *extra) for name in shapes]
    made += [draw(aten.sum.default, draw.at[twice])] if twice else []
    return draw.editor(*made)


SQUARE = dict.fromkeys(("q", "k", "v"), (64, 64))


def test_three_projections_of_one_value_are_joined() -> None:
    edit = projections(SQUARE)
    (joined,) = join_projections(edit)
    assert joined.parts == ("q", "k", "v") and joined.port.shape == (192, 64)
    starts = [node.args[2:] for node in edit.nodes() if node.target is aten.slice.Tensor]
    assert starts == [(0, 64), (64, 128), (128, 192)]


@pytest.mark.parametrize(
    "edit",
    [
        projections(dict.fromkeys(("q", "k"), (64, 64))),
        projections(dict.fromkeys(("q", "k", "v", "w"), (64, 64))),
        projections({**SQUARE, "v": (32, 64)}),
        projections(SQUARE, bias=True),
        projections(SQUARE, twice="k"),
    ],
    ids=["two", "four", "another shape", "a bias", "a weight that is read twice"],
)
def test_other_projections_are_not(edit: Editor) -> None:
    assert join_projections(edit) == []


# --- modulation ---


def modulated(*, one: int = 1, dim: int = 0, other_table: bool = False, other_index: bool = False) -> Editor:
    draw = Sketch("x", "table", "table2", "index", "index2", norm=(64,))
    normed = draw(aten.rms_norm.default, draw.at["x"], [64], draw.at["norm"], 1e-5)

    def part(number: int, table: str, index: str) -> fx.Node:
        chunks = draw(aten.chunk.default, draw.at[table], 6, -1)
        return draw(aten.index_select.default, draw(operator.getitem, chunks, number), dim, draw.at[index])

    scale = draw(aten.add.Tensor, part(1, "table", "index"), one)
    shift = part(0, "table2" if other_table else "table", "index2" if other_index else "index")
    return draw.editor(draw(aten.add.Tensor, draw(aten.mul.Tensor, normed, scale), shift))


def test_a_modulated_norm() -> None:
    (fused,) = fuse_modulated_norms(edit := modulated())
    assert [str(argument) for argument in fused.args] == ["x", "norm", "table", "index", "0", "1", "1e-05"]
    assert len(list(edit.nodes())) == 1


@pytest.mark.parametrize(
    "edit",
    [modulated(one=2), modulated(dim=1), modulated(other_table=True), modulated(other_index=True)],
    ids=["scale + 2", "columns", "two tables", "two indices"],
)
def test_no_modulated_norm(edit: Editor) -> None:
    assert fuse_modulated_norms(edit) == []


def gated(*, table: str = "table", index: str = "index", norm_reads_sum: bool = True) -> Editor:
    """A gate, and a modulated norm of the sum."""
    draw = Sketch("x", "branch", "table", "table2", "index", "index2", norm=(64,))
    at = draw.at
    total = draw(ours.gate_residual.default, at["x"], at["branch"], at["table"], at["index"], 2)
    normed = total if norm_reads_sum else at["x"]
    out = draw(ours.norm_modulate.default, normed, at["norm"], at[table], at[index], 3, 4, 1e-5)
    return draw.editor(total, out)


def test_a_gate_and_the_norm_of_its_sum() -> None:
    (fused,) = fuse_gated_norms(edit := gated())
    assert fused.args[5:] == (2, 3, 4, 1e-5)
    assert count(edit, ours.gate_residual.default) == count(edit, ours.norm_modulate.default) == 0


@pytest.mark.parametrize(
    "edit",
    [gated(table="table2"), gated(index="index2"), gated(norm_reads_sum=False)],
    ids=["two tables", "two indices", "a norm of something else"],
)
def test_no_gate_and_norm(edit: Editor) -> None:
    assert fuse_gated_norms(edit) == []


@pytest.mark.parametrize(("dim", "found"), [(0, 1), (1, 0)], ids=["rows", "columns"])
def test_a_gate_selects_rows_of_the_table(dim: int, found: int) -> None:
    draw = Sketch("x", "branch", "table", "index")
    chunks = draw(aten.chunk.default, draw.at["table"], 6, -1)
    gate = draw(aten.index_select.default, draw(operator.getitem, chunks, 2), dim, draw.at["index"])
    total = draw(aten.add.Tensor, draw.at["x"], draw(aten.mul.Tensor, gate, draw.at["branch"]))
    assert len(fuse_gates(draw.editor(total))) == found


# --- SwiGLU ---


def halves(value: int, gate: int, *, parts: int = 2, dim: int = -1) -> Editor:
    draw = Sketch("x")
    chunks = draw(aten.chunk.default, draw.at["x"], parts, dim)
    gated = draw(aten.silu.default, draw(operator.getitem, chunks, gate))
    return draw.editor(draw(aten.mul.Tensor, draw(operator.getitem, chunks, value), gated))


def test_swiglu_in_either_order() -> None:
    assert [fuse_swiglu(halves(*order))[0].args[1] for order in ((0, 1), (1, 0))] == [False, True]


@pytest.mark.parametrize(
    "edit",
    [halves(0, 0), halves(0, 1, parts=3), halves(0, 1, dim=1)],
    ids=["one half", "thirds", "halves of the rows"],
)
def test_no_swiglu(edit: Editor) -> None:
    assert fuse_swiglu(edit) == []


# --- attention ---


def attention(*, order: tuple[int, ...] = (0, 2, 1, 3), mask: bool = False, **options: object) -> Editor:
    draw = Sketch("q", "k", "v", "mask")
    parts = [draw(aten.permute.default, draw.at[name], list(order)) for name in "qkv"]
    parts += [draw.at["mask"]] if mask else []
    found = draw(aten.scaled_dot_product_attention.default, *parts, **options)
    return draw.editor(draw(aten.permute.default, found, list(order)))


def test_attention_is_named() -> None:
    assert len(name_attention(attention())) == 1


@pytest.mark.parametrize(
    "edit",
    [
        attention(order=(0, 1, 2, 3)),
        attention(mask=True),
        attention(is_causal=True),
        attention(scale=0.5),
        attention(dropout_p=0.1),
    ],
    ids=["heads already first", "a mask", "causal", "a scale", "dropout"],
)
def test_other_attention_is_not(edit: Editor) -> None:
    assert name_attention(edit) == []


THIRDS = ((0, INNER), (INNER, 2 * INNER), (2 * INNER, 3 * INNER))


def heads_of(
    *,
    spans: tuple[tuple[int, int], ...] = THIRDS,
    sources: tuple[str, str, str] = ("qkv", "qkv", "qkv"),
    heads: tuple[int, int, int] = (HEADS, HEADS, HEADS),
    eps: tuple[float, float] = (1e-5, 1e-5),
) -> Editor:
    """Attention of the normed first two thirds and the last of a joint projection."""
    draw = Sketch("qkv", "other", q_norm=(WIDTH,), k_norm=(WIDTH,))
    parts = []
    for place, (start, end) in enumerate(spans):
        part = draw(aten.slice.Tensor, draw.at[sources[place]], -1, start, end)
        part = draw(aten.unflatten.int, part, -1, [heads[place], -1])
        if place < 2:
            norm = draw.at[("q_norm", "k_norm")[place]]
            part = draw(aten.rms_norm.default, part, [WIDTH], norm, eps[place])
        parts.append(part)
    return draw.editor(draw(ours.attention.default, *parts))


def test_query_and_key_from_one_projection() -> None:
    (fused,) = fuse_query_and_key(edit := heads_of())
    assert [str(argument) for argument in fused.args[:3]] == ["qkv", "q_norm", "k_norm"]
    assert fused.args[3:] == (None, None, HEADS, 1e-5) and count(edit, aten.rms_norm.default) == 0


@pytest.mark.parametrize(
    "edit",
    [
        heads_of(spans=(THIRDS[1], THIRDS[0], THIRDS[2])),
        heads_of(spans=(THIRDS[0], THIRDS[2], THIRDS[2])),
        heads_of(sources=("qkv", "other", "qkv")),
        heads_of(heads=(HEADS, 2 * HEADS, HEADS)),
        heads_of(eps=(1e-5, 1e-6)),
    ],
    ids=["the key first", "the key last", "two projections", "other heads", "other eps"],
)
def test_query_and_key_that_differ_stay(edit: Editor) -> None:
    assert fuse_query_and_key(edit) == []


@pytest.mark.parametrize(
    ("edit", "joint"),
    [
        (heads_of(), True),
        (heads_of(spans=(*THIRDS[:2], (INNER, 2 * INNER))), False),
        (heads_of(sources=("qkv", "qkv", "other")), False),
        (heads_of(heads=(HEADS, HEADS, 2 * HEADS)), False),
    ],
    ids=["thirds", "the value second", "the value of another projection", "other heads"],
)
def test_operands_of_sage_are_made_from_the_projection_where_they_are_its_thirds(
    edit: Editor, joint: bool
) -> None:
    fuse_query_and_key(edit)
    (node,) = (node for node in edit.nodes() if node.target is ours.attention.default)
    quantize_attention(edit, node, SageOptions("int8", 64, True))
    assert count(edit, ours.sage_prepare.default) == int(joint)
    assert count(edit, ours.sage_prepare.separate) == int(not joint)


# --- FP8 ---


@pytest.mark.parametrize("read_again", [False, True])
def test_an_input_that_is_read_again_is_quantized_beside_it(read_again: bool) -> None:
    draw = Sketch("x", w=(64, 32))
    activated = draw(ours.swiglu.default, draw.at["x"], False)
    product = draw(aten.linear.default, activated, draw.at["w"])
    edit = draw.editor(product, *((activated,) if read_again else ()))
    (linear,) = (node for node in edit.nodes() if node.target is aten.linear.default)
    found = quantize_linear(edit, linear, static=False)
    assert (found.values.dtype, found.scales.shape) == (torch.float8_e4m3fn, (64,))
    assert count(edit, ours.swiglu.fp8) == (0 if read_again else 1)
    assert count(edit, ours.swiglu.default) == count(edit, ours.quantize_rows.default) == int(read_again)
