"""Backends by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from h3compile.backends.base import Backend
from h3compile.errors import BuildError, nearest
from h3compile.program.facts import Dim
from h3compile.program.logs import silenced
from h3compile.program.propagate import propagate
from h3compile.program.region import Region

if TYPE_CHECKING:
    from h3compile.backends.operators import Times

__all__ = ["BACKENDS", "select"]

BACKENDS = ("eager", "inductor")


class _Eager:
    """Interprets the graphs operator by operator: the referee, and nothing to lower."""

    name = "eager"
    lowers = False

    def lower(
        self,
        region: Region,
        dims: Sequence[Dim],
        device: str,
        output: Path,
        providers: Mapping[str, str],
    ) -> None:
        raise BuildError("the eager backend lowers nothing")


class _Inductor:
    """Compiles a region with Inductor, see `h3compile.backends.inductor`."""

    name = "inductor"
    lowers = True

    def __init__(self) -> None:
        self._times: Times = {}

    def lower(
        self,
        region: Region,
        dims: Sequence[Dim],
        device: str,
        output: Path,
        providers: Mapping[str, str],
    ) -> None:
        # Here and not above: importing Inductor takes seconds that other commands should not pay.
        from h3compile.backends.inductor import compile_region

        module = propagate(region, dims, device).module()
        largest = {dim.name: dim.largest for dim in dims}
        # It warns of a CUDA toolkit without a GPU: what a machine that only builds looks like.
        with silenced("torch.utils.cpp_extension"):
            compile_region(
                module,
                device=device,
                output=output,
                largest=largest,
                providers=providers,
                times=self._times,
            )


def select(name: str) -> Backend:
    """The backend called ``name``; `BuildError` with the nearest name when there is none."""
    match name:
        case "eager":
            return _Eager()
        case "inductor":
            return _Inductor()
    raise BuildError(f"unknown backend {name!r}", nearest(name, BACKENDS))
