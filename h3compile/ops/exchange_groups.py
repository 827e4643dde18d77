"""The ranks that exchange rows and heads: process groups by name, and the bytes sent to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch.distributed as dist

from h3compile.errors import H3CompileError

__all__ = [
    "ALL",
    "RING",
    "ULYSSES",
    "Traffic",
    "counting",
    "find_group",
    "group_of",
    "name_group",
    "others",
    "sent",
    "standing_in",
]

# Names in torch's registry of process groups; whoever starts the ranks gives them, see `name_group`.
ULYSSES = "h3compile.ulysses"  # ranks that share the heads of one stretch of rows
RING = "h3compile.ring"  # ranks with the same heads, and the keys of different stretches
ALL = "h3compile.ranks"  # every rank of one sequence


@dataclass
class Traffic:
    """Bytes that this rank has sent to others, by operator."""

    sent: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Bytes of all operators."""
        return self.sent.total()


_COUNTING: ContextVar[Traffic | None] = ContextVar("h3compile_traffic", default=None)


@contextmanager
def counting(traffic: Traffic) -> Iterator[Traffic]:
    """Have the exchanges of this thread add to ``traffic`` what they send."""
    token = _COUNTING.set(traffic)
    try:
        yield traffic
    finally:
        _COUNTING.reset(token)


def sent(operator: str, nbytes: int) -> None:
    """``operator`` has sent ``nbytes`` to other ranks."""
    traffic = _COUNTING.get()
    if traffic is not None:
        traffic.sent[operator] += nbytes


# Whether this thread's rank stands for all of them.
_ALONE: ContextVar[bool] = ContextVar("h3compile_alone", default=False)


@contextmanager
def standing_in() -> Iterator[None]:
    """Have the exchanges of this thread take this rank's own part for that of every other, and send nothing.

    For a build, which runs what one rank computes to see how long it takes, and has no other ranks.
    """
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def others(name: str, ranks: int) -> dist.ProcessGroup | None:
    """The group to exchange with, called ``name``; None where this rank is alone, or stands for all.

    Raises as `group_of`.
    """
    return None if ranks == 1 or _ALONE.get() else group_of(name, ranks)


def name_group(name: str, group: dist.ProcessGroup) -> None:
    """Let exchanges find ``group`` under ``name`` in this process, in the place of one named so before.

    Ranks in ``group`` are numbered in the order of the rows that they hold. The name ends with
    `torch.distributed.destroy_process_group`, which forgets all names.
    """
    from torch._C import _distributed_c10d as registry

    if find_group(name) is not None:
        registry._unregister_process_group(name)  # type: ignore[arg-type]  # a str
    registry._register_process_group(name, group)  # type: ignore[arg-type]


def group_of(name: str, ranks: int) -> dist.ProcessGroup:
    """The group called ``name``. Raises `H3CompileError` when it is not there, or has not ``ranks`` ranks."""
    group = find_group(name)
    if group is None:
        raise H3CompileError(
            f"the program exchanges rows between {ranks} ranks, and this process has no others",
            f"start it on {ranks} ranks, with torchrun --nproc-per-node {ranks}",
        )
    if group.size() != ranks:
        raise H3CompileError(
            f"the program exchanges rows between {ranks} ranks, and {name} has {group.size()}",
            f"start it on {ranks} ranks, or build it for {group.size()}",
        )
    return group


def find_group(name: str) -> dist.ProcessGroup | None:
    """The group called ``name``; None where there is none."""
    if not dist.is_available():
        return None
    # Here and not above: a torch that was built without it can run programs of one rank.
    from torch._C import _distributed_c10d as registry

    try:
        return registry._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:  # torch's word for a name that is not registered
        return None
