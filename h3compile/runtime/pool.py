"""What loaded engines share in one process: equal weight ranges and equal executors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

__all__ = ["Pool"]

T = TypeVar("T")


class Pool:
    """Objects by what they are made of, each alive as long as somebody uses it.

    Pass one pool to several loads and what is equal is held once. The pool itself keeps nothing alive.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._shared: WeakValueDictionary[tuple[str, ...], object] = WeakValueDictionary()

    def share(self, key: tuple[str, ...], kind: type[T], make: Callable[[], T]) -> T:
        """The object under ``key``, made by ``make`` when nobody holds one.

        Two threads that ask for one key get one object. Raises `TypeError` when the key is that of an
        object of another ``kind``.
        """
        with self._lock:
            found = self._shared.get(key)
            if found is None:
                found = make()
                self._shared[key] = found
            if not isinstance(found, kind):
                raise TypeError(f"{key} is a {type(found).__name__}, not a {kind.__name__}")
            return found

    def holds(self, key: tuple[str, ...]) -> bool:
        """Whether somebody uses the object under ``key`` now."""
        return key in self._shared
