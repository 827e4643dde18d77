"""A compiled region on disk: a folder with `region.json`, `region.py` and one binary a kernel.

`region.py` is the launch sequence Inductor wrote, as plain Python over torch; the binaries are the shared
libraries (CPU) or cubins (CUDA) it launches. Loading executes that Python and maps those binaries:
nothing is compiled, no cache directory is read or written, nothing is unpickled. An artifact is
code, so whoever loads one checks its digest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from h3compile.engine.artifact import (
    ALIGNMENT,
    FORMAT,
    OWN_OPERATORS,
    SOURCE_FILE,
    ArtifactInfo,
    CubinInfo,
    LibraryInfo,
    operator_global,
    read_info,
)
from h3compile.engine.machine import cpu_features, device_arch, python_abi, torch_release
from h3compile.errors import EngineError
from h3compile.runtime.kernels import Kernel, load_cubin, load_library

__all__ = ["RegionFunction", "load_artifact"]

_MEND = "run `h3compile finalize --again` on this machine"

RegionFunction = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


def _check_machine(info: ArtifactInfo, device: torch.device, path: Path) -> None:
    def demand(what: str, wanted: str, found: str) -> None:
        if wanted != found:
            raise EngineError(
                f"region {path.name} was compiled for {what} {wanted} and this is {found}",
                _MEND,
            )

    if info.format != FORMAT:
        raise EngineError(f"region {path.name} has format {info.format}, not {FORMAT}", "update h3compile")
    demand("device", info.device, device.type)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(f"region {path.name} needs a CUDA device and none is there")
    demand("torch", info.torch, torch_release(device))
    demand("architecture", info.arch, device_arch(device))
    if info.device == "cpu":
        demand("Python", info.python, python_abi())
        missing = sorted(set(info.cpu_features) - cpu_features())
        if missing:
            raise EngineError(
                f"region {path.name} uses CPU instructions this machine lacks ({', '.join(missing)})",
                _MEND,
            )


def _load_kernel(path: Path, kernel: LibraryInfo | CubinInfo, device: torch.device) -> Kernel:
    if not (path / kernel.file).is_file():
        raise FileNotFoundError(f"no {kernel.file}")
    if isinstance(kernel, LibraryInfo):
        return load_library(path / kernel.file)
    return load_cubin(
        path / kernel.file,
        entry=kernel.entry,
        warps=kernel.warps,
        shared=kernel.shared,
        argument_types=kernel.argument_types,
        null_arguments=kernel.null_arguments,
        parameters=kernel.parameters,
        passed=kernel.passed,
        prefix=kernel.prefix,
        grid=kernel.grid,
        device=device,
    )


def _assert_tensor_metadata(
    tensor: Tensor | None,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    operator: str = "",
) -> None:
    if tensor is None:
        return
    if tensor.dtype != dtype:
        raise AssertionError(f"{operator} gave {tensor.dtype}, not {dtype}")
    torch._C._dynamo.guards.assert_size_stride(tensor, size, stride, operator)


class _Checks:
    """What the launch sequence itself would not notice about its inputs."""

    def __init__(self, info: ArtifactInfo, name: str) -> None:
        self._name = name
        self._info = info
        self._aligned = tuple(at for at, entry in enumerate(info.inputs) if entry.aligned)
        self._dtypes = tuple(getattr(torch, entry.dtype) for entry in info.inputs)
        where = {
            size: (at, axis)
            for at, entry in reversed(list(enumerate(info.inputs)))
            for axis, size in enumerate(entry.shape)
        }
        self._lengths = tuple(
            (length, *where[length.name]) for length in info.lengths if length.name in where
        )

    def __call__(self, inputs: Sequence[Tensor]) -> None:
        info = self._info
        if len(inputs) != len(info.inputs):
            raise EngineError(f"region {self._name} takes {len(info.inputs)} inputs and got {len(inputs)}")
        for at, dtype in enumerate(self._dtypes):
            if inputs[at].dtype != dtype:
                name = info.inputs[at].name
                raise EngineError(f"input {name!r} of region {self._name} is {inputs[at].dtype}, not {dtype}")
        for at in self._aligned:
            if inputs[at].data_ptr() % ALIGNMENT:
                raise EngineError(
                    f"input {info.inputs[at].name!r} of region {self._name} does not start on a"
                    f" {ALIGNMENT}-byte boundary",
                    "pass a tensor with an aligned storage offset",
                )
        for length, at, axis in self._lengths:
            if not 1 <= inputs[at].shape[axis] <= length.largest:
                raise EngineError(
                    f"{length.name} is {inputs[at].shape[axis]} and region {self._name} was compiled for"
                    f" 1 to {length.largest}",
                    "build the engine for longer sequences",
                )


def load_artifact(path: Path, device: torch.device | str) -> RegionFunction:
    """The compiled region in folder ``path``, ready to run on ``device``; compiles nothing.

    The function takes the region's inputs, then its weights, in the order of `ArtifactInfo.inputs`, and
    returns its outputs. Inputs are neither changed nor copied: one whose strides, dtype, alignment or
    lengths are not those recorded raises `EngineError`. It keeps no state and may be called from
    several threads. On CUDA it launches on the current stream of ``device``.

    Raises `EngineError` when the artifact is unreadable, or was compiled for another torch, Python
    (CPU only), device architecture or set of CPU instructions.
    """
    device = torch.device(device)
    info = read_info(path)
    _check_machine(info, device, path)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    namespace: dict[str, object] = {
        "__name__": f"h3compile.region.{path.name}",
        "device_index": device.index,
        "assert_tensor_metadata": _assert_tensor_metadata,
    }
    try:
        source = (path / SOURCE_FILE).read_text()
        kernels = {name: _load_kernel(path, kernel, device) for name, kernel in info.kernels.items()}
    except OSError as error:
        raise EngineError(f"region {path.name} is incomplete ({error})", "build the engine again") from error
    namespace.update(kernels)
    if info.operators:
        # Here and not above: a region without our operators needs none of their code.
        from h3compile.runtime.operators import bound_operators

        bound = bound_operators(info, path, device)
        namespace.update((operator_global(name), function) for name, function in bound.items())
    elif OWN_OPERATORS in source:
        import h3compile.ops  # noqa: F401  its references are what the launch sequence calls
    exec(compile(source, str(path / SOURCE_FILE), "exec"), namespace)
    call = namespace["call"]
    assert callable(call)
    checks = _Checks(info, path.name)

    def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        checks(inputs)
        try:
            # The launch sequence empties the list it is given, to free what it no longer needs.
            return tuple(call(list(inputs)))
        except AssertionError as error:
            raise EngineError(f"an input does not fit region {path.name} ({error})") from error

    return run
