"""A compiled region on disk: a folder with `region.json`, `region.py` and one binary a kernel.

`region.py` is the launch sequence Inductor wrote, as plain Python over torch; the binaries are the shared
libraries (CPU) or cubins (CUDA) it launches. Loading executes that Python and maps those binaries:
nothing is compiled, no cache directory is read or written, nothing is unpickled. An artifact is
code, so whoever loads one checks its digest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from h3compile.errors import EngineError
from h3compile.runtime.kernels import Kernel, load_cubin, load_library
from h3compile.runtime.machine import cpu_features, device_arch, python_abi, torch_release

__all__ = [
    "ALIGNMENT",
    "FORMAT",
    "SOURCE_FILE",
    "ArtifactInfo",
    "CubinInfo",
    "InputInfo",
    "LengthInfo",
    "LibraryInfo",
    "load_artifact",
    "read_info",
]

FORMAT = 1
INFO_FILE = "region.json"
SOURCE_FILE = "region.py"
# Bytes. Vectorized GPU code reads 16 at a time; Inductor assumes every input starts on such a boundary.
ALIGNMENT = 16

RegionFunction = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


class _Info(BaseModel):
    # A field this version does not know means a newer writer: refuse it rather than ignore it.
    model_config = ConfigDict(extra="forbid", frozen=True)


class LibraryInfo(_Info):
    """A CPU kernel: an extension module in a shared library."""

    kind: Literal["library"] = "library"
    file: str


class CubinInfo(_Info):
    """A CUDA kernel: a cubin, its entry point and how to launch it.

    ``parameters`` are the names the launch sequence passes, ``passed`` those that reach the kernel.
    ``grid`` holds three expressions over the parameters, after the statements of ``prefix``.
    ``argument_types`` has one character a passed argument, ``null_arguments`` counts unused trailing
    pointers. ``shared`` is dynamic shared memory in bytes.
    """

    kind: Literal["cubin"] = "cubin"
    file: str
    entry: str
    warps: int
    shared: int
    argument_types: str
    null_arguments: int
    parameters: tuple[str, ...]
    passed: tuple[str, ...]
    prefix: tuple[str, ...]
    grid: tuple[str, str, str]


class InputInfo(_Info):
    """An input: dtype by its torch name, shape and stride (in elements) in numbers and length expressions."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    stride: tuple[int | str, ...]
    aligned: bool  # the kernels assume that it starts on a multiple of ALIGNMENT


class LengthInfo(_Info):
    """A length that is free at run time, and the largest value the kernels were compiled for."""

    name: str
    largest: int


class ArtifactInfo(_Info):
    """`region.json`: what the artifact takes, and the machine it was compiled for.

    ``assumptions`` are the conditions on lengths that Inductor relied on, all implied by ``lengths`` but
    for layout decisions that a length of 1 does not invalidate.
    """

    format: int = FORMAT
    device: Literal["cpu", "cuda"]
    arch: str
    cpu_features: tuple[str, ...]
    torch: str
    python: str
    inputs: tuple[InputInfo, ...]
    outputs: int
    lengths: tuple[LengthInfo, ...]
    assumptions: tuple[str, ...]
    options: dict[str, bool | int | str | tuple[str, ...]]
    kernels: dict[str, LibraryInfo | CubinInfo]


def read_info(path: Path) -> ArtifactInfo:
    """The record of the artifact in folder ``path``. Raises `EngineError` when it is missing or unreadable."""
    file = path / INFO_FILE
    try:
        return ArtifactInfo.model_validate_json(file.read_bytes())
    except OSError as error:
        raise EngineError(f"no compiled region at {path}", "build the engine again") from error
    except ValidationError as error:
        raise EngineError(f"{file} is not a record this version reads", "build the engine again") from error


def _check_machine(info: ArtifactInfo, device: torch.device, path: Path) -> None:
    def demand(what: str, wanted: str, found: str) -> None:
        if wanted != found:
            raise EngineError(
                f"region {path.name} was compiled for {what} {wanted} and this is {found}",
                "finalize the engine on this machine",
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
                "finalize the engine on this machine, or build it with the portable option",
            )


def _load_kernel(path: Path, kernel: LibraryInfo | CubinInfo, device: torch.device) -> Kernel:
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
    tensor: Tensor | None, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, operator: str = ""
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
        self._lengths = tuple((length, *where[length.name]) for length in info.lengths if length.name in where)

    def __call__(self, inputs: Sequence[Tensor]) -> None:
        info = self._info
        if len(inputs) != len(info.inputs):
            raise EngineError(f"region {self._name} takes {len(info.inputs)} inputs and got {len(inputs)}")
        for at, dtype in enumerate(self._dtypes):
            if inputs[at].dtype != dtype:
                raise EngineError(
                    f"input {info.inputs[at].name!r} of region {self._name} is {inputs[at].dtype}, not {dtype}"
                )
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
        raise EngineError(f"region {path.name} is incomplete: {error}", "build the engine again") from error
    namespace.update(kernels)
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
            raise EngineError(f"an input does not fit region {path.name}: {error}") from error

    return run
