"""The providers a user may name, by operator, and whether they can serve a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from h3compile.backends.operators import check_named
from h3compile.errors import BuildError, nearest
from h3compile.ops import OPERATORS
from h3compile.program.facts import Dim
from h3compile.program.propagate import propagate
from h3compile.program.region import Region

__all__ = ["check_legal", "check_providers"]


def check_providers(named: Mapping[str, str]) -> None:
    """Raise `BuildError` unless ``named`` maps operators to providers they have."""
    known: dict[str, set[str]] = {}
    for operator in OPERATORS:
        base = operator.name.partition(".")[0]
        known.setdefault(base, set()).update(provider.name for provider in operator.providers)
    for name, provider in named.items():
        if name not in known:
            raise BuildError(f"no operator is called {name!r}", nearest(name, known))
        if provider not in known[name]:
            raise BuildError(
                f"{name} has no provider {provider!r}", f"it has {', '.join(sorted(known[name]))}"
            )


def check_legal(regions: Sequence[Region], dims: Sequence[Dim], arch: str, named: Mapping[str, str]) -> None:
    """Raise `BuildError` unless every provider of ``named`` computes something in ``regions``, legally.

    Nothing is compiled and no device is needed: what cannot be finalized on a machine with ``arch`` is
    said where it is built.
    """
    used: set[str] = set()
    for region in regions if named else ():
        used |= check_named(propagate(region, dims, "cpu").module(), arch, named)
    for operator in named:
        if operator not in used:
            raise BuildError(
                f"provider {named[operator]!r} of {operator} has nothing to compute: the program has none",
                f"leave out --provider {operator}={named[operator]}, or add the pass that makes it",
            )
