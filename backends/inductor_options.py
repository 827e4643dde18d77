"""How regions are compiled: the choices a caller has, and the Inductor configuration they stand for."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch._inductor.config as inductor_config

from h3compile.errors import BuildError

__all__ = ["PORTABLE_FEATURES", "InductorOptions", "settings_for"]

# What -march=x86-64-v3 lets a compiler use.
PORTABLE_FEATURES = frozenset(
    {"sse", "sse2", "ssse3", "sse4_1", "sse4_2", "popcnt", "movbe", "abm"}
    | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma"}
)


@dataclass(frozen=True)
class InductorOptions:
    """Choices that change the code of a region, but not what it computes beyond rounding.

    ``max_autotune`` and ``coordinate_descent`` tune GPU kernels by measurement. ``precision_casts``
    rounds between fused BF16 operations as eager does; without it chains stay FP32, which is closer to
    float64. ``portable`` compiles CPU code for x86-64-v3 instead of this CPU. ``attention`` names the
    `SDPBackend` choices in order, such as ``("cudnn_attention", "flash_attention")``; empty means torch's
    own order. ``workers`` limits compiler processes; 0 means the CPU count, and one for a GPU.
    """

    max_autotune: bool = False
    coordinate_descent: bool = False
    precision_casts: bool = False
    portable: bool = False
    attention: tuple[str, ...] = ()
    workers: int = 0


def settings_for(options: InductorOptions, device: torch.device) -> dict[str, object]:
    """Inductor's configuration for a region: everything that is pinned, with the reason."""
    settings: dict[str, object] = {
        # The artifact is the cache; a hit in Inductor's own would return code of an older build.
        "fx_graph_cache": False,
        "fx_graph_remote_cache": False,
        "autotune_remote_cache": False,
        # Weights are inputs of every call.
        "freezing": False,
        "cpp.weight_prepack": False,
        # It would copy weights into padded buffers at every call.
        "shape_padding": False,
        "max_autotune": options.max_autotune,
        "coordinate_descent_tuning": options.coordinate_descent,
        "emulate_precision_casts": options.precision_casts,
        # One plain `call`, without code to benchmark it.
        "benchmark_harness": False,
        "graph_partition": False,
        "triton.cudagraphs": False,
        "cpp_wrapper": False,
        # Values are placed before a step runs; one kept alive to be used again is one more that lives.
        "allow_buffer_reuse": False,
        # Strides and sizes of inputs are asserted by the launch sequence.
        "size_asserts": True,
        # The thread count is that of the process that runs.
        "cpp.dynamic_threads": True,
        "cpp.enable_unsafe_math_opt_flag": False,
        "cpp.enable_floating_point_contract_flag": "off",
        # GPU kernels choose their configuration in a first run, and are launchable from their cubin.
        "triton.autotune_at_compile_time": False,
        "use_static_triton_launcher": True,
        "static_launch_user_defined_triton_kernels": True,
        "compile_threads": _workers(options, device),
    }
    if options.portable:
        settings |= {"cpp.simdlen": 256, "cpp.march": "x86-64-v3"}
    # Line tables hold paths of this machine. The switch is newer than the oldest torch supported.
    if hasattr(inductor_config, "aot_inductor.enable_line_tables"):
        settings["aot_inductor.enable_line_tables"] = False
    unknown = sorted(key for key in settings if not hasattr(inductor_config, key))
    if unknown:
        raise BuildError(
            f"torch {torch.__version__} has no Inductor setting {unknown[0]}", "use a newer torch"
        )
    return settings


def _workers(options: InductorOptions, device: torch.device) -> int:
    # C++ compilers run below a thread pool. Triton uses a pool of processes, which one worker avoids.
    return options.workers or (1 if device.type == "cuda" else os.cpu_count() or 1)
