"""MP4 files: H.264 with stereo AAC, written whole or not at all."""

from __future__ import annotations

import contextlib
import secrets
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.reformatter import ColorRange, Colorspace

from h3compile.errors import H3CompileError
from h3compile.models.clip import Clip
from h3compile.models.media import read_video

__all__ = ["read_mp4", "write_mp4"]

# Visually lossless for most content, at a tenth of the size of truly lossless.
_CRF = "17"
# Macroblock trees read memory that was never written unless the width is a multiple of 128 (x264 165, with
# SIMD): the same frames would give another file in another process.
_X264 = "mbtree=0"
_AUDIO_BITS_PER_SECOND = 256_000
# Full scale of 24 bits, which lie in the upper part of the 32 that a sample takes.
_PEAK = 2**31 - 2**8
# BT.709 in limited range, in the numbers of ITU-T H.273; without the tags a player has to guess.
_BT709 = 1


def write_mp4(path: Path, clip: Clip, *, lossless: bool = False) -> None:
    """Write ``clip`` to ``path`` as H.264 (yuv420p, BT.709) with stereo AAC, through PyAV.

    The file appears at ``path`` when it is complete; an older one is replaced. The same clip gives the same
    bytes. ``lossless`` keeps the yuv420p pixels, and the sound to 24 bits as ALAC: for comparing two clips,
    because a lossy encoder answers the last bit of one pixel with other decisions everywhere.

    Raises:
        H3CompileError: the frames have an odd width or height, or the file cannot be written.
    """
    height, width = clip.frames.shape[1:3]
    if height % 2 or width % 2:
        raise H3CompileError(f"H.264 cannot hold {width}x{height} frames", "use an even width and height")
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with av.open(str(partial), "w", format="mp4", options={"movflags": "+faststart"}) as container:
            _encode(container, clip, lossless)
        partial.replace(path)
    except (av.FFmpegError, OSError) as error:
        raise H3CompileError(f"cannot write {path} ({error})", "choose a directory with room") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def read_mp4(path: Path, *, sample_rate: int = 32_000) -> Clip:
    """Decode the video in ``path`` with its sound, resampled to ``sample_rate``.

    Raises:
        H3CompileError: it cannot be decoded, has no sound, or has no whole number of frames a second.
    """
    video = read_video(path, sample_rate=sample_rate)
    if video.sound is None:
        raise H3CompileError(f"{path} has no sound", "give a video with sound")
    if not video.fps.is_integer():
        raise H3CompileError(f"{path} runs at {video.fps:g} frames a second", "give one with a whole rate")
    waveform = np.ascontiguousarray(np.broadcast_to(video.sound, (2, video.sound.shape[1])))
    return Clip(video.frames, waveform, fps=int(video.fps), sample_rate=sample_rate)


def _encode(container: Any, clip: Clip, lossless: bool) -> None:
    options = {"crf": "0" if lossless else _CRF, "preset": "medium", "x264-params": _X264}
    video = container.add_stream("libx264", rate=clip.fps, options=options)
    video.height, video.width = clip.frames.shape[1:3]
    video.pix_fmt = "yuv420p"
    context = video.codec_context
    context.colorspace = context.color_primaries = context.color_trc = _BT709
    context.color_range = ColorRange.MPEG
    audio = container.add_stream("alac" if lossless else "aac", rate=clip.sample_rate, layout="stereo")
    if not lossless:
        audio.bit_rate = _AUDIO_BITS_PER_SECOND

    sent = 0
    for index, pixels in enumerate(clip.frames):
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        frame = frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709)
        frame.pts, frame.time_base = index, Fraction(1, clip.fps)
        container.mux(video.encode(frame))
        # The sound of a second follows its pictures, so that the muxer need not hold one of the two back.
        if (index + 1) % clip.fps == 0:
            end = (index + 1) * clip.sample_rate // clip.fps
            _send_sound(container, audio, clip, sent, end)
            sent = end
    _send_sound(container, audio, clip, sent, clip.waveform.shape[1])
    container.mux(video.encode(None))
    container.mux(audio.encode(None))


def _send_sound(container: Any, stream: Any, clip: Clip, start: int, end: int) -> None:
    samples = np.ascontiguousarray(clip.waveform[:, start:end])
    if not samples.shape[1]:
        return
    if stream.codec_context.format.name == "s32p":
        samples = np.rint(samples.clip(-1, 1) * _PEAK).astype(np.int32)
    frame = av.AudioFrame.from_ndarray(samples, format=stream.codec_context.format.name, layout="stereo")
    frame.sample_rate = clip.sample_rate
    frame.pts, frame.time_base = start, Fraction(1, clip.sample_rate)
    container.mux(stream.encode(frame))
