"""Text encoder and VAEs on a GPU: moved or streamed they make the clip that they make when they stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from h3compile.models.generate import generate, load_pipeline
from h3compile.models.placing import Placement
from h3compile.models.request import Request
from h3compile.models.tiny import write_tiny

pytestmark = pytest.mark.gpu
NAMES = ("text_encoder", "vae", "audio_vae")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "tiny", num_layers=2)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "tiny.png")
    return folder / "tiny"


@pytest.mark.parametrize("task", ["t2va", "fl2va"])
def test_where_components_live_changes_no_pixel_and_frees_the_device(tiny: Path, task: str) -> None:
    image = tiny.with_suffix(".png") if task == "fl2va" else None
    request = Request("a fox", image=image, width=64, height=64, steps=2)
    clips = {}
    placements: tuple[Placement, ...] = ("resident", "moved", "streamed")
    for placement in placements:
        pipe = load_pipeline(
            tiny,
            from_checkpoint=("transformer",),
            device="cuda",
            placements=dict.fromkeys(NAMES, placement),
        )
        clips[placement] = generate(pipe, request)
        there = {
            value.device.type for name in NAMES for value in getattr(pipe, name).parameters() if value.numel()
        }
        assert there == {"cuda" if placement == "resident" else "cpu"}
        again = generate(pipe, request)
        assert np.array_equal(again.frames, clips[placement].frames)
        del pipe
        torch.cuda.empty_cache()
    for placement in ("moved", "streamed"):
        assert np.array_equal(clips[placement].frames, clips["resident"].frames), placement
        assert np.array_equal(clips[placement].waveform, clips["resident"].waveform), placement
