"""What a program has to do: polynomials, the shipped tables, and how they are read off a graph."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from h3compile.errors import H3CompileError
from h3compile.models import h3
from h3compile.models.tiny import TRANSFORMER_CONFIG
from h3compile.models.trace import parameter_shapes, trace
from h3compile.ops.exchange_groups import RING
from h3compile.pipeline.manager import Manager
from h3compile.pipeline.registry import Registry
from h3compile.pipeline.spelling import resolve
from h3compile.plan.cost import Parallel, piece_seconds
from h3compile.plan.kernels import region_work
from h3compile.plan.memory import activation_bytes, memory_plan
from h3compile.plan.polynomial import Polynomial, undominated
from h3compile.plan.residency import Residency
from h3compile.plan.work import PASS_SETS, ProgramWork, released
from h3compile.plan.work_of import activations_of, work_of
from h3compile.program.facts import Dim
from h3compile.program.region import Port, Region
from h3compile.targets import find_target, resolve_target

aten = torch.ops.aten
GIB = 2**30
CLIP = {"rows": 37_760, "video_rows": 37_296, "audio_rows": 414, "text_rows": 50, "timesteps": 2}
DIMS = (Dim("rows", hint=64),)
WIDTH, INNER = 32, 48

polynomials = st.dictionaries(
    st.lists(st.sampled_from(["rows", "text_rows"]), max_size=2).map(tuple),
    st.integers(1, 10**12) | st.sampled_from([0.25, 1.5, 1 / 3]),
    max_size=4,
).map(Polynomial.of)


@given(polynomials, polynomials)
def test_polynomials_survive_text_and_add_up(one: Polynomial, other: Polynomial) -> None:
    assert Polynomial.parse(str(one)) == one
    sizes = {"rows": 17, "text_rows": 3}
    assert (one + other).at(sizes) == pytest.approx(one.at(sizes) + other.at(sizes))
    assert (one + other).dominates(one)


def test_a_rank_in_the_lengths_of_the_sequence() -> None:
    mine = Polynomial.parse("8*local_rows*rows + 3*local_rows + 5*timesteps + 3*rows")
    found = mine.in_terms_of({"local_rows": ("rows", 0.25)})
    assert str(found) == "2*rows*rows + 3.75*rows + 5*timesteps"
    assert found.at({"rows": 8, "timesteps": 1}) == mine.at({"rows": 8, "local_rows": 2, "timesteps": 1})


def test_the_undominated_are_the_ones_that_may_be_largest() -> None:
    square, line, short = map(Polynomial.parse, ("rows*rows", "5*rows + 7", "4*rows"))
    assert set(undominated([square, line, short, line])) == {square, line}


def test_text_that_is_no_polynomial_is_refused() -> None:
    for text in ("rows**2", "__import__('os')", "", "3*"):
        with pytest.raises(ValueError):
            Polynomial.parse(text)


@pytest.mark.parametrize("name", PASS_SETS)
def test_every_shipped_table_survives_json(name: str) -> None:
    work = released(name)
    assert ProgramWork.from_json(json.loads(json.dumps(work.to_json()))) == work
    assert len(work.blocks) == 50 and work.heads == 56


def test_json_of_something_else_is_refused() -> None:
    good = released("fuse").to_json()
    for bad in ({}, {**good, "calls": [["nowhere", "step", 1, "0", 0]]}, {**good, "regions": {"a": 3}}):
        with pytest.raises(ValueError):
            ProgramWork.from_json(bad)


def test_passes_find_their_table_however_they_are_typed() -> None:
    assert released("") == released("fuse")
    assert released("sage, fp8(static=False)") == released("fp8,sage")
    assert released("dlo(resident=3),fp8") == released("fp8")
    assert released("-fuse").passes == "exact"
    with pytest.raises(H3CompileError, match="no work table is shipped for the passes 'fp8,mine'"):
        released("fp8,mine")


def test_sizes_are_those_of_the_model() -> None:
    """Facts of the release: 33.12 B parameters, 69.98 TFLOP a block, 19.35 MB of tables for two timesteps."""
    shipped, exact = released("diffusers"), released("exact")
    assert sum(shipped.weights.values()) / 2 == pytest.approx(33.12e9, rel=1e-3)  # a few of them are FP32
    cold = sum(exact.regions[call.region].weights * call.count for call in exact.stage("schedule"))
    assert cold / GIB == pytest.approx(24.35, rel=1e-3)
    for name in ("exact", "fuse", "fp8,sage"):
        pieces = released(name).regions["block"].pieces
        flop = {
            kind: sum(piece.flop.at(CLIP) for piece in pieces if piece.kind == kind)
            for kind in ("gemm", "attention")
        }
        assert flop == pytest.approx({"gemm": 29.1e12, "attention": 40.9e12}, rel=2e-3)
    assert exact.table_bytes * 2 == pytest.approx(19.35e6, rel=1e-2)
    assert exact.regions["block"].weights == pytest.approx(0.771e9, rel=1e-3)
    assert released("fp8").regions["block"].weights == pytest.approx(0.3855e9, rel=1e-3)


def test_every_quantization_and_preparation_is_counted() -> None:
    fused, quantized = (
        {piece.operator for piece in released(name).regions["block"].pieces} for name in ("fuse", "fp8,sage")
    )
    assert {"norm_modulate.default", "gate_norm_modulate.default", "swiglu.default"} <= fused
    assert {"norm_modulate.fp8", "gate_norm_modulate.fp8", "swiglu.fp8", "quantize_rows.default"} <= quantized
    assert {"sage_prepare.default", "sage_attention.default", "linear_fp8.default"} <= quantized


def test_depth_is_a_number_of_calls() -> None:
    six = released("exact").with_blocks(6)
    assert six.names("step") == ("embed.0", *(f"block.{i}" for i in range(6)), "head.0")
    assert [call.count for call in six.stage("schedule")] == [1, 6]
    assert six.call("block.5").region == "block"
    assert six.with_blocks(1).blocks == ("block.0",)
    with pytest.raises(KeyError):
        six.call("block.6")


def test_planning_needs_no_torch() -> None:
    names = ("work", "cost", "memory", "collectives", "components", "polynomial")
    script = "import sys; " + "; ".join(f"import h3compile.plan.{name}" for name in names)
    script += "; from h3compile.plan.work import released; released('fp8'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def feed_forward() -> Region:
    """rows -> linear -> halves -> silu(gate) * value -> linear, then the residual."""
    graph = fx.Graph()
    x, up, down = (graph.placeholder(name) for name in ("x", "up", "down"))
    hidden = graph.call_function(aten.linear.default, (x, up))
    gate = graph.call_function(aten.slice.Tensor, (hidden, -1, 0, INNER))
    value = graph.call_function(aten.slice.Tensor, (hidden, -1, INNER, 2 * INNER))
    silu = graph.call_function(aten.silu.default, (gate,))
    product = graph.call_function(aten.mul.Tensor, (silu, value))
    out = graph.call_function(aten.linear.default, (product, down))
    total = graph.call_function(aten.add.Tensor, (x, out))
    graph.output((total,))
    bf16 = torch.bfloat16
    return Region(
        "feed_forward",
        graph,
        (Port("x", bf16, (1, "rows", WIDTH)),),
        (Port("up", bf16, (2 * INNER, WIDTH)), Port("down", bf16, (WIDTH, INNER))),
        (Port("total", bf16, (1, "rows", WIDTH)),),
    )


def test_a_fused_chain_counts_what_enters_and_leaves_once() -> None:
    work = region_work(feed_forward(), DIMS)
    names = [piece.operator for piece in work.pieces]
    assert names == ["aten.linear", "inductor.mul", "aten.linear", "inductor.add"]
    up, product, down, add = work.pieces
    assert str(up.flop) == f"{2 * WIDTH * 2 * INNER}*rows"
    assert str(up.bytes) == f"{2 * (WIDTH + 2 * INNER)}*rows + {2 * WIDTH * 2 * INNER}"
    assert str(product.bytes) == f"{2 * 3 * INNER}*rows"  # both halves, and the product
    assert str(add.bytes) == f"{2 * 3 * WIDTH}*rows"
    assert str(down.tile) == str(2 * 192 * 192 * INNER)
    assert work.weights == 2 * WIDTH * 2 * INNER + 2 * WIDTH * INNER


def test_eager_counts_every_operator() -> None:
    work = region_work(feed_forward(), DIMS, fused=False)
    names = [piece.operator for piece in work.pieces]
    assert names == ["aten.linear", "aten.silu", "aten.mul", "aten.linear", "aten.add"]
    assert str(work.pieces[2].bytes) == f"{2 * 3 * INNER}*rows"


def test_the_peak_is_where_most_lives() -> None:
    """Fused: the input, both halves, their product. Eager: the activated gate besides."""
    (peak,) = region_work(feed_forward(), DIMS).peak
    assert str(peak) == f"{2 * (WIDTH + 3 * INNER)}*rows"
    (eager,) = region_work(feed_forward(), DIMS, fused=False).peak
    assert str(eager) == f"{2 * (WIDTH + 4 * INNER)}*rows"


def test_tables_are_not_among_what_lives() -> None:
    (peak,) = region_work(feed_forward(), DIMS, tables=frozenset(("x",))).peak
    assert str(peak) == f"{2 * 3 * INNER}*rows"


def test_an_input_that_nobody_reads_later_lives_until_it_is_read_the_last_time() -> None:
    """Kept, it is there beside both halves and their product; consumed, it went after the first linear."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    both = graph.call_function(aten.linear.default, (x, weight))
    gate, up = (
        graph.call_function(aten.slice.Tensor, (both, -1, i * INNER, (i + 1) * INNER)) for i in (0, 1)
    )
    graph.output((graph.call_function(aten.mul.Tensor, (gate, up)),))
    bf16 = torch.bfloat16
    region = Region(
        "gated",
        graph,
        (Port("x", bf16, (1, "rows", WIDTH)),),
        (Port("weight", bf16, (2 * INNER, WIDTH)),),
        (Port("product", bf16, (1, "rows", INNER)),),
    )
    (kept,) = region_work(region, DIMS).peak
    assert str(kept) == f"{2 * (WIDTH + 3 * INNER)}*rows"
    (consumed,) = region_work(region, DIMS, consumed=frozenset(("x",))).peak
    assert str(consumed) == f"{2 * max(WIDTH + 2 * INNER, 3 * INNER)}*rows"


def test_what_both_sides_of_a_product_read_is_stored() -> None:
    """The residual stream: made before a product, added after it."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    doubled = graph.call_function(aten.add.Tensor, (x, x))
    active = graph.call_function(aten.silu.default, (doubled,))
    out = graph.call_function(aten.linear.default, (active, weight))
    graph.output((graph.call_function(aten.add.Tensor, (doubled, out)),))
    port = Port("x", torch.bfloat16, ("rows", WIDTH))
    region = Region("r", graph, (port,), (Port("weight", torch.bfloat16, (WIDTH, WIDTH)),), (port,))
    pieces = region_work(region, DIMS).pieces
    assert [p.operator for p in pieces] == ["inductor.add", "inductor.silu", "aten.linear", "inductor.add"]


def test_a_ring_is_an_attention_of_as_many_turns() -> None:
    """Eight heads of 16 channels, four stretches: a rank's 1,000 queries over the keys of all 4,000 rows."""
    heads, width, ring = 8, 16, 4
    graph = fx.Graph()
    query, key, value, index = (graph.placeholder(name) for name in ("query", "key", "value", "index"))
    rows = graph.call_function(aten.sym_size.int, (index, 0))
    operands = (query, key, value, rows, ring, RING)
    graph.output((graph.call_function(torch.ops.h3compile.ring_attention.default, operands),))
    port = Port("query", torch.bfloat16, (1, "local_rows", heads, width))
    given = tuple(replace(port, name=name) for name in ("query", "key", "value"))
    region = Region("r", graph, (*given, Port("index", torch.int64, ("rows",))), (), (port,))
    (piece,) = region_work(region, (*DIMS, Dim("local_rows", hint=16))).pieces
    assert (piece.operator, piece.kind, piece.rate) == (
        "ring_attention.default",
        "attention",
        "attention.bfloat16",
    )
    assert str(piece.flop) == f"{4 * heads * width}*local_rows*rows"
    # A query and a result; keys and values are read and written once a turn, what is kept is between two.
    assert str(piece.bytes) == f"{heads * width * (2 * (2 + 2 * 2 * ring) + 8 * (ring - 1))}*local_rows"
    assert str(piece.tile) == f"{ring * 4 * 192 * width}*local_rows"
    assert piece.launches == ring * 2

    target, sizes = find_target("h200"), {"rows": 4000, "local_rows": 1000}
    rate = target.rate("attention.bfloat16").reached
    computed = (4 * heads * width * 1000 * 4000 + 66 * ring * 4 * 192 * width * 1000) / rate
    moved = heads * width * (2 * 18 + 8 * (ring - 1)) * 1000 / target.rate("bandwidth").reached
    assert computed > moved
    assert piece_seconds(piece, target, sizes) == pytest.approx(computed + 8 * target.launch_seconds)


@pytest.mark.slow
def test_ranks_share_what_one_rank_does() -> None:
    """Of 4,000 rows: products and attention a quarter each, and what is exchanged has its pieces."""
    sizes = {"rows": 4000, "video_rows": 3000, "audio_rows": 800, "text_rows": 200, "timesteps": 2}
    sizes |= {f"local_{name}": size // 4 for name, size in sizes.items()} | {"stretch_rows": 2000}
    shapes = {**h3.RELEASE_CONFIG, **TRANSFORMER_CONFIG, "num_layers": 2}
    traced = trace(shapes, {name: h3.release_dtype(name) for name in parameter_shapes(shapes)})
    flop, names = {}, {}
    for passes in ("", "sp(ulysses=2,ring=2)"):
        program, _ = Manager(resolve(passes, Registry.default())[0]).run(traced, find_target("cpu"))
        pieces = work_of(program).regions["block"].pieces
        names[passes] = [piece.operator for piece in pieces]
        flop[passes] = {
            kind: sum(piece.flop.at(sizes) for piece in pieces if piece.kind == kind)
            for kind in ("gemm", "attention")
        }
    one, four = flop.values()
    assert four == pytest.approx({kind: count / 4 for kind, count in one.items()})
    exchanges = {"rows_to_heads.default", "ring_attention.default", "heads_to_rows.default"}
    assert exchanges <= set(names["sp(ulysses=2,ring=2)"]) and not exchanges & set(names[""])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_shipped_tables_are_those_of_the_traced_model() -> None:
    path = Path(__file__).parent / "make_work.py"
    spec = importlib.util.spec_from_file_location("make_work", path)
    assert spec is not None and spec.loader is not None
    make_work = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_work)
    fresh = json.loads(make_work.text(make_work.programs()))
    shipped = json.loads(make_work.FILE.read_text(encoding="utf-8"))
    assert fresh.keys() == shipped.keys()
    for name, program in fresh["programs"].items():
        assert program == shipped["programs"][name], f"{name}: run python tests/plan/make_work.py"


@pytest.mark.slow
@pytest.mark.parametrize("passes", ["", "sp(ulysses=2)"])
def test_what_a_build_records_of_activations_is_what_a_plan_counts(passes: str) -> None:
    shapes = {**h3.RELEASE_CONFIG, "num_layers": 2}
    traced = trace(shapes, {name: h3.release_dtype(name) for name in parameter_shapes(shapes)})
    program, _ = Manager(resolve(passes, Registry.default())[0]).run(traced, resolve_target("h200"))
    found = activations_of(program, own=("attention.default",))
    sizes = {**CLIP, **{f"local_{name}": -(-size // 2) for name, size in CLIP.items()}}
    work = released("fuse")
    planned = activation_bytes(work, CLIP, "step", "request")
    largest = max(polynomial.at(sizes) for polynomial in found)
    if not passes:
        assert round(largest) == planned
    else:  # half of the rows, and what the ranks gather; beside it what their exchanges hold
        residency = Residency(work.blocks, (), 2)
        phases = memory_plan(work, CLIP, residency, Parallel(2), arch="sm_90a").device
        exchanged = phases["denoise"]["collectives"] - phases["encode"]["collectives"]
        assert 0.5 * planned < largest - exchanged < 0.62 * planned
        assert largest == pytest.approx(phases["denoise"]["activations"] + exchanged, rel=0.01)
