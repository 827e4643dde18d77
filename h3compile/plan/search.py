"""The search among candidates: the fastest that fits, the smallest that is fast enough, and the frontier.

Every candidate has its memory in closed form, and a bound: what its busiest stream has to do in a step, which
no schedule beats. Only those that their bound does not rule out are simulated, so what is found is what
simulating all of them would find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from h3compile.plan.residency import Residency

__all__ = ["EQUAL", "TOLERANCE", "Candidate", "fastest", "frontier", "smallest"]

# A plan must be faster by this share to be worth more memory on a frontier: predictions are not better.
TOLERANCE = 5e-3

# Steps that differ by less are equally long.
EQUAL = 1e-4

# Sums in another order differ by this much.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Candidate:
    """One plan that might be.

    ``device`` are bytes on each device and ``host`` those of the machine's memory. A step takes at least
    ``bound`` seconds; ``simulate`` says how many it does take.
    """

    residency: Residency
    device: int
    host: int
    bound: float
    simulate: Callable[[], float]

    @cached_property
    def step(self) -> float:
        """Seconds of a step, simulated when first asked for."""
        return self.simulate()

    def within(self, seconds: float) -> bool:
        """Whether a step takes no longer; simulated only where the bound leaves that open."""
        return self.bound <= seconds * (1 + _ROUNDING) and self.step <= seconds * (1 + _ROUNDING)


def fastest(candidates: Iterable[Candidate]) -> Candidate | None:
    """The one with the shortest step; None where there are none.

    Of equally long ones, the one that streams nothing, and else the one that takes the least of the device:
    a plan filled to the brim for no gain in speed is the first to run out of memory.
    """
    ordered = sorted(candidates, key=lambda one: one.bound)
    best: Candidate | None = None
    for candidate in ordered:
        if best is not None and candidate.bound >= best.step * (1 - _ROUNDING):
            break
        if best is None or candidate.step < best.step:
            best = candidate
    if best is None:
        return None
    limit = best.step * (1 + EQUAL)
    preferred = sorted(ordered, key=lambda one: (bool(one.residency.streamed), one.device, one.host))
    return next(candidate for candidate in preferred if candidate.within(limit))


def smallest(candidates: Iterable[Candidate], seconds: float) -> Candidate | None:
    """The one that takes the least of the device, with a step within ``seconds``; None without one."""
    ordered = sorted(candidates, key=lambda one: (one.device, one.bound))
    return next((candidate for candidate in ordered if candidate.within(seconds)), None)


def frontier(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that nothing of their size or below beats, by size: each is faster than all before it."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda one: (one.device, one.bound)):
        limit = found[-1].step * (1 - TOLERANCE) if found else float("inf")
        if not candidate.within(limit):
            continue
        if found and found[-1].device == candidate.device:
            found.pop()
        found.append(candidate)
    return found
