"""A loaded engine, put together by `h3compile.runtime.assemble`: what a module drives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from h3compile.engine.manifest import Manifest, PortRecord
from h3compile.program.conditions import Variant
from h3compile.program.residency import Residency
from h3compile.runtime.arena import StepMemory
from h3compile.runtime.inputs import Inputs
from h3compile.runtime.measures import Measures
from h3compile.runtime.pinned import HostMemory
from h3compile.runtime.pool import Pool
from h3compile.runtime.ranks import Ranks
from h3compile.runtime.request import RequestMemo
from h3compile.runtime.runner import Runner
from h3compile.runtime.stats import Stats
from h3compile.runtime.streamer import Streamer
from h3compile.runtime.tables import ModulationTables
from h3compile.runtime.weights import Weights

__all__ = ["Parts"]


@dataclass(frozen=True)
class Parts:
    """The parts; ``ports`` are what a forward is given, the same on every rank."""

    manifest: Manifest
    partition: str
    device: torch.device
    pool: Pool
    weights: Weights
    ports: tuple[PortRecord, ...]
    inputs: Inputs
    request: RequestMemo
    tables: ModulationTables | None  # None where no pass made tables
    variants: Mapping[str, tuple[Variant, ...]]
    measures: Measures
    runner: Runner
    memory: StepMemory | None  # None where a region runs operator by operator
    stats: Stats
    residency: Residency | None
    host: HostMemory
    streamer: Streamer | None  # None where every weight stays on the device
    ranks: Ranks | None  # None where one rank has all rows
