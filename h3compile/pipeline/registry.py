"""The registry: passes by name, loaded when first asked for, each name once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points

from h3compile.errors import BuildError, nearest
from h3compile.pipeline.base import Pass, Tier

__all__ = ["ENTRY_POINT", "Registry", "of"]

# A plugin names its pass class under this group in its own pyproject.toml.
ENTRY_POINT = "h3compile.passes"


class Registry:
    """Pass names and how to get their classes; nothing is imported before it is needed."""

    def __init__(self) -> None:
        self._loaders: dict[str, Callable[[], object]] = {}
        self._origins: dict[str, str] = {}

    @classmethod
    def default(cls) -> Registry:
        """Every installed pass, ours and plugins' alike, as entry points of ``h3compile.passes``."""
        registry = cls()
        for point in entry_points(group=ENTRY_POINT):
            registry.add(point.name, point.load, point.value)
        return registry

    def add(self, name: str, loader: Callable[[], object], origin: str) -> None:
        """Register ``name``; `BuildError` when another pass has it already."""
        if name in self._loaders:
            raise BuildError(
                f"two passes are called {name!r} ({self._origins[name]} and {origin})",
                "uninstall one of them",
            )
        self._loaders[name] = loader
        self._origins[name] = origin

    def names(self) -> list[str]:
        """Every registered name, sorted."""
        return sorted(self._loaders)

    def get(self, name: str) -> type[Pass]:
        """The class of the pass called ``name``.

        Raises `BuildError`, with the nearest name, when there is none, and when what is installed under
        the name cannot be imported or is no pass of that name.
        """
        if name not in self._loaders:
            raise BuildError(f"unknown pass {name!r}", nearest(name, self._loaders))
        origin = self._origins[name]
        try:
            found = self._loaders[name]()
        except (ImportError, AttributeError) as error:
            raise BuildError(
                f"pass {name!r} ({origin}) cannot be imported ({error})",
                "install its package again, or remove it",
            ) from error
        if not (isinstance(found, type) and issubclass(found, Pass) and getattr(found, "name", None) == name):
            raise BuildError(f"{origin} is not a pass called {name!r}", "name the entry point like the pass")
        if not isinstance(getattr(found, "tier", None), Tier) or "__dataclass_params__" not in vars(found):
            raise BuildError(
                f"pass {name!r} ({origin}) is incomplete", "make it a frozen dataclass with a tier"
            )
        return found

    def defaults(self) -> list[str]:
        """The passes of every build that does not take them out."""
        return [name for name in self.names() if self.get(name).default]


def of(classes: Mapping[str, type[Pass]]) -> Registry:
    """A registry of just these classes, where nothing is installed: a script's, or a test's."""
    registry = Registry()
    for name, found in classes.items():
        registry.add(name, _Loaded(found), found.__module__)
    return registry


@dataclasses.dataclass(frozen=True)
class _Loaded:
    found: type[Pass]

    def __call__(self) -> type[Pass]:
        return self.found
