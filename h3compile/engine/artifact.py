"""`region.json`: the record of a compiled region, written by a backend and read by the runtime.

An artifact is a folder with this record, `region.py` and one binary a kernel; see
h3compile.runtime.artifact for what becomes of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from h3compile.errors import EngineError

__all__ = [
    "ALIGNMENT",
    "FORMAT",
    "INFO_FILE",
    "OWN_OPERATORS",
    "SOURCE_FILE",
    "ArtifactInfo",
    "CubinInfo",
    "InputInfo",
    "LengthInfo",
    "LibraryInfo",
    "OperatorInfo",
    "VariantInfo",
    "operator_global",
    "read_info",
]

FORMAT = 1
INFO_FILE = "region.json"
SOURCE_FILE = "region.py"
# Bytes. Vectorized GPU code reads 16 at a time; Inductor assumes every input starts on such a boundary.
ALIGNMENT = 16
# How a launch sequence calls the reference of an operator of ours; the start of the name.
OWN_OPERATORS = "torch.ops.h3compile."


def operator_global(operator: str) -> str:
    """The global of a launch sequence that stands for our operator ``attention.default``."""
    return "h3compile_" + operator.replace(".", "_")


class _Info(BaseModel):
    # A field this version does not know means a newer writer: refuse it rather than ignore it.
    model_config = ConfigDict(extra="forbid", frozen=True)


class LibraryInfo(_Info):
    """A CPU kernel: an extension module in a shared library.

    ``file`` carries a digest of its content: a process that has mapped a library gets the same one for
    the same path, whatever the path holds by then.
    """

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


class VariantInfo(_Info):
    """A compiled variant of one of our Triton functions; the fields of `h3compile.ops.launch.Binary`.

    ``registers`` a thread and bytes of ``stack`` (spilled registers) are what ptxas gave it.
    """

    file: str
    kernel: str
    entry: str
    warps: int
    shared: int
    scratch: int
    scratch_alignment: int
    scratch_arguments: int
    registers: int
    stack: int


class OperatorInfo(_Info):
    """Who computes an operator of ours for one static shape (``variant``, empty where there is only one).

    ``ms`` has the measured time of every legal provider, or nothing where only one was. ``package`` is what
    of others the provider calls, with the version that the build had: ``flashinfer-python==0.7.4``.
    """

    name: str
    variant: str
    provider: str
    ms: dict[str, float | None]
    package: str = ""


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

    ``kernels`` are Inductor's, by the names of the launch sequence; ``variants`` are those of our own
    operators, by `Spec.key`.

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
    operators: tuple[OperatorInfo, ...] = ()
    variants: dict[str, VariantInfo] = {}


def read_info(path: Path) -> ArtifactInfo:
    """The record of the artifact in folder ``path``; `EngineError` when it is missing or unreadable."""
    file = path / INFO_FILE
    try:
        return ArtifactInfo.model_validate_json(file.read_bytes())
    except OSError as error:
        raise EngineError(f"no compiled region at {path}", "build the engine again") from error
    except ValidationError as error:
        raise EngineError(f"{file} is not a record this version reads", "build the engine again") from error
