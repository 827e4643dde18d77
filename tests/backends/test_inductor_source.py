"""What is kept of the module Inductor writes."""

from __future__ import annotations

import pytest

from h3compile.backends.inductor_source import launch_sequence
from h3compile.errors import BuildError

MODULE = """
# AOT ID: ['3_inference']
from ctypes import c_void_p
import torch
from torch import device, empty_strided
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.runtime.runtime_utils import assert_tensor_metadata
from torch._C import _cuda_getCurrentRawStream as get_raw_stream
import triton

aten = torch.ops.aten
unused = torch.ops.inductor
async_compile = AsyncCompile()

cpp_fused_0 = async_compile.cpp_pybinding(['float*'], r'''
void kernel(float* x) {}
''')

triton_poi_1 = async_compile.triton('triton_poi_1', '''
import triton
''', device_str='cuda')

never_called = async_compile.triton('never_called', '''
''', device_str='cuda')

async_compile.wait(globals())
del async_compile

def call(args):
    x, y = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        # Original ATen: [aten.mm]
        extern_kernels.mm(x, y, out=x)
        stream0 = get_raw_stream(0)
        triton_poi_1.run(x, 4, stream=stream0)
        z = aten.full.default([4], 0, device=device(type='cuda', index=0))
        cpp_fused_0(z)
        assert_tensor_metadata(z, (4, ), (1, ), torch.float32)
    return (z, )


def benchmark_compiled_module(args):
    import triton.testing


if __name__ == "__main__":
    call([])
"""


def test_only_what_call_reads_is_kept() -> None:
    kept = launch_sequence(MODULE).source
    assert "# Original ATen: [aten.mm]" in kept
    assert "aten = torch.ops.aten" in kept
    for gone in ("AsyncCompile", "import triton", "unused", "benchmark", "c_void_p", "__main__", "AOT ID"):
        assert gone not in kept
    compile(kept, "region.py", "exec")


def test_kernels_become_free_names() -> None:
    sequence = launch_sequence(MODULE)
    assert sequence.kernels == {"cpp_fused_0": "cpp_pybinding", "triton_poi_1": "triton"}
    assert "cpp_fused_0(z)" in sequence.source
    assert "void kernel" not in sequence.source


def test_the_device_is_chosen_when_loading() -> None:
    kept = launch_sequence(MODULE).source
    assert "_DeviceGuard(device_index)" in kept
    assert "set_device(device_index)" in kept
    assert "get_raw_stream(device_index)" in kept
    assert "index=device_index" in kept


def test_nothing_of_the_compiler_is_imported() -> None:
    kept = launch_sequence(MODULE).source
    assert "torch._inductor" not in kept
    assert "torch.mm(x, y, out=x)" in kept


def test_a_module_without_call_is_refused() -> None:
    with pytest.raises(BuildError, match="no callable"):
        launch_sequence("import torch\n")


def test_compiling_at_run_time_is_refused() -> None:
    module = MODULE.replace("stream0 = get_raw_stream(0)", "late = async_compile.triton('late', '')")
    with pytest.raises(BuildError, match="would compile kernels when it runs"):
        launch_sequence(module)
