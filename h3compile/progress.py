"""How long work reports itself: phases with a number of steps, and notes."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Progress", "Silent"]


class Progress(Protocol):
    """What long work tells its caller; the work never knows whether anyone draws it."""

    def phase(self, name: str, total: int | None) -> None:
        """A new phase begins, of ``total`` steps where that is known; it ends the phase before it."""
        ...

    def advance(self, count: int = 1) -> None:
        """``count`` more steps of the current phase are done."""
        ...

    def note(self, text: str) -> None:
        """Something the user should read, whatever the phase; one line."""
        ...


class Silent:
    """A `Progress` that tells nobody."""

    def phase(self, name: str, total: int | None) -> None: ...

    def advance(self, count: int = 1) -> None: ...

    def note(self, text: str) -> None: ...
