"""Silencing one of PyTorch's loggers where what it says is told better by an error of ours."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["silenced"]


@contextmanager
def silenced(name: str) -> Iterator[None]:
    """Nothing from the logger ``name`` until the end of the ``with`` block."""
    logger = logging.getLogger(name)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
