"""How long work takes on a device that is kept busy with it."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["Work", "median_seconds"]

# Enqueues the work, or does it where nothing is enqueued (the CPU).
Work = Callable[[], object]

_FEWEST = 3


def median_seconds(work: Work, device: torch.device, seconds: float, wait: Work | None = None) -> float:
    """Median seconds of ``work``, over about ``seconds`` of it back to back, and three times at least.

    It is done once before, so that nothing is compiled or allocated while the clock runs. A card at its
    power limit lowers its clocks after a while, so only the second half counts. ``wait`` ends what ``work``
    enqueues on other devices than ``device``; the time between two of its returns counts then.
    """
    work()
    if device.type == "cuda" and wait is None:
        return _by_events(work, device, seconds)
    samples: list[float] = []
    begun = time.perf_counter()
    while len(samples) < _FEWEST or time.perf_counter() - begun < seconds:
        (wait or _nothing)()
        start = time.perf_counter()
        work()
        (wait or _nothing)()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[len(samples) // 2 :])


def _nothing() -> None: ...


def _by_events(work: Work, device: torch.device, seconds: float) -> float:
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        once = max(time.perf_counter() - start, 1e-6)
        # At most so many events: what is short is launched faster than it can be told apart.
        count = min(max(2 * _FEWEST, math.ceil(seconds / once)), 10_000)
        events: list[torch.cuda.Event] = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(count + 1)
        ]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        events[-1].synchronize()
    samples: list[float] = [one.elapsed_time(other) / 1000 for one, other in itertools.pairwise(events)]
    return statistics.median(samples[count // 2 :])
