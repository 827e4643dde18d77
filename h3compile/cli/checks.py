"""What `doctor` looks at, one function a finding."""

from __future__ import annotations

import enum
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from h3compile.errors import H3CompileError
from h3compile.quality.units import size

__all__ = ["Finding", "Status", "all_checks"]

_GIB = 2**30
# Building takes at most three blocks of the release besides the interpreter and the tracer.
_BUILD_MEMORY = 6 * _GIB
# The release's two partitions copied into one engine.
_ENGINE_DISK = 140 * _GIB


class Status(enum.StrEnum):
    """How a finding stands."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor; ``mend`` is empty where nothing is wrong."""

    name: str
    status: Status
    detail: str
    mend: str = ""


def all_checks() -> list[Finding]:
    """Every finding, those that the others rest on first."""
    findings = [_python(), *_libraries()]
    # Without torch the rest can only repeat that torch is missing.
    if all(finding.status is not Status.FAIL for finding in findings):
        findings += _gpu()
    return [*findings, _compiler(), _memory(), _disk(), _model()]


def _python() -> Finding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    wanted = importlib.metadata.metadata("h3compile")["Requires-Python"]
    if Requirement(f"python{wanted}").specifier.contains(version):
        return Finding("python", Status.OK, version)
    return Finding(
        "python", Status.FAIL, f"{version}, and {wanted} is needed", "make a venv with a newer Python"
    )


def _libraries() -> Iterator[Finding]:
    """The declared dependencies: those of the core must be there, those of models may be missing."""
    for text in importlib.metadata.requires("h3compile") or []:
        requirement = Requirement(text)
        core = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        model = requirement.marker is not None and requirement.marker.evaluate({"extra": "model"})
        if core or model:
            yield _library(requirement, core)


def _library(requirement: Requirement, core: bool) -> Finding:
    bad = Status.FAIL if core else Status.WARN
    mend = f"pip install '{requirement.name}{requirement.specifier}'"
    if not core:
        mend = "pip install 'h3compile[model]', to build and to generate; loading engines does without"
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(requirement.name, bad, "not installed", mend)
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding(requirement.name, bad, f"{version}, and {requirement.specifier} is needed", mend)
    return Finding(requirement.name, Status.OK, version)


def _gpu() -> Iterator[Finding]:
    import torch

    from h3compile.targets.detect import current_device, detect

    device = current_device()
    if device is None:
        if shutil.which("nvidia-smi"):
            mend = "install a CUDA build of torch that the driver supports"
            yield Finding("gpu", Status.WARN, "there is a driver, but torch sees no CUDA device", mend)
        else:
            yield Finding(
                "gpu", Status.OK, "none: engines for a GPU are finished there with h3compile finalize"
            )
        return
    what = f"{device.name}, {size(device.memory)}, CUDA {torch.version.cuda}"
    try:
        yield Finding("gpu", Status.OK, f"{what}: target {detect().name}")
    except H3CompileError as error:
        yield Finding("gpu", Status.WARN, f"{what}: no known target", error.mend)
    try:
        yield Finding("triton", Status.OK, importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "triton", Status.FAIL, "not installed, and kernels for the GPU need it", "pip install triton"
        )


def _compiler() -> Finding:
    """Building for the CPU compiles C++ with OpenMP against Python's headers; loading does not."""
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    mend = "install one, for example apt install g++ python3-dev, or set CXX"
    if shutil.which(command[0]) is None:
        return Finding("compiler", Status.WARN, f"no C++ compiler {command[0]}: no build for the CPU", mend)
    source = "#include <omp.h>\n#include <Python.h>\n#include <vector>\nint main() { return 0; }\n"
    flags = ["-fopenmp", "-fsyntax-only", "-x", "c++", "-I", sysconfig.get_path("include"), "-"]
    try:
        done = subprocess.run(
            [*command, *flags], input=source, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("compiler", Status.WARN, f"{command[0]} does not run ({error})", mend)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), "it failed").strip()
        return Finding("compiler", Status.WARN, f"{command[0]} cannot compile for Python: {reason}", mend)
    return Finding("compiler", Status.OK, shutil.which(command[0]) or command[0])


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    if free < _BUILD_MEMORY:
        mend = f"free some: a build of the released model takes up to {size(_BUILD_MEMORY)}"
        return Finding("memory", Status.WARN, f"{size(free)} free", mend)
    return Finding("memory", Status.OK, f"{size(free)} free")


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    if free < _ENGINE_DISK:
        mend = f"the released model copied takes up to {size(_ENGINE_DISK)}; --link copies far less"
        return Finding("disk", Status.WARN, f"{size(free)} free here", mend)
    return Finding("disk", Status.OK, f"{size(free)} free here")


def _model() -> Finding:
    try:
        from h3compile.models.checkpoint import RELEASE, find_checkpoint
    except ImportError as error:
        return Finding(
            "model", Status.WARN, f"cannot look for it ({error})", "pip install 'h3compile[model]'"
        )
    try:
        folder = find_checkpoint(RELEASE)
    except H3CompileError as error:
        return Finding("model", Status.WARN, error.cause, error.mend)
    return Finding("model", Status.OK, f"{', '.join(folder.partitions)} in {folder.root}")
