"""Request-stage values, recomputed only when an input that they depend on changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing

import torch

from h3compile.runtime.memory import nbytes
from h3compile.runtime.runner import BoundCall, Check, Feed, bound
from h3compile.runtime.stats import Stats

__all__ = ["RequestMemo"]


class RequestMemo:
    """The last request's values. ``calls`` are all request-stage calls, ``kept`` what steps read of them.

    Dependence is followed call by call: another prompt recomputes the refined text and leaves the rotary
    tables. Values between two calls are not kept.
    """

    def __init__(
        self, calls: Sequence[BoundCall], kept: Collection[str], stats: Stats, feed: Feed = bound
    ) -> None:
        self._calls = tuple(calls)
        self._kept = frozenset(kept)
        self._stats = stats
        self._feed = feed
        self._values: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the kept values."""
        return nbytes(*self._values.values())

    @property
    def missing(self) -> tuple[str, ...]:
        """The values that the next forward computes, sorted."""
        return tuple(sorted(self._kept - self._values.keys()))

    def invalidate(self, changed: Collection[str]) -> None:
        """Drops every value that depends on a ``changed`` input."""
        stale = set(changed)
        for call in self._calls:
            if not stale.isdisjoint(call.inputs):
                stale.update(call.outputs)
        for name in stale & self._values.keys():
            del self._values[name]

    def values(self, inputs: Mapping[str, torch.Tensor], check: Check) -> Mapping[str, torch.Tensor]:
        """The kept values, after running the calls whose outputs are missing.

        A failure or a stop in between leaves what is complete: the next call goes on from there.
        """
        missing = self._kept - self._values.keys()
        if not self._kept:
            return {}
        if not missing:
            self._stats.request_hits += 1
            return dict(self._values)
        self._stats.request_misses += 1
        available = {**inputs, **self._values}
        with closing(self._feed(self._needed(missing), check)) as feed:
            for call, weights in feed:
                check()
                outputs = dict(call.run([available[name] for name in call.inputs], weights))
                available.update(outputs)
                self._values.update((name, outputs[name]) for name in call.outputs if name in self._kept)
        return dict(self._values)

    def release(self) -> None:
        """Frees all values."""
        self._values.clear()

    def _needed(self, missing: Collection[str]) -> list[BoundCall]:
        """The calls that lead to ``missing``, in order."""
        wanted = set(missing)
        needed: list[BoundCall] = []
        for call in reversed(self._calls):
            if not wanted.isdisjoint(call.outputs):
                needed.append(call)
                wanted.update(name for name in call.inputs if name not in self._values)
        return needed[::-1]
