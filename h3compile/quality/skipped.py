"""What skipping left out of a request, step by step and call by call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from h3compile.engine.manifest import Manifest
from h3compile.runtime.measures import MeasuredStep

__all__ = ["SkippedTiles", "skipped_tiles"]


@dataclass(frozen=True)
class _Step:
    sigma: float
    variants: Mapping[str, str]  # region -> the variant that served its calls
    skipped: tuple[int, ...]  # a call
    considered: tuple[int, ...]

    @property
    def share(self) -> float | None:
        """Of the tiles considered; None in a step that considers none, because its attention is dense."""
        considered = sum(self.considered)
        return sum(self.skipped) / considered if considered else None


@dataclass(frozen=True)
class SkippedTiles:
    """The tiles of attention that a request skipped: a row a step, a column a call."""

    calls: tuple[str, ...]
    steps: tuple[_Step, ...]

    def summary(self) -> str:
        """One line: the share of all tiles considered, and that of the first and last step that skipped."""
        skipping = [step.share for step in self.steps if step.share]
        if not skipping:
            return f"none in {len(self.steps)} steps"
        skipped = sum(sum(step.skipped) for step in self.steps)
        considered = sum(sum(step.considered) for step in self.steps)
        none = len(self.steps) - len(skipping)
        first = f"none in {none} of {len(self.steps)} steps, " if none else ""
        which = "of the others" if none else "step"
        shares = f"{skipping[0]:.1%} in the first {which} and {skipping[-1]:.1%} in the last"
        return f"{skipped / considered:.1%} of all; {first}{shares}"

    def encode(self) -> str:
        """The table as JSON, a step a line.

        ``calls`` names the calls; a step has its ``sigma``, the ``variants`` that ran, the ``share`` skipped
        (null where none was considered), and the tiles ``skipped`` and ``considered`` by each call.
        """
        rows = [{**asdict(step), "share": step.share} for step in self.steps]
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        return f'{{\n"calls": {json.dumps(self.calls)},\n"steps": [\n{lines}\n]\n}}\n'


def skipped_tiles(manifest: Manifest, measured: Sequence[MeasuredStep]) -> SkippedTiles:
    """The table of what a module `measured`. Waits for the device."""
    makers = {value: f"{call.region}.{call.index}" for call in manifest.calls for value in call.outputs}
    steps = []
    for step in measured:
        counts = torch.stack([step.values[name] for name in manifest.measures], dim=1)
        skipped, considered = (tuple(row) for row in counts.tolist())
        steps.append(_Step(step.sigma, step.variants, skipped, considered))
    return SkippedTiles(tuple(makers[name] for name in manifest.measures), tuple(steps))
