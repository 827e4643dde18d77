"""Ctrl-C that lets a step finish."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["stop_between_steps", "terminate_like_interrupt"]


@contextmanager
def stop_between_steps(said: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Within the block, the first Ctrl-C only makes the yielded function answer True.

    The second one interrupts at once. ``said`` is told what the first has done. Signals go to the main
    thread, so the block must run there.
    """
    asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        said("stopping after this step; Ctrl-C again stops at once")

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def terminate_like_interrupt() -> None:
    """Make SIGTERM, which `docker stop` and job schedulers send, clean up as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
