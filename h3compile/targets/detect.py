"""Which target this machine is."""

from __future__ import annotations

from dataclasses import dataclass

from h3compile.errors import H3CompileError
from h3compile.targets.file import is_target_file, read_target
from h3compile.targets.known import find_target, targets
from h3compile.targets.target import Target

__all__ = ["CudaDevice", "current_device", "detect", "matches", "present", "resolve_target"]


@dataclass(frozen=True)
class CudaDevice:
    """A CUDA device as the driver describes it; ``memory`` in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int


def current_device() -> CudaDevice | None:
    """The current CUDA device, on which a build lowers and a runner computes; None without one."""
    # Here and not above: listing targets must not take the seconds that importing torch takes.
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return CudaDevice(properties.name, (properties.major, properties.minor), properties.total_memory)


def detect() -> Target:
    """The target of this machine: its current CUDA device, or the CPU where there is none.

    `H3CompileError` when the CUDA device has no entry; it names the targets with the same architecture.
    """
    device = current_device()
    if device is None:
        return find_target("cpu")
    for target in targets().values():
        if target.names(device.name):
            return target
    alike = [target.name for target in targets().values() if target.capability == device.capability]
    major, minor = device.capability
    mend = f"name one of the same architecture with --target: {', '.join(alike)}"
    if not alike:
        mend = f"no known target has its architecture, sm_{major}{minor}; --target cpu builds for the CPU"
    raise H3CompileError(f"the CUDA device {device.name!r} is no known target", mend)


def resolve_target(name: str) -> Target:
    """The target called ``name``, or in the file of that name; ``auto`` is this machine's.

    `H3CompileError` where there is none, and where `read_target` refuses the file.
    """
    if name.lower() == "auto":
        return detect()
    if name.lower() not in targets() and is_target_file(name):
        return read_target(name)
    return find_target(name)


def matches(target: Target, device: CudaDevice | None) -> bool:
    """Whether ``device`` is ``target``; a device that no entry names is any target of its architecture."""
    if target.kind == "cpu":
        return True
    if device is None or target.capability != device.capability:
        return False
    return target.names(device.name) or not any(known.names(device.name) for known in targets().values())


def present(target: Target) -> bool:
    """Whether ``target`` is in this machine, so that a build for it can be finished here."""
    return target.kind == "cpu" or matches(target, current_device())
