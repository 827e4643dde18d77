"""A compiled region on disk: a folder with `region.json`, `region.py` and one binary a kernel.

`region.py` is the launch sequence Inductor wrote, as plain Python over torch; the binaries are the shared
libraries (CPU) or cubins (CUDA) it launches. Loading executes that Python and maps those binaries:
nothing is compiled, no cache directory is read or written, nothing is unpickled. An artifact is
code, so whoever loads one checks its digest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType

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
from h3compile.ops.memory import empty_strided
from h3compile.runtime.kernels import Kernel, load_cubin, load_library

__all__ = ["LoadedRegion", "load_artifact"]

_MEND = "run `h3compile finalize --again` on this machine"

# Of torch, what a launch sequence calls with the tensor that the result goes to.
_PRODUCTS = frozenset(("addmm", "baddbmm", "bmm", "mm"))

# What a launch sequence defines for itself and a rehearsal has no use for.
_ASSERTIONS = frozenset(("assert_alignment", "assert_size_stride", "assert_size_stride_grouped"))

_Call = Callable[[list[Tensor]], Sequence[Tensor]]


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


class LoadedRegion:
    """A compiled region, called with its inputs and then its weights, in the order of `ArtifactInfo.inputs`.

    Inputs are neither changed nor copied: one whose strides, dtype, alignment or lengths are not those
    recorded raises `EngineError`. It keeps no state and may be called from several threads. On CUDA it
    launches on the current stream of its device.
    """

    def __init__(self, name: str, info: ArtifactInfo, call: _Call, rehearsed: _Call) -> None:
        self._name = name
        self._checks = _Checks(info, name)
        self._call = call
        self._rehearsed = rehearsed

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs."""
        return self.consume(list(inputs))

    def consume(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        """The outputs; the list is emptied, and what nobody else refers to is freed after its last use."""
        self._checks(inputs)
        try:
            return tuple(self._call(inputs))
        except AssertionError as error:
            raise EngineError(f"an input does not fit region {self._name} ({error})") from error

    def rehearse(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        """As `consume`, on the meta device: every allocation is made, and no kernel runs."""
        return tuple(self._rehearsed(inputs))


class _Torch:
    """torch as a rehearsal needs it: a product into memory that is there already is not computed.

    Torch's forms of products for tensors without memory import its compiler, which an engine does without.
    """

    def __getattr__(self, name: str) -> object:
        return _given if name in _PRODUCTS else getattr(torch, name)


def _given(*operands: object, out: Tensor, **options: object) -> Tensor:
    return out


class _Silent:
    """In place of a kernel, and of what looks at the tensors it made."""

    def __call__(self, *arguments: object) -> None:
        pass

    def run(self, *arguments: object, stream: int) -> None:
        pass


def load_artifact(path: Path, device: torch.device | str) -> LoadedRegion:
    """The compiled region in folder ``path``, ready to run on ``device``; compiles nothing.

    Raises `EngineError` when the artifact is unreadable, or was compiled for another torch, Python
    (CPU only), device architecture or set of CPU instructions.
    """
    device = torch.device(device)
    info = read_info(path)
    _check_machine(info, device, path)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    try:
        source = (path / SOURCE_FILE).read_text()
        kernels = {name: _load_kernel(path, kernel, device) for name, kernel in info.kernels.items()}
    except OSError as error:
        raise EngineError(f"region {path.name} is incomplete ({error})", "build the engine again") from error
    names: dict[str, object] = {"__name__": f"h3compile.region.{path.name}", "device_index": device.index}
    real = {**names, **kernels, "assert_tensor_metadata": _assert_tensor_metadata}
    silent = {**names, **dict.fromkeys([*kernels, "assert_tensor_metadata"], _Silent())}
    if info.operators:
        # Here and not above: a region without our operators needs none of their code.
        from h3compile.runtime.operators import bound_operators, rehearsed_operators

        bound = bound_operators(info, path, device)
        real |= {operator_global(name): function for name, function in bound.items()}
        rehearsed = rehearsed_operators(info, path, device)
        silent |= {operator_global(name): function for name, function in rehearsed.items()}
    elif OWN_OPERATORS in source:
        import h3compile.ops  # noqa: F401  its references are what the launch sequence calls
    code = compile(source, str(path / SOURCE_FILE), "exec")
    return LoadedRegion(
        path.name,
        info,
        _executed(code, real),
        _executed(code, silent, *_ASSERTIONS.intersection(code.co_names), rehearsed=True),
    )


def _executed(code: CodeType, namespace: dict[str, object], *silenced: str, rehearsed: bool = False) -> _Call:
    """The launch sequence, its allocations from the step that it is part of."""
    exec(code, namespace)
    namespace |= dict.fromkeys(silenced, _Silent())
    for name, function in namespace.items():
        if name.startswith("empty_strided_"):
            assert callable(function)
            namespace[name] = empty_strided(function)
    if rehearsed:
        namespace["torch"] = _Torch()
    call = namespace["call"]
    assert callable(call)
    return call
