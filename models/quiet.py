"""Keeps the model libraries' bars and notices off the terminal, where this project reports its own."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import diffusers.utils.logging as diffusers_logging
import transformers.utils.logging as transformers_logging

__all__ = ["quiet_libraries"]


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence Diffusers and Transformers, restoring their settings at the end.

    Also drops the notice that Diffusers' audio VAE uses the older of torch's two weight norms, about which a
    user can do nothing. The settings are those of the process: not for two threads at once.
    """
    libraries: tuple[Any, ...] = (diffusers_logging, transformers_logging)
    levels = [library.get_verbosity() for library in libraries]
    bars = [library.is_progress_bar_enabled() for library in libraries]
    try:
        for library in libraries:
            # Diffusers logs an error for every exception that passes, also for one that asks it to stop.
            library.set_verbosity(logging.CRITICAL)
            library.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*weight_norm.*deprecated", category=FutureWarning)
            yield
    finally:
        for library, level, bar in zip(libraries, levels, bars, strict=True):
            library.set_verbosity(level)
            if bar:
                library.enable_progress_bar()
