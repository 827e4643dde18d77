"""A video with its sound, in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Clip"]


@dataclass(frozen=True, eq=False)
class Clip:
    """Pictures and sound of one clip.

    Attributes:
        frames: uint8 (frames, height, width, 3), RGB.
        waveform: float32 (2, samples) in [-1, 1], left and right.
        fps: frames a second.
        sample_rate: samples a second.

    Raises:
        ValueError: an array has another shape or dtype.
    """

    frames: npt.NDArray[np.uint8]
    waveform: npt.NDArray[np.float32]
    fps: int = 24
    sample_rate: int = 32_000

    def __post_init__(self) -> None:
        frames, waveform = self.frames, self.waveform
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or not len(frames):
            raise ValueError(
                f"frames must be uint8 (frames, height, width, 3), not {frames.dtype} {frames.shape}"
            )
        if waveform.dtype != np.float32 or waveform.ndim != 2 or waveform.shape[0] != 2:
            raise ValueError(f"waveform must be float32 (2, samples), not {waveform.dtype} {waveform.shape}")

    @property
    def seconds(self) -> float:
        """How long the pictures run."""
        return len(self.frames) / self.fps
