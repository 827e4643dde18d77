"""MP4 files hold what was written to them, and appear whole or not at all."""

from __future__ import annotations

import math
from pathlib import Path

import av
import numpy as np
import pytest

from h3compile.errors import H3CompileError
from h3compile.models.clip import Clip
from h3compile.models.media import read_sound, read_video
from h3compile.models.mp4 import read_mp4, write_mp4

RATE = 32_000


def clip(frames: int = 31, height: int = 64, width: int = 96, samples: int | None = None) -> Clip:
    """Two drifting colour gradients, and another tone in each channel."""
    t, y, x = np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), indexing="ij")
    red = 128 + 100 * np.sin((x + 2 * t) / 20)
    green = 128 + 100 * np.cos((y - t) / 15)
    pixels = np.stack([red, green, np.full_like(red, 60)], axis=-1).astype(np.uint8)
    time = np.arange(samples if samples is not None else round(frames / 24 * RATE)) / RATE
    wave = np.stack([np.sin(2 * math.pi * hertz * time) for hertz in (440, 1000)])
    return Clip(pixels, (0.3 * wave).astype(np.float32))


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    length = min(len(first), len(second))
    return float(np.corrcoef(first[:length], second[:length])[0, 1])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Clip]:
    path = tmp_path_factory.mktemp("mp4") / "clip.mp4"
    write_mp4(path, clip())
    return path, clip()


def test_the_streams_are_what_players_expect(written: tuple[Path, Clip]) -> None:
    with av.open(str(written[0])) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        assert (video.codec_context.name, video.pix_fmt) == ("h264", "yuv420p")
        assert video.average_rate == 24
        assert video.codec_context.colorspace == 1
        assert (audio.codec_context.name, audio.rate, audio.channels) == ("aac", RATE, 2)


def test_frames_come_back(written: tuple[Path, Clip]) -> None:
    path, source = written
    decoded = read_mp4(path)
    assert decoded.frames.shape == source.frames.shape
    assert decoded.fps == 24
    error = decoded.frames.astype(float) - source.frames
    # 4:2:0 chroma and the quantizer; a wrong colour matrix alone would cost more than this.
    assert 10 * math.log10(255**2 / np.mean(error**2)) > 35
    assert np.abs(error.mean(axis=(0, 1, 2))).max() < 2


def test_sound_comes_back_in_place(written: tuple[Path, Clip]) -> None:
    path, source = written
    decoded = read_mp4(path)
    assert decoded.sample_rate == RATE
    # AAC works in frames of 1024 samples.
    assert 0 <= decoded.waveform.shape[1] - source.waveform.shape[1] < 1024
    for channel in range(2):
        assert correlation(decoded.waveform[channel], source.waveform[channel]) > 0.99
    assert correlation(decoded.waveform[0], source.waveform[1]) < 0.1


def test_sound_longer_than_the_pictures_is_kept(tmp_path: Path) -> None:
    write_mp4(tmp_path / "a.mp4", clip(frames=24, samples=2 * RATE))
    assert read_mp4(tmp_path / "a.mp4").waveform.shape[1] >= 2 * RATE


def test_an_odd_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(H3CompileError, match="even width"):
        write_mp4(tmp_path / "a.mp4", clip(width=95))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.mp4"
    target.write_bytes(b"older")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("h3compile.models.mp4._send_sound", full)
    with pytest.raises(H3CompileError, match="No space left"):
        write_mp4(target, clip())
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]
    assert target.read_bytes() == b"older"


def test_a_missing_directory_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(H3CompileError, match="cannot write"):
        write_mp4(tmp_path / "none" / "a.mp4", clip())


@pytest.mark.parametrize(
    ("frames", "waveform"),
    [
        (np.zeros((2, 4, 4, 3), np.float32), np.zeros((2, 8), np.float32)),
        (np.zeros((2, 4, 4), np.uint8), np.zeros((2, 8), np.float32)),
        (np.zeros((0, 4, 4, 3), np.uint8), np.zeros((2, 8), np.float32)),
        (np.zeros((2, 4, 4, 3), np.uint8), np.zeros((1, 8), np.float32)),
        (np.zeros((2, 4, 4, 3), np.uint8), np.zeros((2, 8), np.float64)),
    ],
)
def test_a_clip_refuses_other_arrays(frames: np.ndarray, waveform: np.ndarray) -> None:
    with pytest.raises(ValueError, match="must be"):
        Clip(frames, waveform)


def test_reading_stops_at_the_seconds_asked_for(written: tuple[Path, Clip]) -> None:
    video = read_video(written[0], sample_rate=RATE, seconds=0.5)
    assert len(video.frames) == 12
    assert video.sound is not None
    assert video.sound.shape == (2, RATE // 2)


def test_sound_is_resampled(written: tuple[Path, Clip]) -> None:
    path, source = written
    halved = read_sound(path, sample_rate=RATE // 2)
    assert correlation(halved[0], source.waveform[0, ::2]) > 0.99
