"""A variant of a Triton function to a cubin, for any architecture, with or without a GPU."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from h3compile.errors import BuildError
from h3compile.ops.launch import Spec

__all__ = ["ARCHES", "Cubin", "Usage", "compile_spec", "function_of", "usage"]

# The architectures of the targets, and Triton's number for each.
ARCHES = {
    "sm_80": 80,
    "sm_89": 89,
    "sm_90a": 90,
    "sm_100a": 100,
    "sm_103a": 103,
    "sm_120a": 120,
    "sm_121a": 121,
}

# Pointers start on 16 bytes: loads are as wide as the hardware has them.
_ALIGNED = [["tt.divisibility", 16]]

# Each adds a pointer to the parameters of a kernel, used or not.
_SCRATCH = ("global_scratch_size", "profile_scratch_size")


@dataclass(frozen=True)
class Cubin:
    """A compiled variant in memory; the other fields are those of `h3compile.ops.launch.Binary`."""

    code: bytes
    entry: str
    warps: int
    shared: int
    scratch: int
    scratch_alignment: int
    scratch_arguments: int


@dataclass(frozen=True)
class Usage:
    """What ptxas gave a kernel: registers a thread, and bytes of a thread's stack (spilled registers)."""

    registers: int
    stack: int


def function_of(spec: Spec) -> triton.JITFunction:
    """The Triton function that ``spec`` names."""
    module, _, name = spec.kernel.partition(":")
    return getattr(importlib.import_module(f"h3compile.ops.kernels.{module}"), name)


def compile_spec(spec: Spec, arch: str) -> Cubin:
    """Compile ``spec`` for ``arch``; raises `BuildError` when Triton cannot."""
    function = function_of(spec)
    types, constants = dict(spec.types), dict(spec.constants)
    names = function.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): _ALIGNED for name, kind in types.items() if kind.startswith("*")}
    if spec.gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        Source = ASTSource
    options = {"num_warps": spec.warps, "num_stages": spec.stages, "maxnreg": spec.registers}
    try:
        compiled = triton.compile(
            Source(function, signature, constants, attributes),
            target=GPUTarget("cuda", ARCHES[arch], 32),
            options={name: value for name, value in options.items() if value is not None},
        )
    except Exception as error:  # Triton raises what its passes raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise BuildError(
            f"Triton {triton.__version__} cannot compile {spec.kernel} for {arch} ({reason})",
            "choose another provider, or another Triton",
        ) from error
    metadata = compiled.metadata
    return Cubin(
        code=compiled.asm["cubin"],
        entry=metadata.name,
        warps=metadata.num_warps,
        shared=metadata.shared,
        scratch=metadata.global_scratch_size,
        scratch_alignment=metadata.global_scratch_align,
        scratch_arguments=sum(hasattr(metadata, name) for name in _SCRATCH),
    )


def usage(code: bytes) -> Usage:
    """Registers and stack of the one kernel in a cubin, read with the cuobjdump that Triton carries."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(code)
        done = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    assert found is not None, done.stdout
    return Usage(int(found[1]), int(found[2]))
