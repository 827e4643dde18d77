"""Providers that call packages of others: taken where installed, recorded, told apart when they fail."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from torch import fx

import h3compile.backends.operators as operators
import h3compile.ops.package as package
import h3compile.ops.sage_flashinfer as sage_flashinfer
from h3compile.backends.operators import Bound, bind_operators
from h3compile.engine.artifact import ArtifactInfo, OperatorInfo, VariantInfo
from h3compile.errors import BuildError, EngineError
from h3compile.lower import _providers
from h3compile.ops import OPERATORS
from h3compile.ops.launch import Run, Spec
from h3compile.ops.operator import Operand, Provider
from h3compile.ops.package import Package
from h3compile.program.facts import Dim
from h3compile.program.propagate import propagate
from h3compile.program.region import Port, Region
from h3compile.runtime.operators import bound_operators

ours = torch.ops.h3compile
NAME = "sage_attention.default"
VERSIONS = {
    "nvidia-cudnn-frontend": "1.32.0",
    "flashinfer-python": "0.7.4",
    "flashinfer-jit-cache": "0.7.4",
    "flashinfer-cubin": "0.7.4",
}
Bind = Callable[..., Bound]


def module(k_block: int) -> fx.GraphModule:
    """SAGE of three views of a projection."""
    graph = fx.Graph()
    heads = graph.call_function(torch.ops.aten.unflatten.int, (graph.placeholder("x"), -1, [2, 128]))
    prepared = graph.call_function(
        ours.sage_prepare.separate, (heads, heads, heads, "fp8_e4m3", k_block, True)
    )
    parts = [graph.call_function(operator.getitem, (prepared, place)) for place in range(6)]
    graph.output((graph.call_function(ours.sage_attention.default, (*parts, k_block, torch.bfloat16)),))
    ports = (Port("x", torch.bfloat16, (1, "rows", 256)),)
    out = Port("y", torch.bfloat16, (1, "rows", 2, 128))
    return propagate(Region("r", graph, ports, (), (out,)), (Dim("rows", hint=512),)).module()


def compiled(spec: Spec, arch: str, output: Path) -> VariantInfo:
    """Stands for compiling: a kernel is a file with its key in it."""
    (output / f"{spec.key}.cubin").write_text(spec.key)
    sizes = {"warps": 4, "shared": 0, "scratch": 0, "scratch_alignment": 1, "scratch_arguments": 2}
    return VariantInfo(
        file=f"{spec.key}.cubin", kernel=spec.kernel, entry="k", registers=32, stack=0, **sizes
    )


@pytest.fixture
def bind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bind:
    """A function that binds SAGE where ``versions`` are installed; packages of others are the fastest."""

    def measured(use: object, candidates: list[Provider], *_: object) -> dict[str, float | None]:
        return {one.name: 1.0 if one.package else 2.0 for one in candidates}

    monkeypatch.setattr(operators, "_compiled", compiled)
    monkeypatch.setattr(operators, "_measured", measured)

    def bound(
        k_block: int, arch: str, named: dict[str, str] | None = None, versions: dict[str, str] = VERSIONS
    ) -> Bound:
        known = {name: Version(found) for name, found in versions.items()}
        for place in (package, sage_flashinfer):
            monkeypatch.setattr(place, "installed", known.get)
        return bind_operators(
            module(k_block),
            arch=arch,
            named=named or {},
            times={},
            device=torch.device("cpu"),
            output=tmp_path,
        )

    return bound


def attention(found: Bound) -> OperatorInfo:
    return next(info for info in found.operators if info.name == NAME)


def test_what_is_installed_takes_part_and_is_recorded(bind: Bind) -> None:
    info = attention(bind(16, "sm_103a"))
    assert (info.provider, info.package) == ("flashinfer", "flashinfer-python==0.7.4")
    assert info.ms.keys() == {"flashinfer", "triton"}
    assert attention(bind(0, "sm_100a")).ms.keys() == {"flashinfer", "cudnn", "triton"}


def test_its_kernels_are_kept_with_the_artifact(bind: Bind) -> None:
    kernels = {info.kernel for info in bind(16, "sm_103a").variants.values()}
    assert "sage_layout:value_rows_kernel" in kernels
    assert "attention:sage_kernel" not in kernels


def test_what_must_be_named_is_not_measured(bind: Bind) -> None:
    assert attention(bind(0, "sm_90a")).ms.keys() == {"gluon", "triton"}
    info = attention(bind(0, "sm_90a", {"sage_attention": "cudnn"}))
    assert (info.provider, info.package) == ("cudnn", "nvidia-cudnn-frontend==1.32.0")
    assert info.ms == {"cudnn": None}
    assert attention(bind(0, "sm_90a", {"sage_attention": "flashinfer"})).provider == "flashinfer"


def test_our_own_need_no_package(bind: Bind) -> None:
    info = attention(bind(16, "sm_103a", versions={}))
    assert (info.provider, info.package) == ("triton", "")


@pytest.mark.parametrize(
    ("name", "k_block", "arch", "versions", "message"),
    [
        ("flashinfer", 16, "sm_103a", {}, "flashinfer-python is not installed"),
        ("flashinfer", 16, "sm_103a", {"flashinfer-python": "0.6.1"}, "0.6.1, and versions from 0.6.18"),
        ("flashinfer", 16, "sm_90a", VERSIONS, "on sm_90a it takes one scale a head"),
        ("cudnn", 16, "sm_100a", VERSIONS, "cuDNN takes one scale a tensor"),
        ("cudnn", 0, "sm_120a", VERSIONS, "cuDNN's FP8 attention is known on sm_90a, sm_100a, sm_103a"),
        ("cudnn", 0, "sm_100a", {}, "nvidia-cudnn-frontend is not installed"),
    ],
)
def test_a_named_provider_that_is_not_legal_fails(
    name: str, k_block: int, arch: str, versions: dict[str, str], message: str, bind: Bind
) -> None:
    with pytest.raises(BuildError, match=f"provider '{name}' cannot serve {NAME} on {arch}: .*{message}"):
        bind(k_block, arch, {"sage_attention": name}, versions)


def failing(known: Package | None) -> Provider:
    def launch(run: Run, arch: str, *operands: Operand) -> torch.Tensor:
        raise RuntimeError("no kernel image\n  at line 7")

    return Provider("other", lambda *_: None, launch, known)


def test_a_package_that_fails_is_told_apart_from_us() -> None:
    use = operators._Use(next(one for one in OPERATORS if one.name == NAME), "", ((),))
    mine: Run = lambda launch: None  # noqa: E731
    with pytest.raises(
        BuildError, match=rf"^torch==\S+ cannot compute {NAME} on sm_90a \(no kernel image\): name another"
    ):
        operators._launch(use, failing(Package("torch", "2", "3")), mine, "sm_90a", ())
    with pytest.raises(RuntimeError, match="no kernel image"):
        operators._launch(use, failing(None), mine, "sm_90a", ())


def record(package_name: str) -> ArtifactInfo:
    entry = OperatorInfo(name=NAME, variant="", provider="cudnn", ms={"cudnn": None}, package=package_name)
    return ArtifactInfo(
        device="cuda",
        arch="sm_90",
        cpu_features=(),
        torch="2.14",
        python="cp311",
        inputs=(),
        outputs=1,
        lengths=(),
        assumptions=(),
        options={},
        kernels={},
        operators=(entry,),
    )


def test_an_engine_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(package, "installed", {}.get)
    with pytest.raises(EngineError) as error:
        bound_operators(record("nvidia-cudnn-frontend==1.32.0"), tmp_path / "block", torch.device("cuda", 0))
    assert str(error.value) == (
        "region block has sage_attention.default computed by cudnn, and nvidia-cudnn-frontend is not"
        " installed: install nvidia-cudnn-frontend==1.32.0, or run `h3compile finalize --again`"
    )


def test_the_manifest_says_who_and_with_what(tmp_path: Path) -> None:
    (tmp_path / "region.json").write_text(record("nvidia-cudnn-frontend==1.32.0").model_dump_json())
    assert _providers(tmp_path) == {NAME: "cudnn (nvidia-cudnn-frontend==1.32.0)"}
