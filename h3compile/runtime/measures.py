"""What the steps of a request leave for reports: small counts, kept on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from h3compile.runtime.memory import nbytes

__all__ = ["MeasuredStep", "Measures", "Record"]

# Takes a measured value by its name, when the call that makes it has been enqueued.
Record = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True)
class MeasuredStep:
    """What one step of a request left."""

    sigma: float  # the largest of the step
    variants: Mapping[str, str]  # region -> the variant that stood in for it
    values: Mapping[str, torch.Tensor]  # by name, int32 [2] on the device: tiles skipped and considered


class Measures:
    """The measured values ``names`` of every complete step since the request began.

    A request begins with `restart`, or with a step that is no less noisy than the one before it: so what
    is held is bounded by the steps of one schedule. Nothing here waits for the device.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._device = device
        self._steps: tuple[MeasuredStep, ...] = ()

    @property
    def steps(self) -> tuple[MeasuredStep, ...]:
        """The steps so far, the first one first."""
        return self._steps

    @property
    def nbytes(self) -> int:
        """Bytes of the values held."""
        return sum(nbytes(*step.values.values()) for step in self._steps)

    def restart(self) -> None:
        """Forgets the steps: another request begins."""
        self._steps = ()

    @contextmanager
    def step(self, sigma: float, variants: Mapping[str, str]) -> Iterator[Record]:
        """Takes the values of one step while it runs; it counts once the block ends without an error."""
        if not self._places:
            yield lambda name, value: None
            return
        if self._steps and sigma >= self._steps[-1].sigma:
            self.restart()
        held = torch.empty((len(self._places), 2), dtype=torch.int32, device=self._device)

        def record(name: str, value: torch.Tensor) -> None:
            # Copied at once: it may be a view into the workspace of its call, which must not live on.
            held[self._places[name]].copy_(value)

        yield record
        values = dict(zip(self._places, held.unbind(), strict=True))
        self._steps = (*self._steps, MeasuredStep(sigma, dict(variants), values))
