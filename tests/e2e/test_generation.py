"""A whole generation, engine against plain Diffusers, to the frames and the waveform in the MP4s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from h3compile.models.clip import Clip
from h3compile.models.generate import generate, load_pipeline
from h3compile.models.h3 import PARTITIONS
from h3compile.models.mp4 import read_mp4, write_mp4
from h3compile.models.request import Request
from h3compile.runtime.module import CompiledTransformer

pytestmark = pytest.mark.slow

DTYPE = torch.float32
DECIBELS = 60.0
REQUEST = Request("a fox runs through the snow", width=64, height=64, steps=4, seed=3)
TASKS = tuple(task for tasks in PARTITIONS.values() for task in tasks)

Modules = Callable[[torch.dtype, str, str], CompiledTransformer]
Pictures = npt.NDArray[np.uint8]
Sound = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A key frame, and a reference video with sound."""
    folder = tmp_path_factory.mktemp("media")
    noise = np.random.default_rng(0)
    pixels = noise.integers(0, 256, (24, 64, 96, 3), dtype=np.uint8)
    Image.fromarray(pixels[0]).save(folder / "picture.png")
    sound = (0.1 * noise.standard_normal((2, 32_000))).astype(np.float32)
    write_mp4(folder / "video.mp4", Clip(pixels, sound))
    return {path.stem: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def request_for(media: dict[str, Path]) -> Callable[[str], Request]:
    """A function from a task to a request for it."""
    conditions: dict[str, dict[str, Any]] = {
        "t2va": {},
        "fl2va": {"image": media["picture"]},
        "ref2va": {"references": (media["video"], media["picture"])},
    }
    return lambda task: replace(REQUEST, **conditions[task])


@pytest.fixture(scope="module")
def plain(
    checkpoints: Callable[[torch.dtype], Path], request_for: Callable[[str], Request]
) -> Callable[[str], Clip]:
    """A function from a task to the clip of Diffusers alone."""
    clips: dict[str, Clip] = {}

    def of(task: str) -> Clip:
        if task not in clips:
            request = request_for(task)
            assert request.task == task
            pipe = load_pipeline(checkpoints(DTYPE), from_checkpoint=(request.partition,))
            clips[task] = generate(pipe, request)
        return clips[task]

    return of


@pytest.fixture(scope="module")
def compiled(
    checkpoints: Callable[[torch.dtype], Path], request_for: Callable[[str], Request], modules: Modules
) -> Callable[[str, str], Clip]:
    """A function from a task and a kind of engine to the clip with the engine in the pipeline."""

    def of(task: str, kind: str) -> Clip:
        request = request_for(task)
        module = modules(DTYPE, kind, request.partition)
        before = module.stats.forwards
        clip = generate(load_pipeline(checkpoints(DTYPE), **{request.partition: module}), request)
        assert module.stats.forwards - before == request.forwards == REQUEST.steps - 1
        return clip

    return of


def decibels(ours: Pictures | Sound, theirs: Pictures | Sound, peak: float) -> float:
    """The peak signal-to-noise ratio, infinite for equal arrays."""
    assert ours.shape == theirs.shape
    error = float(np.mean(np.square(ours.astype(np.float64) - theirs)))
    return float("inf") if error == 0 else 10 * np.log10(peak**2 / error)


def written(clip: Clip, path: Path, *, lossless: bool) -> Clip:
    write_mp4(path, clip, lossless=lossless)
    return read_mp4(path)


@pytest.mark.parametrize("task", TASKS)
def test_without_folding_the_file_is_that_of_diffusers(
    task: str, plain: Callable[[str], Clip], compiled: Callable[[str, str], Clip], tmp_path: Path
) -> None:
    write_mp4(tmp_path / "theirs.mp4", plain(task))
    write_mp4(tmp_path / "ours.mp4", compiled(task, "hoisted"))
    assert (tmp_path / "ours.mp4").read_bytes() == (tmp_path / "theirs.mp4").read_bytes()


@pytest.mark.parametrize("kind", ["folded", "inductor"])
@pytest.mark.parametrize("task", TASKS)
def test_frames_and_waveform_agree(
    task: str,
    kind: str,
    plain: Callable[[str], Clip],
    compiled: Callable[[str, str], Clip],
    tmp_path: Path,
) -> None:
    theirs, ours = plain(task), compiled(task, kind)
    assert theirs.frames.std() > 20, "a picture with nothing in it would agree with anything"
    loudest = float(np.abs(theirs.waveform).max())
    assert loudest > 0.05

    # A lossy encoder amplifies the last bit of a pixel to its own error, so compare without one.
    expected = written(theirs, tmp_path / "theirs.mp4", lossless=True)
    found = written(ours, tmp_path / "ours.mp4", lossless=True)
    assert decibels(found.frames, expected.frames, 255) > DECIBELS
    assert decibels(found.waveform, expected.waveform, loudest) > DECIBELS

    # As users get the files, both are equally close to what was generated.
    expected = written(theirs, tmp_path / "theirs.mp4", lossless=False)
    found = written(ours, tmp_path / "ours.mp4", lossless=False)
    samples = theirs.waveform.shape[1]
    for of in (lambda clip: (clip.frames, 255.0), lambda clip: (clip.waveform[:, :samples], loudest)):
        source, peak = of(theirs)
        ratios = [decibels(of(clip)[0], source, peak) for clip in (found, expected)]
        assert ratios[0] == pytest.approx(ratios[1], abs=0.5)
