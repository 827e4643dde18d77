"""Stages: what a value of the program depends on, and so how often it must be computed."""

from __future__ import annotations

import enum
from collections.abc import Iterable

__all__ = ["Stage", "join"]


class Stage(enum.Enum):
    """What a value depends on; the order of definition is the order of execution."""

    BUILD = "build"  # weights and constants only
    SCHEDULE = "schedule"  # and the timestep
    REQUEST = "request"  # and text, row indices, positions
    STEP = "step"  # and the latents, or schedule and request together

    @property
    def rank(self) -> int:
        """Position in the order of execution: build 0, schedule 1, request 2, step 3."""
        return _ORDER.index(self)

    def __or__(self, other: Stage) -> Stage:
        """The stage of a value that depends on both.

        Schedule and request are incomparable: what needs both is only known in the step.
        """
        if self is other or other is Stage.BUILD:
            return self
        if self is Stage.BUILD:
            return other
        return Stage.STEP


_ORDER = tuple(Stage)


def join(stages: Iterable[Stage]) -> Stage:
    """The stage of a value computed from values of these stages; of nothing, it is ``BUILD``."""
    result = Stage.BUILD
    for stage in stages:
        result = result | stage
    return result
