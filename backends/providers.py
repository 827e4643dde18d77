"""The providers a user may name, by operator."""

from __future__ import annotations

from collections.abc import Mapping

from h3compile.errors import BuildError, nearest
from h3compile.ops import OPERATORS

__all__ = ["check_providers"]


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
