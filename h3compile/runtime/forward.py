"""One forward: inputs are checked and made ready, what the request alone decides is kept, then it runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from h3compile.program.conditions import choose, largest_sigma
from h3compile.runtime.parts import Parts
from h3compile.runtime.runner import Check
from h3compile.runtime.validate import LAYOUT, check_layout, check_shapes, read_timesteps

__all__ = ["Forward", "Ready"]

_TIMESTEPS = ("timestep", "timestep_indices")


@dataclass(frozen=True)
class Ready:
    """The inputs of a forward on their device and in their dtypes, and what the host knows of them.

    ``changed`` names those of the request, the layout or the schedule that are not as they were.
    """

    values: dict[str, torch.Tensor]
    lengths: Mapping[str, int]
    timesteps: list[float]
    changed: frozenset[str]


class Forward:
    """Forward after forward: `prepare` and then `run`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._layout_checked = False
        self._timesteps: list[float] | None = None
        self._own_rows: dict[str, torch.Tensor] | None = None
        stages = parts.manifest.input_stages
        self._of_request = frozenset(name for name, stage in stages.items() if stage == "request")
        own = () if parts.ranks is None else parts.ranks.parallel.ports
        self._named_rows = frozenset(port.name for port in own)
        self.rows = 0  # of the last sequence, for who tells of it

    def prepare(self, given: Mapping[str, torch.Tensor]) -> Ready:
        """``given`` made ready; raises `H3CompileError` for what does not fit. Nothing is computed yet."""
        parts = self._parts
        lengths = check_shapes(parts.ports, parts.manifest.dims, given)
        self.rows = given["token_tags"].shape[0]
        values, changed = parts.inputs.take(given)
        if not changed.isdisjoint(LAYOUT):
            changed |= self._named_rows
        self._forget(changed)
        parts.inputs.acknowledge()
        timesteps = self._check_contents(values)
        if parts.ranks is not None:
            if self._own_rows is None:
                self._own_rows = parts.ranks.inputs(values)
            values |= self._own_rows
        return Ready(values, lengths, timesteps, changed)

    def begins(self, ready: Ready) -> bool:
        """Whether a request begins: its text, its positions or the layout of its rows are new."""
        return not self._of_request.isdisjoint(ready.changed)

    def run(self, ready: Ready, obey: Check) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs. ``obey`` is called wherever work may stop."""
        parts = self._parts
        values = {**ready.values, **parts.request.values(ready.values, obey)}
        rows = {} if parts.tables is None else parts.tables.select(ready.timesteps, obey)
        # Once a step and from what the host knows already: nothing waits for the device.
        sigma = largest_sigma(ready.timesteps)
        stand_ins = choose(parts.variants, ready.lengths, sigma)
        memory = parts.memory
        placed = nullcontext() if memory is None else memory.step(values, ready.lengths, stand_ins)
        with parts.measures.step(sigma, stand_ins) as record, placed:
            sample, audio_sample = parts.runner.run(values, rows, obey, stand_ins=stand_ins, record=record)
        parts.stats.forwards += 1
        return sample, audio_sample

    def release(self) -> None:
        """Frees what is held for the current request; weights and tables stay."""
        parts = self._parts
        parts.inputs.release()
        parts.request.release()
        parts.measures.restart()
        if parts.tables is not None:
            parts.tables.release()
        self._layout_checked = False
        self._timesteps = None
        self._own_rows = None

    def _forget(self, changed: Collection[str]) -> None:
        """Drops everything that was concluded from inputs which changed."""
        self._parts.request.invalidate(changed)
        if not self._of_request.isdisjoint(changed):
            self._parts.measures.restart()
        if not set(LAYOUT).isdisjoint(changed):
            self._layout_checked = False
            self._own_rows = None
        if not set(_TIMESTEPS).isdisjoint(changed):
            self._timesteps = None

    def _check_contents(self, values: Mapping[str, torch.Tensor]) -> list[float]:
        """Looks at contents not checked yet; the timesteps as numbers."""
        if not self._layout_checked:
            check_layout(values)
            self._layout_checked = True
        if self._timesteps is None:
            self._timesteps = read_timesteps(*(values[name] for name in _TIMESTEPS))
        return self._timesteps
