"""h3compile: an ahead-of-time compiler for the MiniMax-H3 diffusion transformer."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from h3compile.build import build
    from h3compile.runtime.load import load

__all__ = ["__version__", "build", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Lazily, so that a server which only loads engines never imports the compiler.
    if name == "build":
        from h3compile.build import build

        return build
    if name == "load":
        from h3compile.runtime.load import load

        return load
    raise AttributeError(f"module 'h3compile' has no attribute {name!r}")


class _Package(ModuleType):
    """Keeps ``h3compile.build`` the function: Python would put the submodule of that name in its place."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name == "build" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
