"""The tiny pipeline: whole, seeded, in the release's layout, and Diffusers generates with it."""

from __future__ import annotations

import hashlib
import json
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ModularPipeline
from diffusers.modular_pipelines.minimax_h3 import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)
from PIL import Image
from safetensors import safe_open
from transformers import AutoTokenizer

from h3compile.errors import H3CompileError
from h3compile.models.quiet import quiet_libraries
from h3compile.models.tiny import TRANSFORMER_CONFIG, write_tiny

FP32_MODULES = {"proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(directory)
    return directory


@pytest.fixture(scope="module")
def pipe(tiny: Path) -> Any:
    with quiet_libraries():
        pipeline = ModularPipeline.from_pretrained(str(tiny))
        pipeline.load_components(dtype={"transformer": torch.bfloat16, "transformer_ref": torch.bfloat16})
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def tensors(component: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(component.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            found |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    return found


def digests(directory: Path) -> dict[str, str]:
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


def picture(width: int = 96, height: int = 48) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_same_arguments_write_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "again")
    assert digests(tmp_path / "again") == digests(tiny)


def test_another_seed_changes_every_weight_file(tiny: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "other", seed=1)
    first, second = digests(tiny), digests(tmp_path / "other")
    weights = [name for name in first if name.endswith(".safetensors")]
    assert first.keys() == second.keys()
    assert all(first[name] != second[name] for name in weights)


def test_is_small_and_holds_the_published_components(tiny: Path) -> None:
    index = json.loads((tiny / "modular_model_index.json").read_text())
    components = {name for name, value in index.items() if isinstance(value, list)}
    assert components == {path.name for path in tiny.iterdir() if path.is_dir()}
    assert not (tiny / "model_index.json").exists()
    assert sum(file.stat().st_size for file in tiny.rglob("*") if file.is_file()) < 30e6


def test_transformers_are_sharded_mixed_and_different(tiny: Path) -> None:
    first, second = tensors(tiny / "transformer"), tensors(tiny / "transformer_ref")
    for name in ("transformer", "transformer_ref"):
        shards = {file.name for file in (tiny / name).glob("*.safetensors")}
        index = json.loads((tiny / name / "diffusion_pytorch_model.safetensors.index.json").read_text())
        assert len(shards) >= 2
        assert set(index["weight_map"].values()) == shards
    assert first.keys() == second.keys()
    for name, value in first.items():
        expected = torch.float32 if name.split(".")[0] in FP32_MODULES else torch.bfloat16
        assert value.dtype == expected, name
        assert not torch.equal(value, second[name]), name
    assert {value.dtype for value in tensors(tiny / "vae").values()} == {torch.float32}


def test_schedulers_have_the_published_shifts(tiny: Path) -> None:
    shifts = [
        json.loads((tiny / name / "scheduler_config.json").read_text())["shift"]
        for name in ("scheduler", "audio_scheduler")
    ]
    assert shifts == [12.0, 3.0]


def test_float32_is_float32_throughout(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", dtype=torch.float32)
    for name in ("transformer", "transformer_ref", "text_encoder", "vae", "audio_vae"):
        assert {value.dtype for value in tensors(tmp_path / "tiny" / name).values()} == {torch.float32}


def test_overrides_reach_both_transformers_and_leave_shared_layers_alone(tiny: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", num_layers=3, num_attention_heads=7)
    for name in ("transformer", "transformer_ref"):
        config = json.loads((tmp_path / "tiny" / name / "config.json").read_text())
        assert (config["num_layers"], config["num_attention_heads"]) == (3, 7)
    changed = tensors(tmp_path / "tiny" / "transformer")
    assert changed["transformer_blocks.0.attn.to_q.weight"].shape == (7 * 16, 80)
    name = "transformer_blocks.2.ff.net.2.weight"
    assert torch.equal(changed[name], tensors(tiny / "transformer")[name])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"num_layer": 3}, "did you mean 'num_layers'"),
        ({"in_channels": 16}, "fixed by its VAEs"),
        ({"dtype": torch.float16}, "choose torch.bfloat16 or torch.float32"),
    ],
)
def test_an_unusable_argument_is_refused(tmp_path: Path, override: dict[str, Any], message: str) -> None:
    with pytest.raises(H3CompileError, match=message):
        write_tiny(tmp_path / "tiny", **override)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(H3CompileError, match="not empty"):
        write_tiny(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    write_tiny(tmp_path / "tiny", num_layers=1)
    assert (tmp_path / "tiny" / "modular_model_index.json").exists()


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    seen: list[str] = []

    def stop_at_the_vae(name: str) -> None:
        seen.append(name)
        if name == "vae":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tiny(tmp_path / "tiny", progress=stop_at_the_vae)
    assert seen[:3] == ["tokenizer", "processor", "text_encoder"]
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(H3CompileError, match="cannot write"):
        write_tiny(tmp_path / "file" / "tiny")


def test_writing_and_loading_open_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    write_tiny(tmp_path / "tiny", num_layers=1)
    with quiet_libraries():
        pipeline = ModularPipeline.from_pretrained(str(tmp_path / "tiny"))
        pipeline.load_components()
    assert pipeline.null_component_names == []


def test_tokenizer_encodes_any_text_and_knows_the_vision_tokens(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny / "tokenizer")
    text = "A fox, 雪 and <Picture 1>: naïve\n🦊"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(tokenizer(" fox", add_special_tokens=False)["input_ids"]) == 1
    marks = ["<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"]
    config = json.loads((tiny / "text_encoder" / "config.json").read_text())
    expected = [config[f"{key}_token_id"] for key in ("vision_start", "image", "video", "vision_end")]
    assert tokenizer.convert_tokens_to_ids(marks) == expected
    assert config["text_config"]["vocab_size"] == len(tokenizer)


def test_diffusers_loads_the_mix_of_dtypes(pipe: Any, tiny: Path) -> None:
    for name in ("transformer", "transformer_ref"):
        stored = tensors(tiny / name)
        loaded = dict(getattr(pipe, name).named_parameters())
        assert loaded.keys() == stored.keys()
        assert all(loaded[key].dtype == value.dtype for key, value in stored.items())
        assert all(torch.equal(loaded[key], value) for key, value in stored.items())


@pytest.mark.parametrize("task", ["t2va", "first", "last", "both", "ref2va"])
def test_diffusers_generates_video_and_sound(pipe: Any, task: str) -> None:
    clip = np.random.default_rng(0).integers(0, 256, (40, 64, 64, 3), dtype=np.uint8)
    wave = torch.randn(1, 40_000, generator=torch.Generator().manual_seed(0)) * 0.1
    conditions: dict[str, dict[str, Any]] = {
        "t2va": {},
        "first": {"image": picture()},
        "last": {"last_image": picture()},
        "both": {"image": picture(), "last_image": picture(64, 64)},
        "ref2va": {
            "references": [
                MiniMaxH3ImageReference(image=picture()),
                MiniMaxH3VideoReference(frames=clip, audio=wave, sample_rate=32_000),
                MiniMaxH3AudioReference(audio=wave, sample_rate=32_000),
            ]
        },
    }
    result = pipe(
        prompt="a fox runs through the snow",
        height=64,
        width=64,
        num_frames=124,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        output=["videos", "audio", "sampling_rate"],
        **conditions[task],
    )
    video, audio = result["videos"], result["audio"]
    assert video.shape == (1, 124, 64, 64, 3)
    assert audio.shape == (1, 2, round(124 / 24 * 40) * 800)
    assert result["sampling_rate"] == 32_000
    # A picture, not a flat or clipped field; a sound, neither silent nor clipped.
    assert np.isfinite(video).all()
    assert 0.1 < video.std() < 0.4
    assert (video == 0).mean() + (video == 1).mean() < 0.3
    assert video.std(axis=1).mean() > 0.05
    assert 0.02 < audio.std() < 0.4
    assert (audio.abs() == 1).float().mean() < 0.01


def test_prompt_and_timestep_reach_the_output(tiny: Path, pipe: Any) -> None:
    noise = torch.Generator().manual_seed(0)
    rows = {"text": 5, "audio": 6, "video": 8}
    bounds = torch.tensor([0, *rows.values()]).cumsum(0).tolist()
    indices = [torch.arange(start, end) for start, end in pairwise(bounds)]
    inputs = {
        "hidden_states": torch.randn(1, rows["video"], 96, generator=noise),
        "audio_hidden_states": torch.randn(1, rows["audio"], 32, generator=noise),
        "timestep_indices": torch.zeros(bounds[-1], dtype=torch.long),
        "token_tags": torch.tensor([1] * 5 + [2] * 6 + [0] * 8),
        "position_ids": torch.rand(bounds[-1], 3, generator=noise) * 30,
        "text_indices": indices[0],
        "audio_indices": indices[1],
        "video_indices": indices[2],
        "return_dict": False,
    }
    text, other = (
        torch.randn(1, rows["text"], int(TRANSFORMER_CONFIG["text_dim"]), generator=noise) for _ in range(2)
    )

    def velocity(text: torch.Tensor, t: float) -> torch.Tensor:
        with torch.no_grad():
            video = pipe.transformer(encoder_hidden_states=text, timestep=torch.tensor([t]), **inputs)[0]
        return video.float()

    base = velocity(text, 0.0)
    assert 0.5 < base.std() < 3.0
    assert (velocity(other, 0.0) - base).std() > 0.05 * base.std()
    assert (velocity(text, 0.5) - base).std() > 0.1 * base.std()
