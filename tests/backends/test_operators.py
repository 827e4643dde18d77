"""Our operators in a region: providers chosen by legality and by name, kernels of the chosen ones kept."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import fx

import h3compile.backends.operators as operators
from h3compile.backends.operators import Bound, bind_operators, check_named, specs_of
from h3compile.backends.providers import check_providers
from h3compile.backends.select import select
from h3compile.engine.artifact import VariantInfo
from h3compile.errors import BuildError
from h3compile.models.h3 import RELEASE_CONFIG
from h3compile.models.tiny import TRANSFORMER_CONFIG
from h3compile.models.trace import trace
from h3compile.ops import OPERATORS
from h3compile.ops.launch import Spec
from h3compile.ops.operator import Provider
from h3compile.pipeline.manager import Manager
from h3compile.pipeline.registry import Registry
from h3compile.pipeline.spelling import resolve
from h3compile.program.dims import evaluate_dim
from h3compile.program.facts import Dim
from h3compile.program.propagate import propagate
from h3compile.program.region import Port, Region
from h3compile.runtime.operators import _bind
from h3compile.targets import find_target

ours = torch.ops.h3compile
DIMS = (Dim("rows", hint=512),)


def module(width: int = 128) -> fx.GraphModule:
    """Rows quantized, two FP8 linears of other shapes, attention of three views of the result."""
    graph = fx.Graph()
    x, one, one_scale, two, two_scale = (graph.placeholder(n) for n in ("x", "a", "a_s", "b", "b_s"))
    both = graph.call_function(ours.quantize_rows.default, (x,))
    values, scales = (graph.call_function(operator.getitem, (both, i)) for i in (0, 1))
    operands = (values, scales)
    first = graph.call_function(ours.linear_fp8.default, (*operands, one, one_scale, None, torch.bfloat16))
    graph.call_function(ours.linear_fp8.default, (*operands, two, two_scale, None, torch.bfloat16))
    heads = graph.call_function(torch.ops.aten.unflatten.int, (first, -1, [2, width]))
    graph.output((graph.call_function(ours.attention.default, (heads, heads, heads)),))
    fp8, fp32 = torch.float8_e4m3fn, torch.float32
    ports = (
        Port("x", torch.bfloat16, (1, "rows", 64)),
        Port("a", fp8, (2 * width, 64)),
        Port("a_s", fp32, (2 * width,)),
        Port("b", fp8, (32, 64)),
        Port("b_s", fp32, (32,)),
    )
    out = Port("y", torch.bfloat16, (1, "rows", 2, width))
    return propagate(Region("r", graph, ports[:1], ports[1:], (out,)), DIMS).module()


# The tiny model with heads that the attention kernels take.
HEADS = {"attention_head_dim": 128, "num_attention_heads": 2, "num_layers": 2, "rope_freq_dim": 16}


def compiled(spec: Spec, arch: str, output: Path) -> VariantInfo:
    """Stands for compiling: a kernel is a file with its key in it."""
    (output / f"{spec.key}.cubin").write_text(spec.key)
    sizes = {"warps": 4, "shared": 0, "scratch": 0, "scratch_alignment": 1, "scratch_arguments": 2}
    return VariantInfo(
        file=f"{spec.key}.cubin", kernel=spec.kernel, entry="k", registers=32, stack=0, **sizes
    )


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """A function from the providers a user names to what is bound."""

    def measured(use: object, candidates: list[Provider], *_: object) -> dict[str, float | None]:
        # The last one is the fastest.
        return {provider.name: 1.0 / (place + 1) for place, provider in enumerate(candidates)}

    monkeypatch.setattr(operators, "_compiled", compiled)
    monkeypatch.setattr(operators, "_measured", measured)

    def bind(named: Mapping[str, str], arch: str = "sm_90a", times: operators.Times | None = None) -> Bound:
        return bind_operators(
            module(),
            arch=arch,
            named=named,
            times={} if times is None else times,
            device=torch.device("cpu"),
            output=tmp_path,
        )

    bind.folder = tmp_path  # type: ignore[attr-defined]
    return bind


def test_the_fastest_legal_provider_for_each_static_shape(bound) -> None:  # type: ignore[no-untyped-def]
    found = bound({})
    chosen = {(o.name, o.variant): o.provider for o in found.operators}
    assert set(chosen) == {
        ("quantize_rows.default", ""),
        ("linear_fp8.default", "256x64"),
        ("linear_fp8.default", "32x64"),
        ("attention.default", ""),
    }
    for info in found.operators:
        times = {name: ms for name, ms in info.ms.items() if ms is not None}
        assert info.provider == (min(times, key=lambda name: times[name]) if times else info.provider)
        assert len(info.ms) == 1 or len(times) == len(info.ms)


def test_only_the_kernels_of_the_chosen_are_kept(bound) -> None:  # type: ignore[no-untyped-def]
    everything = bound({"linear_fp8": "triton", "attention": "triton"})
    kept = {path.name for path in bound.folder.iterdir()}
    assert kept == {info.file for info in everything.variants.values()}
    assert any("linear_fp8" in info.kernel for info in everything.variants.values())
    fewer = bound({"linear_fp8": "scaled_mm", "attention": "sdpa"})
    assert {info.kernel.partition(":")[0] for info in fewer.variants.values()} == {"quantize_rows"}


def test_a_named_provider_is_taken_and_nothing_measured(bound) -> None:  # type: ignore[no-untyped-def]
    found = bound({"attention": "cudnn"})
    (attention,) = (o for o in found.operators if o.name == "attention.default")
    assert attention.provider == "cudnn" and attention.ms == {"cudnn": None}


def test_times_are_used_again(bound, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    times: operators.Times = {}
    first = bound({}, times=times)
    monkeypatch.setattr(operators, "_measured", None)
    assert bound({}, times=times).operators == first.operators


def test_times_of_few_rows_are_not_those_of_many(bound, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    times: operators.Times = {}
    bound({}, times=times)
    monkeypatch.setitem(globals(), "DIMS", (Dim("rows", hint=16),))
    before = set(times)
    bound({}, times=times)
    assert {key[0] for key in times.keys() - before} == {info.name for info in bound({}).operators}


def test_a_backend_keeps_times_from_region_to_region(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import h3compile.backends.inductor as inductor

    given: list[object] = []
    monkeypatch.setattr(inductor, "compile_region", lambda *_, times, **__: given.append(times))
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("x"),)),))
    port = Port("x", torch.float32, ("rows", 4))
    region = Region("r", graph, (port,), (), (Port("y", torch.float32, ("rows", 4)),))
    backend = select("inductor")
    for _ in range(2):
        backend.lower(region, DIMS, "cpu", tmp_path, {})
    assert given == [{}, {}] and given[0] is given[1]


def test_named_providers_are_checked_without_a_device() -> None:
    assert check_named(module(), "sm_90a", {"attention": "gluon", "swiglu": "triton"}) == {"attention"}
    with pytest.raises(
        BuildError, match=r"'gluon' cannot serve attention.default on sm_103a: it is written for"
    ):
        check_named(module(), "sm_103a", {"attention": "gluon"})
    with pytest.raises(
        BuildError, match=r"'triton' cannot serve attention.default on sm_90a: heads have 64 ch"
    ):
        check_named(module(64), "sm_90a", {"attention": "triton"})


def test_a_named_provider_that_is_not_legal_fails(bound) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(
        BuildError, match=r"provider 'gluon' cannot serve attention.default on sm_120a: it is"
    ):
        bound({"attention": "gluon"}, arch="sm_120a")


def test_an_operator_nobody_can_serve_fails(bound) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BuildError, match=r"no provider can serve quantize_rows.default on sm_80 \(triton: "):
        bound({}, arch="sm_80")


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"atention": "cudnn"}, "no operator is called 'atention': did you mean 'attention'"),
        ({"attention": "cuddn"}, "attention has no provider 'cuddn': it has .*cudnn"),
    ],
)
def test_unknown_names(named: dict[str, str], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        check_providers(named)
    check_providers({"attention": "cudnn", "linear_fp8": "scaled_mm"})


def test_a_variant_that_depends_on_a_row_count_is_refused() -> None:
    (found,) = (o for o in OPERATORS if o.name == "quantize_rows.default")
    (node,) = module().graph.find_nodes(op="call_function", target=ours.quantize_rows.default)
    x = node.args[0].meta["val"]

    def launch(run, arch, x, static_scale=None):  # type: ignore[no-untyped-def]
        from h3compile.ops.launch import Launch

        run(Launch(Spec("k:k", (), (("ROWS", x.shape[1]),)), (1, 1, 1), ()))

    bad = Provider("bad", lambda *_: None, launch)
    with pytest.raises(BuildError, match="ROWS of k:k depends on a row count"):
        specs_of(found, bad, "sm_90a", (x, None))


def test_every_operator_has_a_provider_and_names_are_unique() -> None:
    names = [item.name for item in OPERATORS]
    assert len(set(names)) == len(names)
    for item in OPERATORS:
        providers = [provider.name for provider in item.providers]
        assert providers and len(set(providers)) == len(providers), item.name


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [{"rows": 316, "text_rows": 2}, {"rows": 130, "text_rows": 67}])
def test_no_region_launches_what_was_not_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lengths: dict[str, int]
) -> None:
    """Every region of a model under every lossy pass, its operators launched on operands of real lengths.

    One operator may stand in a region several times, with rows of other widths: each needs its kernel.
    """
    monkeypatch.setattr(operators, "_compiled", compiled)
    monkeypatch.setattr(
        operators, "_measured", lambda use, found, *_: {p.name: p.name != "triton" for p in found}
    )
    config = {**RELEASE_CONFIG, **TRANSFORMER_CONFIG, **HEADS}
    passes, _ = resolve("fp8,sage,skip", Registry.default())
    program, _ = Manager(passes).run(trace(config), find_target("h200"))
    sizes = {dim.name: dim.hint for dim in program.facts.dims} | lengths
    stages = {call.region for call in program.calls if "schedule" in call.region}
    launched: set[str] = set()
    for name in program.regions.keys() - stages:
        region = program.regions[name]
        folder = tmp_path / name
        folder.mkdir()
        module = propagate(region, program.facts.dims, "cpu").module()
        found = bind_operators(
            module, arch="sm_90a", named={}, times={}, device=torch.device("cpu"), output=folder
        )
        for key in _launched(region, found, sizes):
            assert key in found.variants, f"{name} launches {key}"
            launched.add(found.variants[key].kernel.partition(":")[0])
    assert {"quantize_rows", "linear_fp8", "qk_prepare", "swiglu", "norm_modulate"} <= launched


def _launched(region: Region, bound: Bound, sizes: dict[str, int]) -> Iterator[str]:
    """The keys of the variants that a run of ``region`` launches."""
    known = {item.name: item for item in OPERATORS}
    keys: list[str] = []
    functions: dict[object, Callable[..., object]] = {}
    for info in bound.operators:
        item = known[info.name]
        providers = {
            other.variant: next(p for p in item.providers if p.name == other.provider)
            for other in bound.operators
            if other.name == info.name
        }
        functions[item.target] = _bind(item, providers, lambda launch: keys.append(launch.spec.key), "sm_90a")
    values: dict[fx.Node, object] = {}
    ports = iter(region.placeholders)
    for node in region.graph.nodes:
        if node.op == "placeholder":
            port = next(ports)
            shape = [evaluate_dim(size, sizes) for size in port.shape]
            values[node] = torch.zeros(shape).to(port.dtype)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = functions.get(node.target, node.target)(*args, **kwargs)
    yield from keys
