"""The processes of the other ranks: one that has ended is known at once, where it runs beside us."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["Peers", "identity"]


def identity() -> str:
    """What another process needs to find this one: its number, and where that means something."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        numbers = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        kernel = numbers = ""
    return json.dumps([kernel, numbers, os.getpid()])


class Peers:
    """Rank by rank the processes of these ``identities``, of which ``own`` is this one.

    A process elsewhere, or in a container of its own, cannot be seen: it never counts as ended.
    """

    def __init__(self, identities: Sequence[str], own: int) -> None:
        kernel, numbers, _ = json.loads(identities[own])
        self._descriptors: dict[int, int] = {}  # process descriptor -> rank
        self._ended: set[int] = set()
        self._poll = select.poll()
        for rank, text in enumerate(identities):
            where = json.loads(text)
            if rank == own or not kernel or where[:2] != [kernel, numbers]:
                continue
            try:
                descriptor = os.pidfd_open(where[2])
            except ProcessLookupError:
                self._ended.add(rank)
            except OSError:  # a kernel or a sandbox that does not have it
                continue
            else:
                self._descriptors[descriptor] = rank
                self._poll.register(descriptor, select.POLLIN)

    def ended(self) -> tuple[int, ...]:
        """The ranks whose process is known to have ended, in order. Never waits."""
        self._ended.update(self._descriptors[descriptor] for descriptor, _ in self._poll.poll(0))
        return tuple(sorted(self._ended))

    def close(self) -> None:
        """Gives the descriptors back."""
        for descriptor in self._descriptors:
            self._poll.unregister(descriptor)
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()
