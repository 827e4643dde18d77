"""What a build writes down of its program, beside the artifacts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import h3compile
from h3compile.plan.polynomial import Polynomial

LENGTHS = {"rows": 1000, "video_rows": 900, "audio_rows": 60, "text_rows": 40, "timesteps": 2}


@pytest.mark.parametrize(("target", "own"), [("h200", True), ("b300", False)])
def test_activations_hold_what_the_chosen_attention_returns(
    target: str, own: bool, checkpoints: Callable[[torch.dtype], Path], tmp_path: Path
) -> None:
    """A library's result lies beside what is placed; on Hopper a kernel of ours is the default."""

    def activations(name: str, providers: Mapping[str, str]) -> float:
        engine = h3compile.build(
            str(checkpoints(torch.bfloat16)),
            weightless=True,
            target=target,
            providers=providers,
            output=tmp_path / f"{name}.h3e",
        )
        return max(Polynomial.parse(text).at(LENGTHS) for text in engine.manifest.activations)

    result = 2 * 8 * 16 * LENGTHS["rows"]  # BF16, the tiny model's heads
    named = activations("named", {"attention": "cudnn"})
    assert named - activations("default", {}) == (result if own else 0)
