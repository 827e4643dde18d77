"""Recording how to launch a cubin, from a kernel compiled for a GPU that need not be there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="recording GPU kernels needs Triton")

from h3compile.backends.inductor_kernels import collect_kernels, cubin_info  # noqa: E402
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


def test_the_cubin_itself_is_kept(result: object, tmp_path: Path) -> None:
    class Tuned:
        compile_results = (result,)

    kernels = collect_kernels({"scale_0": Tuned()}, {"scale_0": "triton"}, tmp_path)
    assert (tmp_path / "scale_0.cubin").read_bytes()[:4] == b"\x7fELF"
    assert list(kernels) == ["scale_0"]


def test_an_untuned_kernel_is_refused(result: object, tmp_path: Path) -> None:
    class Untuned:
        compile_results = (result, result)

    with pytest.raises(BuildError, match="2 candidates left"):
        collect_kernels({"scale_0": Untuned()}, {"scale_0": "triton"}, tmp_path)


def test_a_kernel_that_needs_triton_is_refused(tmp_path: Path) -> None:
    class Dynamic:
        compile_results = (object(),)

    with pytest.raises(BuildError, match="needs Triton to be launched"):
        collect_kernels({"scale_0": Dynamic()}, {"scale_0": "triton"}, tmp_path)


def test_an_unknown_compiler_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="comes from cutedsl"):
        collect_kernels({"gemm": torch.mm}, {"gemm": "cutedsl"}, tmp_path)
