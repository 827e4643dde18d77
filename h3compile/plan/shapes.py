"""A clip that is asked for, as sizes of the program's dims.

The formulas are H3's: 24 frames a second; the video VAE makes 5 n + 2 latent frames of 17 n + 5 frames, and
a latent frame is (width / 32) (height / 32) rows; sound is stereo with 40 latents a second a channel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from h3compile.errors import H3CompileError

__all__ = [
    "FPS",
    "LONGEST_RUN",
    "LONGEST_SERVED",
    "MULTIPLE",
    "SHORTEST",
    "Clip",
    "Task",
    "align_frames",
    "frames_of",
]

Task = Literal["t2va", "fl2va", "ref2va"]

FPS = 24
# 5 s. The last 17 n + 5 within 15 s is what Diffusers, and so `h3compile run`, takes; servers take one more.
SHORTEST = 124
LONGEST_RUN = 345
LONGEST_SERVED = 362

MULTIPLE = 32  # 16-fold compression by the video VAE times the 2x2 patch
_AUDIO_LATENTS = 40
_AUDIO_CHANNELS = 2
_REFERENCE_EDGE = 2048  # a reference picture is encoded with this short edge, whatever the canvas

# Distinct timesteps of one forward: video and audio; held key frames and references; audio references.
_TIMESTEPS: dict[Task, int] = {"t2va": 2, "fl2va": 3, "ref2va": 4}


def align_frames(frames: int) -> int:
    """The next frame count of the form 17 n + 5, what the video VAE decodes; at least 5."""
    return 17 * max(0, math.ceil((frames - 5) / 17)) + 5


def frames_of(seconds: float) -> int:
    """The frames of a clip of ``seconds``, rounded up to 17 n + 5, but never past 15 s.

    5, 10 and 15 seconds are 124, 243 and 345 frames. `H3CompileError` outside of what H3 makes.
    """
    if not 5 <= seconds <= 15:
        raise H3CompileError(f"{seconds:g} s", "H3 makes clips of 5 to 15 s")
    return min(align_frames(math.ceil(seconds * FPS)), LONGEST_RUN)


@dataclass(frozen=True)
class Clip:
    """The size of one request.

    Attributes:
        width, height: in pixels, multiples of 32.
        frames: 17 n + 5 of them.
        text_rows: rows of the encoded prompt; a picture in the prompt has rows there too.
        steps: grid points of the schedule, of which N give N - 1 forwards.
        task: ``fl2va`` has two key frames, ``ref2va`` one 16:9 reference picture, where not said otherwise.
        condition_rows: rows of key frames or references; None for those of the task.

    Raises:
        H3CompileError: no such clip can be made.
    """

    width: int = 1344
    height: int = 768
    frames: int = 124
    text_rows: int = 50
    steps: int = 50
    task: Task = "t2va"
    condition_rows: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("width", self.width), ("height", self.height)):
            if value < MULTIPLE or value % MULTIPLE:
                near = max(MULTIPLE, round(value / MULTIPLE) * MULTIPLE)
                raise H3CompileError(f"{name} {value} is not a multiple of {MULTIPLE}", f"{near} is near")
        above = align_frames(self.frames)
        if not SHORTEST <= above <= LONGEST_SERVED:
            raise H3CompileError(
                f"{self.frames} frames are {self.frames / FPS:.2f} s, and H3 makes clips of 5 to 15 s",
                f"ask for {SHORTEST} to {LONGEST_RUN} frames; some servers take {LONGEST_SERVED}",
            )
        if self.frames != above:
            raise H3CompileError(f"{self.frames} frames are not 17 n + 5", f"the next are {above}")
        if self.text_rows < 1:
            raise H3CompileError(f"{self.text_rows} text rows", "a prompt has at least one")
        if self.steps < 2:
            raise H3CompileError(f"{self.steps} steps", "give at least 2 grid points: N give N - 1 forwards")
        if self.task not in get_args(Task):
            raise H3CompileError(f"no task is called {self.task!r}", "t2va, fl2va or ref2va")
        if self.condition_rows is not None and self.condition_rows < 0:
            raise H3CompileError(f"{self.condition_rows} condition rows", "give 0 or more")
        if self.task == "t2va" and self.condition_rows:
            raise H3CompileError("t2va has no condition rows", "key frames are --task fl2va")

    @property
    def seconds(self) -> float:
        """How long the clip runs."""
        return self.frames / FPS

    @property
    def forwards(self) -> int:
        """Evaluations of the transformer."""
        return self.steps - 1

    @property
    def latent_frames(self) -> int:
        """Frames of the video latents: 5 n + 2 for 17 n + 5."""
        return (self.frames - 5) // 17 * 5 + 2

    @property
    def frame_rows(self) -> int:
        """Rows of one latent frame."""
        return self.width // MULTIPLE * (self.height // MULTIPLE)

    @property
    def conditions(self) -> int:
        """Rows that are given and not made: key frames and references."""
        if self.condition_rows is not None:
            return self.condition_rows
        match self.task:
            case "t2va":
                return 0
            case "fl2va":
                return 2 * self.frame_rows
            case "ref2va":
                return _REFERENCE_EDGE // MULTIPLE * round(_REFERENCE_EDGE * 16 / 9 / MULTIPLE)

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the program's dims; key frames and references are rows of the video input."""
        video = self.latent_frames * self.frame_rows + self.conditions
        audio = _AUDIO_CHANNELS * round(self.seconds * _AUDIO_LATENTS)
        return {
            "rows": self.text_rows + audio + video,
            "video_rows": video,
            "audio_rows": audio,
            "text_rows": self.text_rows,
            "timesteps": _TIMESTEPS[self.task],
        }

    @property
    def summary(self) -> str:
        """The clip in one line, with both meanings of the number of steps."""
        return (
            f"{self.task}, {self.width}x{self.height}, {self.frames} frames ({self.seconds:.2f} s), "
            f"{self.dims['rows']:,} rows, {self.steps} grid points = {self.forwards} forwards"
        )
