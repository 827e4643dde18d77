"""What `h3compile run` has to do once its options are checked: load, generate, write."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from h3compile.cli.interrupt import stop_between_steps
from h3compile.cli.outcome import FOLDER, last_words
from h3compile.cli.tenants import Asked, room
from h3compile.progress import Progress

if TYPE_CHECKING:
    from h3compile.models.request import Request
    from h3compile.runtime.measures import MeasuredStep
    from h3compile.runtime.module import CompiledTransformer

__all__ = ["Job", "load_module", "make_clip"]


@dataclass(frozen=True)
class Job:
    """One clip: the resolved ``request``, what makes it, and where it goes."""

    engine: Path
    model: Path  # the checkpoint with the other components
    output: Path
    request: Request
    notes: tuple[str, ...] = ()
    device: str | None = None
    lossless: bool = False
    report: Path | None = None
    expect: str | None = None
    components: Asked | None = None  # where text encoder and VAEs live; None: what fits
    patience: float | None = None  # seconds in which one of several ranks must come further

    def encode(self) -> str:
        """As text, for another process."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def decode(cls, text: str) -> Job:
        """The job that was encoded."""
        from h3compile.models.request import Request

        record = json.loads(text)
        request = record["request"]
        for name in ("image", "last_image"):
            request[name] = _path(request[name])
        request["references"] = tuple(map(Path, request["references"]))
        record["request"] = Request(**request)
        record["notes"] = tuple(record["notes"])
        for name in ("engine", "model", "output", "report"):
            record[name] = _path(record[name])
        return cls(**record)

    def on(self, device: str) -> Job:
        """The same job on another device."""
        return replace(self, device=device)


def load_module(job: Job) -> CompiledTransformer:
    """The engine of ``job`` with the weights that its request needs."""
    from h3compile.runtime.load import load
    from h3compile.runtime.watch import PATIENCE

    request = job.request
    module = load(
        job.engine,
        job.device,
        partition=request.partition,
        expect=job.expect,
        rows=_lengths(request),
        patience=PATIENCE if job.patience is None else job.patience,
    )
    if FOLDER in os.environ and module.ranks is not None:
        module.ranks.watch.at_last_resort(last_words)
    return module


def _lengths(request: Request) -> dict[str, int]:
    """The lengths of the forwards, as far as they are known: a prompt of some words, and no references."""
    from h3compile.plan.shapes import Clip

    keyframes = sum(picture is not None for picture in (request.image, request.last_image))
    clip = Clip(request.width, request.height, request.frames, task="fl2va" if keyframes else "t2va")
    conditions = keyframes * clip.frame_rows
    return replace(clip, condition_rows=conditions).dims


def make_clip(job: Job, progress: Progress, *, leads: bool = False) -> list[tuple[str, str]]:
    """Generates the clip and writes it; what to tell the user of it, name and value.

    ``leads``: other ranks follow this one.
    """
    from h3compile.models.generate import generate, load_pipeline
    from h3compile.models.mp4 import write_mp4

    request, begun = job.request, time.monotonic()
    progress.note(request.summary)
    for note in job.notes:
        progress.note(note)
    progress.phase("load the engine", None)
    module = load_module(job)
    with module.leading() if leads else _alone():
        pipe = load_pipeline(
            job.model,
            transformer=module if request.partition == "transformer" else None,
            transformer_ref=module if request.partition == "transformer_ref" else None,
            device=module.device,
            placements=room(module.device, request.frames * request.width * request.height, job.components),
            progress=progress,
        )
        loaded = time.monotonic()
        with stop_between_steps(progress.note) as stopped:
            clip = generate(pipe, request, progress=progress, should_stop=stopped)
            if stopped():  # asked for after the last step: the clip is not wanted either
                raise KeyboardInterrupt
            measured = module.measured()  # of all ranks: the others do not follow after this block
    generated = time.monotonic()
    progress.phase("write the MP4", None)
    write_mp4(job.output, clip, lossless=job.lossless)
    rows = [
        ("clip", str(job.output)),
        ("request", request.summary),
        ("took", f"{loaded - begun:.1f} s to load, {generated - loaded:.1f} s to generate"),
    ]
    return rows + _skipped(job, measured)


def _skipped(job: Job, measured: Sequence[MeasuredStep]) -> list[tuple[str, str]]:
    from h3compile.engine.loader import open_engine

    manifest = open_engine(job.engine, verify=False).manifest
    if not manifest.measures:
        return []
    from h3compile.quality.skipped import skipped_tiles

    skipped = skipped_tiles(manifest, measured)
    rows = [("skipped tiles", skipped.summary())]
    if job.report is not None:
        job.report.write_text(skipped.encode(), encoding="utf-8")
        rows.append(("report", str(job.report)))
    return rows


@contextmanager
def _alone() -> Iterator[None]:
    yield


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
