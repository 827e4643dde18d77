"""The binaries behind the kernels of a module that Inductor compiled in this process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from h3compile.engine.artifact import CubinInfo, LibraryInfo
from h3compile.errors import BuildError

if TYPE_CHECKING:
    from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner, StaticTritonCompileResult

    CudaResult = StaticTritonCompileResult[StaticallyLaunchedCudaKernel]

__all__ = ["collect_kernels", "cubin_info", "needs_tuning"]


def _library_of(name: str, kernel: Callable[..., None]) -> Path:
    module = getattr(kernel, "__self__", None)
    if not isinstance(module, ModuleType) or module.__file__ is None:
        raise BuildError(
            f"the C++ kernel {name} is not in a library of its own", "lower with --backend eager"
        )
    return Path(module.__file__)


def _cubin_bytes(result: CudaResult) -> bytes:
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    kernel = result.kernel
    if kernel.cubin_raw is not None:
        return bytes(kernel.cubin_raw)
    folder = Path(triton_cache_dir(result.compile_meta.get("device") or 0)) / triton_hash_to_path_key(
        kernel.hash
    )
    return (folder / f"{kernel.name}.cubin").read_bytes()


def cubin_info(name: str, result: CudaResult) -> CubinInfo:
    """How to launch a statically launchable compile result, for the file ``name``.cubin."""
    from torch._inductor.runtime.triton_heuristics import GridExpr

    kernel = result.kernel
    grid = GridExpr.from_meta(result.inductor_meta, result.config)
    _, parameters, absent = result._get_arg_lists(kernel.arg_names, kernel.declared_constexprs)
    passed = tuple(
        argument
        for at, argument in enumerate(kernel.arg_names)
        if at not in kernel.full_constexprs and argument not in absent
    )
    return CubinInfo(
        file=f"{name}.cubin",
        entry=kernel.name,
        warps=kernel.num_warps,
        shared=kernel.shared,
        argument_types=kernel.arg_tys,
        null_arguments=int(kernel.has_global_scratch) + int(kernel.has_profile_scratch),
        parameters=tuple(parameters),
        passed=passed,
        prefix=tuple(grid.prefix),
        grid=(str(grid.x_grid), str(grid.y_grid), str(grid.z_grid)),
    )


def _chosen(name: str, kernel: CachingAutotuner) -> CudaResult:
    from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult

    if len(kernel.launchers) != 1:
        raise BuildError(
            f"the Triton kernel {name} has {len(kernel.launchers)} candidates left", "tune it first"
        )
    config = kernel.launchers[0].config
    known = [result for result in kernel.compile_results if result.config is config]
    # Coordinate descent finds configurations of its own; Triton's cache holds their binaries by now.
    result = known[0] if known else kernel._precompile_config(config)
    if not isinstance(result, StaticTritonCompileResult):
        raise BuildError(
            f"the Triton kernel {name} needs Triton to be launched",
            "keep it out of the graph, as an operator of its own",
        )
    return result


def needs_tuning(module: Mapping[str, object], kinds: Mapping[str, str]) -> bool:
    """Whether a kernel will still choose its configuration when it is first launched."""
    kernels = [module[name] for name, kind in kinds.items() if kind == "triton"]
    return any(
        len(getattr(kernel, "launchers", ())) > 1
        or getattr(kernel, "inductor_meta", {}).get("coordinate_descent_tuning", False)
        for kernel in kernels
    )


def collect_kernels(
    module: Mapping[str, object], kinds: Mapping[str, str], folder: Path
) -> dict[str, LibraryInfo | CubinInfo]:
    """Copy the binary of every kernel in ``kinds`` into ``folder`` and say how to launch it.

    ``module`` holds the globals of the module Inductor loaded. Raises `BuildError` for a kernel that
    cannot run without its compiler.
    """
    found: dict[str, LibraryInfo | CubinInfo] = {}
    for name, kind in kinds.items():
        kernel = module[name]
        if kind == "cpp_pybinding":
            assert callable(kernel)
            library = _library_of(name, kernel).read_bytes()
            digest = hashlib.sha256(library).hexdigest()[:16]
            info: LibraryInfo | CubinInfo = LibraryInfo(file=f"{name}.{digest}.so")
            (folder / info.file).write_bytes(library)
        elif kind == "triton":
            result = _chosen(name, kernel)  # type: ignore[arg-type]
            info = cubin_info(name, result)
            (folder / info.file).write_bytes(_cubin_bytes(result))
        else:
            raise BuildError(
                f"kernel {name} comes from {kind}, which cannot be kept", "lower with --backend eager"
            )
        found[name] = info
    return found
