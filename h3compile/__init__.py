"""h3compile: an ahead-of-time compiler for the MiniMax-H3 diffusion transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from h3compile.driver import build
    from h3compile.runtime.load import load

__all__ = ["__version__", "build", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Lazily, so that a server which only loads engines never imports the compiler.
    if name == "build":
        from h3compile.driver import build

        return build
    if name == "load":
        from h3compile.runtime.load import load

        return load
    raise AttributeError(f"module 'h3compile' has no attribute {name!r}")
