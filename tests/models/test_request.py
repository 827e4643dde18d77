"""Requests are checked before anything large is loaded, and each refusal names its mend."""

from __future__ import annotations

import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from h3compile.errors import H3CompileError
from h3compile.models.clip import Clip
from h3compile.models.mp4 import write_mp4
from h3compile.models.request import Request, align_frames

PLAIN = Request("a fox in the snow")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One file of each kind, with names that say nothing of what they hold."""
    folder = tmp_path_factory.mktemp("media")
    paths = {name: folder / name for name in ("picture", "banner", "video", "text", "cut", "none")}
    Image.new("RGB", (64, 48), "red").save(paths["picture"], "png")
    Image.new("RGB", (330, 64), "red").save(paths["banner"], "png")
    write_mp4(paths["video"], Clip(np.zeros((24, 32, 32, 3), np.uint8), np.zeros((2, 32_000), np.float32)))
    paths["text"].write_text("no picture")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(paths["cut"], "png")
    paths["cut"].write_bytes(paths["cut"].read_bytes()[:3000])
    return paths


def test_a_plain_request_resolves_to_itself() -> None:
    assert PLAIN.resolve() == (PLAIN, [])


@pytest.mark.parametrize(("asked", "frames"), [(120, 124), (124, 124), (125, 141), (345, 345), (330, 345)])
def test_frames_are_rounded_up_and_the_user_told(asked: int, frames: int) -> None:
    resolved, notes = replace(PLAIN, frames=asked).resolve()
    assert resolved.frames == frames
    assert len(notes) == (asked != frames)
    assert all(f"{asked} frames become {frames}" in note for note in notes)


def test_aligned_counts_are_what_the_vae_decodes() -> None:
    for frames in range(1, 400):
        aligned = align_frames(frames)
        assert aligned % 17 == 5
        assert 0 <= aligned - frames < 17


@pytest.mark.parametrize(
    ("change", "cause", "mend"),
    [
        ({"prompt": "  "}, "prompt is empty", "say what"),
        ({"width": 1340}, "width 1340", "use 1312 or 1344"),
        ({"height": 767}, "height 767", "use 736 or 768"),
        ({"width": 0}, "width 0", "use 32"),
        ({"frames": 119}, "4.96 s", "120 to 345"),
        ({"frames": 346}, "15.08 s", "120 to 345"),
        ({"frames": -5}, "-0.21 s", "120 to 345"),
        ({"steps": 1}, "1 steps", "N - 1 forwards"),
        ({"steps": 10**9}, "steps", "2 to 1000"),
        ({"flow_shift": 0.0}, "flow shift 0", "12 and 3"),
        ({"audio_flow_shift": float("nan")}, "audio flow shift nan", "12 and 3"),
        ({"seed": -1}, "seed -1", "0 to"),
    ],
)
def test_numbers_out_of_range_are_refused(change: dict[str, Any], cause: str, mend: str) -> None:
    with pytest.raises(H3CompileError) as caught:
        replace(PLAIN, **change).resolve()
    assert cause in caught.value.cause
    assert mend in caught.value.mend


@pytest.mark.parametrize("broken", ["text", "cut", "none", "video"])
def test_a_key_frame_that_is_no_picture_is_refused(files: dict[str, Path], broken: str) -> None:
    for change in ({"image": files[broken]}, {"last_image": files[broken]}):
        with pytest.raises(H3CompileError, match=str(files[broken])):
            replace(PLAIN, **change).resolve()


@pytest.mark.parametrize("broken", ["text", "cut", "none", "banner"])
def test_a_reference_that_cannot_be_used_is_refused(files: dict[str, Path], broken: str) -> None:
    with pytest.raises(H3CompileError, match=str(files[broken])):
        replace(PLAIN, references=(files["picture"], files[broken])).resolve()


def test_references_and_key_frames_exclude_each_other(files: dict[str, Path]) -> None:
    with pytest.raises(H3CompileError, match="exclude each other"):
        replace(PLAIN, image=files["picture"], references=(files["picture"],)).resolve()


@pytest.mark.parametrize(
    ("references", "message"),
    [
        (["picture"] * 10, "10 image references"),
        (["video"] * 4, "4 video references"),
        (["picture"] * 9 + ["video"] * 3 + ["picture"], "13 references"),
    ],
)
def test_too_many_references_are_refused(files: dict[str, Path], references: list[str], message: str) -> None:
    with pytest.raises(H3CompileError, match=message):
        replace(PLAIN, references=tuple(files[name] for name in references)).resolve()


def test_sound_alone_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "voice"
    with wave.open(str(path), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16_000)
        sound.writeframes(bytes(32_000))
    with pytest.raises(H3CompileError, match="only reference"):
        replace(PLAIN, references=(path,)).resolve()
    assert replace(PLAIN, references=(path, files["picture"])).resolve()[1] == []


def test_the_task_and_its_partition_follow_from_the_conditions(files: dict[str, Path]) -> None:
    picture = files["picture"]
    requests = [PLAIN, replace(PLAIN, image=picture), replace(PLAIN, last_image=picture)]
    assert [request.task for request in requests] == ["t2va", "fl2va", "fl2va"]
    assert {request.partition for request in requests} == {"transformer"}
    with_reference = replace(PLAIN, references=(picture,))
    assert (with_reference.task, with_reference.partition) == ("ref2va", "transformer_ref")


def test_both_meanings_of_steps_are_reported() -> None:
    assert PLAIN.forwards == 49
    assert "50 grid points = 49 forwards" in PLAIN.summary
    assert replace(PLAIN, steps=2).forwards == 1
