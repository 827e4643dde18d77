"""Recording how to launch a cubin, from a kernel compiled for a GPU that need not be there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="recording GPU kernels needs Triton")

from h3compile.backends.inductor_kernels import collect_kernels, cubin_info, needs_tuning  # noqa: E402
from h3compile.engine.artifact import CubinInfo  # noqa: E402
from h3compile.errors import BuildError  # noqa: E402

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def triton_poi_scale(in_ptr0, out_ptr0, factor, xnumel, XBLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    xmask = xindex < xnumel
    tl.store(out_ptr0 + xindex, tl.load(in_ptr0 + xindex, xmask) * factor, xmask)
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The compile result Inductor would hold for an H200, made through its own classes."""
    from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel
    from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult

    folder = tmp_path_factory.mktemp("triton")
    source = folder / "kernel.py"
    source.write_text(KERNEL)
    scope: dict[str, object] = {"__name__": "kernel"}
    exec(compile(KERNEL, str(source), "exec"), scope)
    signature = {
        "in_ptr0": "*fp32",
        "out_ptr0": "*fp32",
        "factor": "fp32",
        "xnumel": "i64",
        "XBLOCK": "constexpr",
    }
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder / "cache")
        binary = triton.compile(
            triton.compiler.ASTSource(scope["triton_poi_scale"], signature, {"XBLOCK": 256}),
            target=triton.backends.compiler.GPUTarget("cuda", 90, 32),
            options={"num_warps": 4},
        )
    binary._cubin_path = "unused"
    return StaticTritonCompileResult(
        StaticallyLaunchedCudaKernel(binary),
        triton.Config({"XBLOCK": 256}, num_warps=4),
        {"constants": {"XBLOCK": 256}, "signature": signature, "device": 0},
        {"grid_type": "Grid1D"},
    )


def test_a_cubin_is_recorded_with_its_launch(result: object) -> None:
    info = cubin_info("scale_0", result)  # type: ignore[arg-type]
    assert (info.file, info.entry, info.warps) == ("scale_0.cubin", "triton_poi_scale", 4)
    assert info.parameters == ("in_ptr0", "out_ptr0", "factor", "xnumel")
    assert info.passed == info.parameters
    assert info.argument_types == "OOfl"
    (x, y, z) = (eval(expression, {"xnumel": 1000}) for expression in info.grid)
    assert (x, y, z) == (4, 1, 1)


class _Tuner:
    """The part of Inductor's autotuner that is read: its results and the launchers it has left."""

    def __init__(self, *results: object, left: int = 1) -> None:
        self.compile_results = results
        self.launchers = [SimpleNamespace(config=getattr(result, "config", None)) for result in results][
            :left
        ]
        self.inductor_meta: dict[str, bool] = {}


def test_the_cubin_itself_is_kept(result: object, tmp_path: Path) -> None:
    kernels = collect_kernels({"scale_0": _Tuner(result)}, {"scale_0": "triton"}, tmp_path)
    assert (tmp_path / "scale_0.cubin").read_bytes()[:4] == b"\x7fELF"
    assert list(kernels) == ["scale_0"]


def test_the_configuration_that_won_is_kept(result: object, tmp_path: Path) -> None:
    loser = SimpleNamespace(config=object())
    tuner = _Tuner(loser, result)
    tuner.launchers = [SimpleNamespace(config=result.config)]  # type: ignore[attr-defined]
    kernels = collect_kernels({"scale_0": tuner}, {"scale_0": "triton"}, tmp_path)
    assert isinstance(kernels["scale_0"], CubinInfo)


def test_an_untuned_kernel_is_refused(result: object, tmp_path: Path) -> None:
    untuned = _Tuner(result, result, left=2)
    assert needs_tuning({"scale_0": untuned}, {"scale_0": "triton"})
    with pytest.raises(BuildError, match="2 candidates left"):
        collect_kernels({"scale_0": untuned}, {"scale_0": "triton"}, tmp_path)
    assert not needs_tuning({"scale_0": _Tuner(result)}, {"scale_0": "triton"})


def test_a_kernel_that_needs_triton_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="needs Triton to be launched"):
        collect_kernels({"scale_0": _Tuner(SimpleNamespace(config=None))}, {"scale_0": "triton"}, tmp_path)


def test_an_unknown_compiler_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="comes from cutedsl"):
        collect_kernels({"gemm": torch.mm}, {"gemm": "cutedsl"}, tmp_path)
