"""Graph files: a round trip that keeps everything, and refusal of everything else."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from h3compile.program.propagate import propagate
from h3compile.program.region import Port, Region
from h3compile.program.serialize import (
    constant_error,
    dtype_name,
    effect,
    op_name,
    parse_dtype,
    region_from_json,
    region_to_json,
)

aten = torch.ops.aten


@pytest.fixture(scope="module")
def rich(toys: SimpleNamespace) -> Region:
    """A region with every kind of constant, operator and port that a file can hold."""

    def body(op, x, t, w):  # type: ignore[no-untyped-def]
        rows = op(aten.sym_size.int, x, 0)
        twice = op(operator.mul, rows, 2)
        grid = op(aten.arange.start, 0, 4, dtype=torch.float32, device=torch.device("cpu"), pin_memory=False)
        zeros = op(aten.new_zeros.default, x, [twice, 8], dtype=torch.bfloat16)
        half = op(operator.getitem, op(aten.chunk.default, x, 2, -1), 0)
        scaled = op(aten.mul.Tensor, half, grid)
        shifted = op(aten.add.Tensor, scaled, 1e-5, alpha=2)
        zero = op(aten.add.Tensor, shifted, -0.0)
        cut = op(aten.slice.Tensor, op(aten.linear.default, x, w, None), 1, 2, 2**63 - 1)
        gelu = op(aten.gelu.default, cut, approximate="tanh")
        clone = op(aten.clone.default, gelu, memory_format=torch.contiguous_format)
        infinite = op(aten.clamp.default, clone, float("-inf"), float("inf"))
        return zero, zeros, infinite, op(aten.cat.default, [t, t], 0)

    region = toys.region(
        "rich", (toys.wide("x"), Port("t", torch.float32, ("timesteps",))), (toys.wide("up.weight", 8),), body
    )
    region = propagate(region, toys.FACTS.dims)
    next(n for n in region.graph.nodes if n.target is aten.gelu.default).meta["origin"] = "blocks.0.ff"
    return region


def facts_of(region: Region) -> list[object]:
    return [
        (n.op, n.name, n.target, repr(n.args), repr(dict(n.kwargs)), n.meta.get("origin"))
        for n in region.graph.nodes
    ]


def test_round_trip(rich: Region) -> None:
    text = region_to_json(rich)
    again = region_from_json(text)
    # The name under which a placeholder was asked for is that of its port, in a file that of its node.
    assert [f for f in facts_of(again) if f[0] != "placeholder"] == [
        f for f in facts_of(rich) if f[0] != "placeholder"
    ]
    assert (again.name, again.inputs, again.weights, again.outputs) == (
        rich.name,
        rich.inputs,
        rich.weights,
        rich.outputs,
    )
    assert region_to_json(again) == text


def test_the_region_read_computes_the_same_bits(rich: Region) -> None:
    inputs = (torch.randn(3, 8), torch.rand(2), torch.randn(8, 8))
    for was, now in zip(
        rich.module()(*inputs), region_from_json(region_to_json(rich)).module()(*inputs), strict=True
    ):
        assert torch.equal(was, now) and was.dtype == now.dtype


def test_the_text_is_the_same_for_the_same_region(toys: SimpleNamespace) -> None:
    texts = [[region_to_json(region) for region in toys.toy().regions.values()] for _ in range(2)]
    assert texts[0] == texts[1]


def test_one_node_a_line(rich: Region) -> None:
    lines = region_to_json(rich).splitlines()
    nodes = [json.loads(line.strip().rstrip(",")) for line in lines if line.startswith('  {"name"')]
    assert [n["name"] for n in nodes] == [n.name for n in rich.graph.nodes if n.op == "call_function"]


def test_the_real_regions_too(toys: SimpleNamespace) -> None:
    for region in toys.toy().regions.values():
        text = region_to_json(region)
        assert region_to_json(region_from_json(text)) == text


def simple(**changes: object) -> str:
    """A legal file with some fields replaced, written as the writer writes."""
    node: dict[str, object] = {"name": "y", "op": "aten.relu.default", "args": [{"node": "x"}]}
    port = {"name": "x", "dtype": "float32", "shape": ["rows", 8]}
    record: dict[str, object] = {
        "format": 1,
        "name": "r",
        "inputs": [port],
        "weights": [],
        "outputs": [{**port, "name": "y"}],
        "placeholders": ["x"],
        "returns": ["y"],
    }
    for key, value in changes.items():
        if key in record:
            record[key] = value
        else:
            node[key] = value
    head = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    return f'{{\n{head},\n"nodes": [\n  {json.dumps(node)}\n]\n}}\n'


def test_the_simple_file_is_legal() -> None:
    region = region_from_json(simple())
    assert region.module()(torch.tensor([-1.0, 2.0]))[0].tolist() == [0.0, 2.0]


CODE = "a=__import__('os').system('false')"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"op": "os.system"}, "not an operator a program may hold"),
        ({"op": "builtins.eval"}, "not an operator a program may hold"),
        ({"op": "prims.add.default"}, "not an operator a program may hold"),
        ({"op": "operator.attrgetter"}, "not an operator a program may hold"),
        ({"op": "aten.relu"}, "not an operator a program may hold"),
        ({"op": "aten.no_such_thing.default"}, "this torch has no operator"),
        ({"op": "h3compile.no_such_thing.default"}, "this torch has no operator"),
        ({"op": "aten.__class__.__init__"}, "not an operator overload|has no operator"),
        ({"op": "aten.relu.__class__"}, "not an operator overload|has no operator"),
        ({"op": "aten.relu.__globals__"}, "not an operator overload|has no operator"),
        ({"op": "aten.relu_.default"}, "changes its operands"),
        ({"op": "aten.add.out"}, "changes its operands"),
        ({"op": "aten.from_file.default", "args": ["/etc/passwd"]}, "opens a file"),
        ({"op": "aten.save.default", "args": [{"node": "x"}, "x.pt"]}, "opens a file"),
        ({"op": "aten.manual_seed.default", "args": [0]}, "has no operator|returns nothing"),
        ({"op": "aten.set_grad_enabled.default", "args": [True]}, "has no operator|returns nothing"),
        ({"placeholders": [CODE]}, "is not a name"),
        ({"placeholders": ["x, y"]}, "is not a name"),
        ({"placeholders": ["*x"]}, "is not a name"),
        ({"placeholders": ["class"]}, "is not a name"),
        ({"placeholders": [1]}, "is not a name"),
        ({"kwargs": {CODE: 1}}, "is not a name"),
        ({"placeholders": ["x", "x"]}, "ports are not its placeholders"),
        ({"placeholders": []}, "not a region graph"),
        ({"returns": []}, "ports are not its placeholders"),
        ({"returns": ["z"]}, "not a region graph"),
        ({"returns": None}, "not a region graph"),
        ({"format": 2}, "graph format 2 is not 1"),
        ({"format": "1"}, "graph format '1' is not 1"),
        ({"args": [{"node": "later"}]}, "not a region graph"),
        ({"args": [{"device": "/dev/null"}]}, "not a region graph"),
        ({"args": [{"dtype": "nn"}]}, "is not a torch dtype"),
        ({"args": [{"dtype": "_dynamo"}]}, "is not a torch dtype"),
        ({"args": [{"float": "nothing"}]}, "hexadecimal|float"),
        ({"args": [{"float": "0x1p99999"}]}, "not a region graph"),
        ({"args": [{"layout": "sparse_coo"}]}, "not a graph constant"),
        ({"args": [{"layout": ["strided"]}]}, "not a region graph"),
        ({"args": [{"code": "1"}]}, "not a graph constant"),
        ({"args": [1.5]}, "not a graph constant"),
        ({"args": "x"}, "not a region graph"),
        ({"args": {"node": "x"}}, "not a region graph"),
        ({"kwargs": []}, "not a region graph"),
        ({"kwargs": {}}, "it was edited"),
        ({"comment": "more"}, "it was edited"),
        ({"inputs": [{"name": "x", "dtype": "float32", "shape": 8}]}, "is not a port"),
        ({"inputs": [{"name": "x", "dtype": "float32", "shape": [True]}]}, "is not a shape"),
        ({"inputs": [{"name": "x", "dtype": "float32", "shape": [1.0]}]}, "is not a shape"),
        ({"inputs": [{"name": 1, "dtype": "float32", "shape": []}]}, "is not a port"),
        ({"inputs": ["x"]}, "not a region graph"),
    ],
)
def test_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        region_from_json(simple(**changes))


@pytest.mark.parametrize("text", ["", "null", "[]", "1", '"a"', "{}", "[" * 100_000, '{"format": 1}', "\x00"])
def test_no_region_at_all(text: str) -> None:
    with pytest.raises(ValueError):
        region_from_json(text)


LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES | st.sampled_from(["x", "aten.relu.default", "float32", "node", "cpu"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["node", "float", "dtype", "device", "layout", "z"]), inner, max_size=2
        )
    ),
    max_leaves=4,
)


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_corrupted_record_is_refused(rich: Region, data: st.DataObject) -> None:
    """One value, anywhere in the file, is replaced by another: read as it stands, or a `ValueError`."""
    record = json.loads(region_to_json(rich))
    place = record
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            break
        place = inner
    place[key] = data.draw(VALUES)
    _read_or_refuse(_as_written(record))


@given(cut=st.integers(0, 6000), insert=st.text(max_size=3), drop=st.integers(0, 5))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_corrupted_text_is_refused(rich: Region, cut: int, insert: str, drop: int) -> None:
    text = region_to_json(rich)
    cut %= len(text)
    _read_or_refuse(text[:cut] + insert + text[cut + drop :])


def _as_written(record: dict[str, object]) -> str:
    nodes = record.pop("nodes", [])
    head = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    lines = ",\n".join("  " + json.dumps(node) for node in nodes) if isinstance(nodes, list) else "0"
    return f'{{\n{head},\n"nodes": [\n{lines}\n]\n}}\n'


def _read_or_refuse(text: str) -> None:
    try:
        region = region_from_json(text)
    except ValueError:
        return
    assert region_to_json(region) == text
    region.graph.lint()


@pytest.mark.parametrize(
    ("target", "name"),
    [(aten.linear.default, "aten.linear.default"), (operator.getitem, "operator.getitem")],
)
def test_operator_names(target: Callable[..., object], name: str) -> None:
    assert op_name(target) == name
    assert effect(target) is None


@pytest.mark.parametrize(
    "target", [print, torch.relu, torch.ops.prims.add.default, aten.relu, operator.pow, "x"]
)
def test_what_is_no_operator_of_a_program_has_no_name(target: object) -> None:
    with pytest.raises(ValueError, match="is not an operator a program may hold"):
        op_name(target)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool", "float8_e4m3fn"])
def test_dtype_names(name: str) -> None:
    assert dtype_name(parse_dtype(name)) == name


@pytest.mark.parametrize("name", ["", "float33", "nn", "Tensor", "__name__", "_inductor"])
def test_what_is_no_dtype(name: str) -> None:
    with pytest.raises(ValueError, match="is not a torch dtype"):
        parse_dtype(name)


@pytest.mark.parametrize("constant", [slice(1, 2), 1j, torch.sparse_coo, torch.strided.__class__])
def test_constants_that_no_file_can_hold(constant: object) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    try:
        node = graph.call_function(aten.mul.Tensor, (x, constant))
    except NotImplementedError:
        pytest.skip("torch refuses it itself")
    assert "is not a graph constant" in (constant_error(node) or "")
    assert constant_error(graph.call_function(aten.mul.Tensor, (x, 2.0))) is None
