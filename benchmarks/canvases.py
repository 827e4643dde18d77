"""The lengths that ranks are measured with, as a program and the planner take them. No torch."""

from __future__ import annotations

TEXT = 50
# Rows of a latent frame, latent frames, rows of sound. The third is too small to hide every copy behind, the
# last is odd, and small enough for a float64 evaluation.
CANVASES = {"37760": (1008, 37, 414), "73500": (1008, 72, 874), "11000": (285, 37, 414), "odd": (137, 7, 30)}


def sizes_of(canvas: str) -> dict[str, int]:
    """The lengths of a canvas at real width, two timesteps."""
    rows, frames, audio = CANVASES[canvas]
    video = rows * frames
    lengths = {"text_rows": TEXT, "audio_rows": audio, "video_rows": video}
    return {"rows": TEXT + audio + video, **lengths, "timesteps": 2}
