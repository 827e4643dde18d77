"""One rank of benchmarks/ranks.py: its device, its groups, and forwards timed together with the others."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from canvases import CANVASES, sizes_of
from whole_model import request, second_timestep

from h3compile.targets import Target, detect
from h3compile.targets.known import find_target

Inputs = dict[str, torch.Tensor]
Lane = list[tuple[float, float]]

# Those of `canvases.py` for the tiny model.
TINY_CANVASES = {"37760": (24, 7, 10), "73500": (30, 9, 12), "11000": (12, 7, 10), "odd": (5, 7, 10)}


@dataclass(frozen=True)
class Options:
    """What the script was asked for; ``ranks`` processes share ``scratch``."""

    ranks: int
    tiny: bool
    layers: int
    deep: int
    rounds: int
    canvases: tuple[str, ...]
    scratch: Path
    out: Path

    @property
    def gpu(self) -> bool:
        return torch.cuda.is_available()

    @property
    def degrees(self) -> list[int]:
        """Degrees of Ulysses to measure beside one rank."""
        return [degree for degree in (2, 4, 8) if degree <= self.ranks]

    def engine(self, key: str, layers: int) -> Path:
        return self.scratch / f"{key}.{layers}.h3e"


@dataclass(frozen=True)
class Run:
    """A forward of the first ``degree`` ranks; None on the others."""

    degree: int
    call: Callable[[], tuple[torch.Tensor, ...]] | None


@dataclass
class Rank:
    """One of the processes, and what it has found so far."""

    options: Options
    number: int
    device: torch.device
    control: dist.ProcessGroup
    section: str
    found: dict[str, object] = field(default_factory=dict)
    _groups: dict[int, dist.ProcessGroup] = field(default_factory=dict)

    @classmethod
    def connect(cls, options: Options, section: str) -> Rank:
        """This process, by torchrun's variables."""
        number = int(os.environ["RANK"])
        device = torch.device("cuda", number) if options.gpu else torch.device("cpu")
        if options.gpu:
            torch.cuda.set_device(device)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("cpu:gloo,cuda:nccl" if options.gpu else "gloo")
        # What is said beside the measurements: waiting in it keeps no GPU busy.
        control = dist.new_group(backend="gloo", timeout=timedelta(minutes=5))
        assert isinstance(control, dist.ProcessGroup)
        rank = cls(options, number, device, control, section)
        rank.note("device", torch.cuda.get_device_name(device) if options.gpu else "cpu")
        return rank

    def note(self, name: str, value: object) -> None:
        """Rank 0's word counts. At once: what was measured is kept when a later part fails."""
        if self.number:
            return
        self.found[name] = value
        print(name, json.dumps(value), flush=True)
        path = self.options.scratch / f"section_{self.section}.json"
        path.write_text(json.dumps(self.found, indent=1))

    def everybody(self, value: object) -> list[object]:
        """What every rank says, in their order."""
        said: list[object] = [None] * self.options.ranks
        dist.all_gather_object(said, value, group=self.control)
        return said

    def group(self, degree: int) -> dist.ProcessGroup | None:
        """The first ``degree`` ranks, for those among them; None where they are all. All ranks must ask."""
        if degree == self.options.ranks:
            return None
        if degree not in self._groups:
            made = dist.new_group(list(range(degree)))
            if self.number < degree:
                assert isinstance(made, dist.ProcessGroup)
                self._groups[degree] = made
        return self._groups.get(degree)

    def synchronize(self) -> None:
        if self.options.gpu:
            torch.cuda.synchronize(self.device)

    def inputs(self, canvas: str, times: Sequence[float] | None = None) -> Inputs:
        tiny = self.options.tiny
        shape = (TINY_CANVASES if tiny else CANVASES)[canvas]
        times = times or [second_timestep(50, shift) for shift in (12.0, 3.0)]
        # Drawn on the host, so that every device is given the same.
        given = request(*shape, list(times), device="cpu", text_dim=64 if tiny else 5120)
        return {name: value.to(self.device) for name, value in given.items()}

    def milliseconds(
        self, runs: Mapping[str, Run], rounds: int | None = None, *, warm: bool = False
    ) -> dict[str, float]:
        """Medians by name of the slowest rank's time: runs take turns, so that cards are as warm for each.

        The first turn is not counted; where all is ``warm`` there is none.
        """
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(warm, (rounds or self.options.rounds) + 1):
            for name, run in runs.items():
                self.synchronize()
                dist.barrier(group=self.control)
                begun = time.perf_counter()
                if run.call is not None:
                    run.call()
                    self.synchronize()
                if turn:
                    samples[name].append((time.perf_counter() - begun) * 1e3 if run.call is not None else 0.0)
        of_all = self.everybody(samples)
        return {
            name: statistics.median(max(turn) for turn in zip(*(one[name] for one in of_all), strict=True))  # type: ignore[index]
            for name in runs
        }

    @cached_property
    def target(self) -> Target:
        """What predictions are for; the H200 where this is a dry run."""
        return detect() if self.options.gpu else find_target("h200")

    def sizes(self, canvas: str) -> dict[str, int]:
        """The lengths of a canvas at real width, as the planner takes them."""
        return sizes_of(canvas)


# --- kernels ---


def merged(spans: Sequence[tuple[float, float]]) -> Lane:
    """The same time in spans that do not touch, in order."""
    found: Lane = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


def common(one: Lane, other: Lane) -> Lane:
    """The time that is in both of two merged lanes."""
    found: Lane = []
    at = 0
    for start, end in one:
        while at < len(other) and other[at][1] <= start:
            at += 1
        place = at
        while place < len(other) and other[place][0] < end:
            found.append((max(start, other[place][0]), min(end, other[place][1])))
            place += 1
    return found


def overlap(kernels: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Of (name, start, end) in microseconds: the share of NCCL's kernels, and how much others run beside.

    A kernel of NCCL waits for the other ranks too, so its time is more than that of the transfer.
    """
    exchanged = merged([(start, end) for name, start, end in kernels if name.startswith("nccl")])
    computed = merged([(start, end) for name, start, end in kernels if not name.startswith("nccl")])
    span = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
    together = length(common(exchanged, computed))
    return {
        "step_ms": span / 1e3,
        "computed_ms": length(computed) / 1e3,
        "collectives_ms": length(exchanged) / 1e3,
        "share": length(exchanged) / span,
        "overlapped": together / length(exchanged) if exchanged else 0.0,
        "exposed_ms": (length(exchanged) - together) / 1e3,
    }


# Copies from and to the host, and what torch notes beside a collective of its own.
_NEITHER = ("Memcpy HtoD", "Memcpy DtoH", "nccl:")


def profiled(rank: Rank, run: Run) -> dict[str, float]:
    """`overlap` of one forward, as rank 0 saw it; nothing on a CPU."""
    from torch.profiler import ProfilerActivity, profile

    rank.synchronize()
    if not rank.options.gpu or rank.number:
        dist.barrier(group=rank.control)
        if run.call is not None:
            run.call()
            rank.synchronize()
        return {}
    assert run.call is not None
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        dist.barrier(group=rank.control)
        run.call()
        rank.synchronize()
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type.name == "CUDA" and not event.name.startswith(_NEITHER)
    ]
    return overlap(kernels)
