"""The rows of a clip are those that H3's formulas, Diffusers and the published figures give."""

from __future__ import annotations

import pytest

from h3compile.errors import H3CompileError
from h3compile.models import request
from h3compile.models.h3 import facts_for, release_dtype
from h3compile.plan import shapes
from h3compile.plan.shapes import Clip, align_frames, frames_of


@pytest.mark.parametrize(
    ("frames", "latent_frames", "audio_rows"),
    [(124, 37, 414), (209, 62, 696), (243, 72, 810), (362, 107, 1206)],
)
def test_rows_are_those_of_the_release(frames: int, latent_frames: int, audio_rows: int) -> None:
    clip = Clip(frames=frames)
    assert clip.latent_frames == latent_frames
    assert clip.dims["audio_rows"] == audio_rows
    assert clip.dims["video_rows"] == 1008 * latent_frames
    assert clip.dims["rows"] == 50 + audio_rows + 1008 * latent_frames


def test_the_hints_of_the_model_are_the_default_clip() -> None:
    from h3compile.models.h3 import RELEASE_CONFIG
    from h3compile.models.trace import parameter_shapes

    dtypes = {name: release_dtype(name) for name in parameter_shapes(RELEASE_CONFIG)}
    hints = {dim.name: dim.hint for dim in facts_for(RELEASE_CONFIG, dtypes).dims}
    assert Clip().dims == hints


def test_a_published_length() -> None:
    assert Clip(1248, 768, 209, text_rows=30).dims["rows"] == 58_758


def test_rounding_is_that_of_a_request() -> None:
    frames = range(1, 400)
    assert [align_frames(count) for count in frames] == [request.align_frames(count) for count in frames]
    assert request.FPS == shapes.FPS
    assert request.MAX_FRAMES == shapes.LONGEST_RUN
    assert request.align_frames(request.MIN_FRAMES) == shapes.SHORTEST
    assert request.SIZE_MULTIPLE == shapes.MULTIPLE


@pytest.mark.parametrize(("seconds", "frames"), [(5, 124), (5.2, 141), (10, 243), (14, 345), (15, 345)])
def test_seconds_become_frames(seconds: float, frames: int) -> None:
    assert frames_of(seconds) == frames


def test_key_frames_are_rows_of_the_video_and_another_timestep() -> None:
    text, frames = Clip(), Clip(task="fl2va")
    assert frames.dims["video_rows"] - text.dims["video_rows"] == 2 * 1008
    assert frames.dims["rows"] - text.dims["rows"] == 2 * 1008
    assert (text.dims["timesteps"], frames.dims["timesteps"]) == (2, 3)
    assert Clip(task="fl2va", condition_rows=1008).dims["video_rows"] == 38 * 1008


def test_a_reference_picture_has_a_size_of_its_own() -> None:
    # 2048 pixels are 64 rows of patches, and 16:9 of that 114.
    small, large = Clip(640, 384, task="ref2va"), Clip(task="ref2va")
    assert small.conditions == large.conditions == 64 * 114
    assert large.dims["timesteps"] == 4


def test_the_summary_says_both_numbers_of_steps() -> None:
    assert Clip().summary == (
        "t2va, 1344x768, 124 frames (5.17 s), 37,760 rows, 50 grid points = 49 forwards"
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"width": 1340}, "width 1340 is not a multiple of 32: 1344 is near"),
        ({"height": 0}, "height 0 is not a multiple of 32: 32 is near"),
        ({"frames": 120}, "120 frames are not 17 n + 5: the next are 124"),
        ({"frames": 130}, "130 frames are not 17 n + 5: the next are 141"),
        (
            {"frames": 379},
            "379 frames are 15.79 s, and H3 makes clips of 5 to 15 s: ask for 124 to 345 frames; "
            "some servers take 362",
        ),
        ({"text_rows": 0}, "0 text rows: a prompt has at least one"),
        ({"steps": 1}, "1 steps: give at least 2 grid points: N give N - 1 forwards"),
        ({"task": "i2v"}, "no task is called 'i2v': t2va, fl2va or ref2va"),
        ({"condition_rows": 5}, "t2va has no condition rows: key frames are --task fl2va"),
        ({"condition_rows": -1}, "-1 condition rows: give 0 or more"),
    ],
)
def test_an_impossible_clip_is_one_line(options: dict[str, int], line: str) -> None:
    with pytest.raises(H3CompileError) as caught:
        Clip(**options)  # type: ignore[arg-type]
    assert str(caught.value) == line


@pytest.mark.parametrize("seconds", [4.9, 15.1, -1, float("nan")])
def test_lengths_that_h3_does_not_make(seconds: float) -> None:
    with pytest.raises(H3CompileError, match="5 to 15 s"):
        frames_of(seconds)
