"""Loading kernel binaries: extension modules for the CPU, cubins for CUDA."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from h3compile.errors import EngineError

__all__ = ["CudaKernel", "Kernel", "load_cubin", "load_library"]

# A library reads the address of the accessor it needs from the environment while it is imported.
_ACCESSOR_VARIABLE = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
_IMPORTING = threading.Lock()


class CudaKernel(Protocol):
    """A kernel as the launch sequence calls it: its arguments, then the raw stream."""

    def run(self, *arguments: object, stream: int) -> None: ...


Kernel = Callable[..., None] | CudaKernel


def load_library(path: Path) -> Callable[..., None]:
    """The function `kernel` of the extension module at ``path``.

    Raises `EngineError` when the library cannot be mapped. The environment is as before on return.
    """
    # The last part names the initializer; the rest, with the digest in the file's name, keeps kernels apart.
    name = f"h3compile_{path.stem.replace('.', '_')}.kernel"
    accessor: int = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    with _IMPORTING:
        before = os.environ.get(_ACCESSOR_VARIABLE)
        os.environ[_ACCESSOR_VARIABLE] = str(accessor)
        try:
            loader = importlib.machinery.ExtensionFileLoader(name, str(path))
            spec = importlib.util.spec_from_file_location(name, path, loader=loader)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except ImportError as error:
            raise EngineError(
                f"{path.name} cannot be loaded ({error})", "run `h3compile finalize --again` on this machine"
            ) from error
        finally:
            if before is None:
                del os.environ[_ACCESSOR_VARIABLE]
            else:
                os.environ[_ACCESSOR_VARIABLE] = before
    kernel: Callable[..., None] = module.kernel
    return kernel


class _Launcher:
    """A loaded cubin behind the call convention of the launch sequence."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self.run = launch


def load_cubin(
    path: Path,
    *,
    entry: str,
    warps: int,
    shared: int,
    argument_types: str,
    null_arguments: int,
    parameters: tuple[str, ...],
    passed: tuple[str, ...],
    prefix: tuple[str, ...],
    grid: tuple[str, str, str],
    device: torch.device,
) -> CudaKernel:
    """The kernel ``entry`` of the cubin at ``path``, loaded on ``device`` through torch's static launcher.

    The other arguments are those of `CubinInfo`. Neither Triton nor a CUDA toolkit is needed.
    Raises `EngineError` when the driver refuses the cubin.
    """
    driver = torch._C._StaticCudaLauncher
    try:
        with torch.cuda.device(device):
            # (function, registers, spills), since torch 2.13 after the module that owns the function.
            function = driver._load_kernel(str(path), entry, shared, device.index)[-3]
    except RuntimeError as error:
        raise EngineError(
            f"{path.name} cannot be loaded ({error})", "run `h3compile finalize --again` on this machine"
        ) from error
    tail = ", ".join([*passed, *["None"] * null_arguments])
    arguments = f"({tail},)" if tail else "()"
    types = argument_types + "O" * null_arguments
    # Grids are short integer expressions over the parameters; compiled once, they cost nothing per launch.
    lines = [
        f"def launch({', '.join([*parameters, 'stream'])}):",
        *(f"    {statement}" for statement in prefix),
        f"    launch_kernel(function, {', '.join(grid)}, {warps}, {shared}, {types!r}, {arguments}, stream)",
    ]
    scope: dict[str, object] = {"launch_kernel": driver._launch_kernel, "function": function}
    exec(compile("\n".join(lines), f"<launcher of {entry}>", "exec"), scope)
    launch = scope["launch"]
    assert callable(launch)
    return _Launcher(launch)
