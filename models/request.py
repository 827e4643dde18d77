"""What a user asks of one generation, checked before anything large is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from h3compile.errors import H3CompileError
from h3compile.models.h3 import SHIFTS, schedule_timesteps
from h3compile.models.media import Media, probe, read_image

__all__ = ["FPS", "MAX_FRAMES", "MIN_FRAMES", "SAMPLE_RATE", "SIZE_MULTIPLE", "Request", "align_frames"]

FPS = 24
SAMPLE_RATE = 32_000
# 16-fold compression by the video VAE times the 2x2 patch.
SIZE_MULTIPLE = 32
# 5 seconds, and the last 17 n + 5 within 15: the next one, 362, is 15.08 seconds, and Diffusers refuses it.
MIN_FRAMES = 120
MAX_FRAMES = 345

# A schedule finer than this only fills memory.
_MAX_STEPS = 1000
# What the released Ref2VA partition was trained with.
_MAX_REFERENCES = 12
_MAX_OF_KIND = {Media.IMAGE: 9, Media.VIDEO: 3, Media.SOUND: 3}
_MAX_ASPECT = 4


def align_frames(frames: int) -> int:
    """The next frame count of the form 17 n + 5, what the video VAE decodes; at least 5."""
    return 17 * max(0, math.ceil((frames - 5) / 17)) + 5


@dataclass(frozen=True)
class Request:
    """One generation.

    Attributes:
        prompt: what to show and to sound.
        image, last_image: key frames the clip starts and ends with; either makes it ``fl2va``.
        references: pictures, videos and sounds in the order the model reads them; makes it ``ref2va``.
        width, height: in pixels.
        frames: at 24 a second.
        steps: grid points of the schedule, one more than there are forwards, as in Diffusers.
        seed: of the noise; the noise is drawn on the CPU, so that it is the same for every device.
        flow_shift, audio_flow_shift: shifts of the two schedules.
    """

    prompt: str
    image: Path | None = None
    last_image: Path | None = None
    references: tuple[Path, ...] = ()
    width: int = 1344
    height: int = 768
    frames: int = 124
    steps: int = 50
    seed: int = 0
    flow_shift: float = SHIFTS["video"]
    audio_flow_shift: float = SHIFTS["audio"]

    @property
    def task(self) -> str:
        """``t2va``, ``fl2va`` or ``ref2va``."""
        if self.references:
            return "ref2va"
        return "fl2va" if self.image or self.last_image else "t2va"

    @property
    def partition(self) -> str:
        """The set of weights the task runs on."""
        return "transformer_ref" if self.references else "transformer"

    @property
    def forwards(self) -> int:
        """Evaluations of the transformer: N - 1 for N grid points, less any a large shift makes equal."""
        shifts = (self.flow_shift, self.audio_flow_shift)
        return min(len(schedule_timesteps(self.steps, shift)) for shift in shifts)

    @property
    def summary(self) -> str:
        """The request in one line, with both meanings of the number of steps."""
        return (
            f"{self.task}, {self.width}x{self.height}, {self.frames} frames ({self.frames / FPS:.2f} s), "
            f"{self.steps} grid points = {self.forwards} forwards, "
            f"shifts {self.flow_shift:g} and {self.audio_flow_shift:g}, seed {self.seed}"
        )

    def resolve(self) -> tuple[Request, list[str]]:
        """The request as it will run, and what the user should be told of the difference.

        Raises:
            H3CompileError: it cannot run. Videos and sounds are opened here, but not decoded to their end.
        """
        self._check_numbers()
        self._check_conditions()
        notes: list[str] = []
        frames = align_frames(self.frames)
        if frames != self.frames:
            notes.append(
                f"{self.frames} frames become {frames} ({frames / FPS:.2f} s): the video VAE decodes 17 n + 5"
            )
        return replace(self, frames=frames), notes

    def _check_numbers(self) -> None:
        if not self.prompt.strip():
            raise H3CompileError("the prompt is empty", "say what to show")
        for name, value in (("width", self.width), ("height", self.height)):
            if value < SIZE_MULTIPLE or value % SIZE_MULTIPLE:
                raise H3CompileError(
                    f"{name} {value} is not a multiple of {SIZE_MULTIPLE}", _sizes_near(value)
                )
        if not MIN_FRAMES <= self.frames <= MAX_FRAMES:
            # A count just below 15 s is rounded up past it.
            rounded = self.frames if self.frames < MIN_FRAMES else align_frames(self.frames)
            raise H3CompileError(
                f"{self.frames} frames make {rounded / FPS:.2f} s, and H3 makes clips of 5 to 15 s",
                f"ask for {MIN_FRAMES} to {MAX_FRAMES} frames",
            )
        if not 2 <= self.steps <= _MAX_STEPS:
            raise H3CompileError(
                f"{self.steps} steps", f"give 2 to {_MAX_STEPS} grid points, of which N give N - 1 forwards"
            )
        for name, shift in (("flow shift", self.flow_shift), ("audio flow shift", self.audio_flow_shift)):
            if not (math.isfinite(shift) and shift > 0):
                raise H3CompileError(f"{name} {shift} is not positive", "the release uses 12 and 3")
        if not 0 <= self.seed < 2**63:
            raise H3CompileError(f"seed {self.seed} is out of range", "use 0 to 2^63 - 1")

    def _check_conditions(self) -> None:
        if self.references and (self.image or self.last_image):
            raise H3CompileError("key frames and references exclude each other", "give the one or the other")
        for keyframe in (self.image, self.last_image):
            if keyframe is not None:
                read_image(keyframe)
        kinds = [probe(path) for path in self.references]
        if len(kinds) > _MAX_REFERENCES:
            raise H3CompileError(f"{len(kinds)} references", f"give at most {_MAX_REFERENCES}")
        for kind, limit in _MAX_OF_KIND.items():
            if kinds.count(kind) > limit:
                raise H3CompileError(f"{kinds.count(kind)} {kind.value} references", f"give at most {limit}")
        if set(kinds) == {Media.SOUND}:
            raise H3CompileError("sound cannot be the only reference", "add a picture or a video")
        for path, kind in zip(self.references, kinds, strict=True):
            if kind is Media.IMAGE:
                _check_aspect(path)


def _check_aspect(path: Path) -> None:
    width, height = read_image(path).size
    if max(width, height) > _MAX_ASPECT * min(width, height):
        raise H3CompileError(
            f"{path} is {width}x{height}", f"crop it to within 1:{_MAX_ASPECT} and {_MAX_ASPECT}:1"
        )


def _sizes_near(value: int) -> str:
    below = max(SIZE_MULTIPLE, value // SIZE_MULTIPLE * SIZE_MULTIPLE)
    above = max(SIZE_MULTIPLE, math.ceil(value / SIZE_MULTIPLE) * SIZE_MULTIPLE)
    return f"use {below}" if below == above else f"use {below} or {above}"
