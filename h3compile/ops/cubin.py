"""Loading and launching compiled variants, with neither Triton nor a CUDA toolkit."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from h3compile.errors import EngineError
from h3compile.ops.launch import Binary, Launch, Spec

__all__ = ["Kernels"]

# Of Triton's types, in the letters of torch's static launcher.
_LETTERS = {"i32": "i", "i64": "l", "fp32": "f"}
_ALIGNMENT = 16


class _Loaded:
    def __init__(self, spec: Spec, binary: Binary, device: torch.device) -> None:
        driver = torch._C._StaticCudaLauncher
        try:
            with torch.cuda.device(device):
                # (function, registers, spills), since torch 2.13 after the module that owns the function.
                loaded = driver._load_kernel(str(binary.file), binary.entry, binary.shared, device.index)
        except RuntimeError as error:
            raise EngineError(
                f"{binary.file.name} cannot be loaded ({error})",
                "run `h3compile finalize --again` on this machine",
            ) from error
        self._function = loaded[-3]
        self._launch = driver._launch_kernel
        self._binary = binary
        self._device = device
        letters = ["O" if kind.startswith("*") else _LETTERS[kind] for _, kind in spec.types]
        self._types = "".join(letters) + "O" * binary.scratch_arguments
        self._unused = (None,) * max(binary.scratch_arguments - 1, 0)

    def __call__(self, launch: Launch) -> None:
        x, y, z = launch.grid
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        binary = self._binary
        arguments: tuple[object, ...] = launch.arguments
        if binary.scratch_arguments:
            scratch = None
            if binary.scratch:
                # Allocations start on 512 bytes, more than any descriptor asks for.
                size = binary.scratch * x * y * z
                scratch = torch.empty(size, dtype=torch.uint8, device=self._device)
            arguments = (*arguments, scratch, *self._unused)
        self._launch(self._function, x, y, z, binary.warps, binary.shared, self._types, arguments, stream)


class Kernels:
    """Executes launches with the variants compiled for a region, on one device and its current stream.

    Raises `EngineError` when a launch asks for a variant that is not among them: nothing is compiled.
    """

    def __init__(self, binaries: Mapping[str, Binary], device: torch.device) -> None:
        self._binaries = dict(binaries)
        self._device = device
        self._loaded: dict[Spec, _Loaded] = {}

    def __call__(self, launch: Launch) -> None:
        """Enqueue ``launch``."""
        for argument in launch.arguments:
            if isinstance(argument, torch.Tensor) and argument.data_ptr() % _ALIGNMENT:
                raise EngineError(
                    f"an operand of {launch.spec.kernel} does not start on a {_ALIGNMENT}-byte boundary",
                    "pass tensors with an aligned storage offset",
                )
        loaded = self._loaded.get(launch.spec)
        if loaded is None:
            loaded = self._loaded[launch.spec] = self._load(launch.spec)
        loaded(launch)

    def _load(self, spec: Spec) -> _Loaded:
        binary = self._binaries.get(spec.key)
        if binary is None:
            raise EngineError(
                f"the engine has no kernel {spec.key} for these operands",
                "run `h3compile finalize --again` on this machine",
            )
        return _Loaded(spec, binary, self._device)
