"""Packages of others that providers call: whether they are here, and what of them is known to fit."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from packaging.version import InvalidVersion, Version
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["Package", "installed", "on_device_of", "without_data"]


def installed(name: str) -> Version | None:
    """The version of the distribution ``name`` in this environment; nothing is imported."""
    try:
        return Version(version(name))
    except (PackageNotFoundError, InvalidVersion):
        return None


@dataclass(frozen=True)
class Package:
    """A distribution, and the versions whose interface a provider calls: ``least`` to below ``below``."""

    name: str
    least: str
    below: str

    @property
    def pinned(self) -> str:
        """The installed version as pip spells it, ``flashinfer-python==0.7.4``; without one the name."""
        found = installed(self.name)
        return self.name if found is None else f"{self.name}=={found}"

    def unusable(self) -> str | None:
        """Why it cannot be called here, or None."""
        found = installed(self.name)
        if found is None:
            return f"{self.name} is not installed"
        if not Version(self.least) <= found < Version(self.below):
            return f"{self.name} is {found}, and versions from {self.least} to below {self.below} are known"
        return None


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Within it the device of ``tensor`` is the current one, for libraries that ask which that is."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def without_data(tensor: torch.Tensor) -> bool:
    """Whether there is nothing to compute: a build notes what would be launched on ``tensor``."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta
