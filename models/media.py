"""Reads pictures, videos and sound from files, each failure one line."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from h3compile.errors import H3CompileError

__all__ = ["Media", "VideoMedia", "probe", "read_image", "read_sound", "read_video"]


class Media(Enum):
    """What a file holds."""

    IMAGE = "image"
    VIDEO = "video"
    SOUND = "audio"


@dataclass(frozen=True, eq=False)
class VideoMedia:
    """A decoded video: frames uint8 (frames, height, width, 3), sound float32 (channels, samples)."""

    frames: npt.NDArray[np.uint8]
    fps: float
    sound: npt.NDArray[np.float32] | None


def probe(path: Path) -> Media:
    """What ``path`` holds, by its content and not by its name.

    Raises:
        H3CompileError: there is no such file, or nothing in it can be decoded.
    """
    _require_file(path)
    try:
        with Image.open(path) as image:
            image.verify()
        return Media.IMAGE
    except UnidentifiedImageError:
        pass
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _unreadable(path, error) from error
    try:
        with av.open(str(path)) as container:
            if container.streams.video:
                return Media.VIDEO
            if container.streams.audio:
                return Media.SOUND
    except (av.FFmpegError, OSError) as error:
        raise _unreadable(path, error) from error
    raise H3CompileError(f"{path} holds no picture, video or sound", "give another file")


def read_image(path: Path) -> Image.Image:
    """The picture in ``path`` as RGB, turned upright as its EXIF orientation says.

    Raises:
        H3CompileError: there is no such file, or it is not a picture.
    """
    _require_file(path)
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _unreadable(path, error) from error


def read_video(path: Path, *, sample_rate: int, seconds: float | None = None) -> VideoMedia:
    """The first ``seconds`` of the video in ``path`` (all of it when None), upright, with its sound.

    Args:
        sample_rate: the sound is resampled to it; the frames keep their own rate.

    Raises:
        H3CompileError: there is no such file, or no video in it can be decoded.
    """
    _require_file(path)
    frames: list[npt.NDArray[np.uint8]] = []
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            fps = float(stream.average_rate or stream.guessed_rate or 24)
            limit = None if seconds is None else round(seconds * fps)
            turns = 0
            for frame in container.decode(stream):
                if limit is not None and len(frames) >= limit:
                    break
                # The display matrix turns counterclockwise; showing the frame upright undoes it.
                turns = round(frame.rotation / 90) % 4
                frames.append(frame.to_ndarray(format="rgb24"))
            has_sound = bool(container.streams.audio)
    except (av.FFmpegError, OSError, IndexError) as error:
        raise _unreadable(path, error) from error
    if not frames:
        raise H3CompileError(f"{path} has no frame that can be decoded", "give another video")
    video = np.ascontiguousarray(np.rot90(np.stack(frames), k=-turns, axes=(1, 2)))
    sound = read_sound(path, sample_rate=sample_rate, seconds=seconds) if has_sound else None
    return VideoMedia(video, fps, sound)


def read_sound(path: Path, *, sample_rate: int, seconds: float | None = None) -> npt.NDArray[np.float32]:
    """The first ``seconds`` of sound in ``path`` (all of it when None), float32 (1 or 2, samples).

    Mono stays mono, and more than two channels are mixed down to two. Resampled by FFmpeg where the file has
    another rate, so that Diffusers, which would need torchaudio for it, has nothing left to do.

    Raises:
        H3CompileError: there is no such file, or no sound in it can be decoded.
    """
    _require_file(path)
    limit = None if seconds is None else round(seconds * sample_rate)
    chunks: list[npt.NDArray[np.float32]] = []
    try:
        with av.open(str(path)) as container:
            stream = container.streams.audio[0]
            layout = "mono" if stream.channels == 1 else "stereo"
            resampler = av.AudioResampler(format="fltp", layout=layout, rate=sample_rate)
            taken = 0
            for frame in container.decode(stream):
                chunks += [part.to_ndarray() for part in resampler.resample(frame)]
                taken = sum(chunk.shape[1] for chunk in chunks)
                if limit is not None and taken >= limit:
                    break
            else:
                chunks += [part.to_ndarray() for part in resampler.resample(None)]
    except (av.FFmpegError, OSError, IndexError) as error:
        raise _unreadable(path, error) from error
    if not chunks:
        raise H3CompileError(f"{path} has no sound that can be decoded", "give another file")
    return np.ascontiguousarray(np.concatenate(chunks, axis=1)[:, :limit], dtype=np.float32)


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise H3CompileError(f"there is no file {path}", "check the path")


def _unreadable(path: Path, error: Exception) -> H3CompileError:
    return H3CompileError(
        f"cannot read {path} ({error})", "give a picture, video or sound file that is whole"
    )
