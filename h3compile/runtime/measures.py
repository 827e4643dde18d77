"""What the steps of a request leave for reports: small counts on the device, and sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from h3compile.runtime.memory import nbytes

__all__ = ["MeasuredStep", "Measures", "Record", "summed"]

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
    def names(self) -> tuple[str, ...]:
        """What is measured."""
        return tuple(self._places)

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


def summed(steps: Sequence[MeasuredStep], group: dist.ProcessGroup) -> tuple[MeasuredStep, ...]:
    """``steps`` with the values of every rank of ``group`` added up; all must ask, with as many steps.

    A rank counts what it does alone, the tiles of its own heads: the sums are what one rank would count, and
    fit where its counts do. One exchange, of 8 bytes a value.
    """
    if not steps:
        return ()
    total = torch.stack([torch.stack(tuple(step.values.values())) for step in steps])
    dist.all_reduce(total, group=group)
    return tuple(
        replace(step, values=dict(zip(step.values, values.unbind(), strict=True)))
        for step, values in zip(steps, total, strict=True)
    )
