"""Conditions of a step, and which variants of regions they call for.

A module of its own, because a runner needs it and must not import what a compiler needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Condition", "Noisier", "Shorter", "Variant", "choose", "largest_sigma"]


@dataclass(frozen=True)
class Shorter:
    """The sequence has fewer than ``than`` of the free length ``dim``."""

    dim: str
    than: int

    def holds(self, lengths: Mapping[str, int], sigma: float) -> bool:
        """Whether it does in a step of these lengths."""
        return lengths[self.dim] < self.than

    def __str__(self) -> str:
        return f"{self.dim} < {self.than}"


@dataclass(frozen=True)
class Noisier:
    """The largest sigma of the step is above ``than``; the sigma of a row is 1 - its timestep.

    At every step the rows of video are the noisiest (shift 12 against 3 for audio), and rows that only
    condition have a timestep of 0.999 or 1, so this is the video's sigma. With shifts the other way round
    it is the audio's: no kind of row is noisier than what the condition sees.
    """

    than: float

    def holds(self, lengths: Mapping[str, int], sigma: float) -> bool:
        """Whether it is in a step whose largest sigma is ``sigma``."""
        return sigma > self.than

    def __str__(self) -> str:
        return f"sigma > {self.than}"


Condition = Shorter | Noisier


@dataclass(frozen=True)
class Variant:
    """Another region for the calls of one, in the steps where ``when`` holds."""

    region: str
    when: Condition


def largest_sigma(timesteps: Iterable[float]) -> float:
    """The largest sigma of a step with these timesteps, at least one."""
    return 1.0 - min(timesteps)


def choose(
    variants: Mapping[str, Sequence[Variant]], lengths: Mapping[str, int], sigma: float
) -> dict[str, str]:
    """What stands in for regions in one step: region -> the first of its variants whose condition holds.

    ``lengths`` are the free lengths by name, ``sigma`` the largest of the step. A region that serves its
    calls itself is not in the result.
    """
    chosen: dict[str, str] = {}
    for region, candidates in variants.items():
        for candidate in candidates:
            if candidate.when.holds(lengths, sigma):
                chosen[region] = candidate.region
                break
    return chosen
