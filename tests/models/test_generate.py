"""Generation with another module in the place of the transformer, for every task."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel, ModularPipeline
from PIL import Image
from torch import nn

from h3compile.errors import CheckpointError, H3CompileError, Interrupted
from h3compile.models.clip import Clip
from h3compile.models.generate import denoise, generate, load_pipeline
from h3compile.models.mp4 import read_mp4, write_mp4
from h3compile.models.quiet import quiet_libraries
from h3compile.models.request import Request
from h3compile.models.tiny import write_tiny

FLUX = '{"_class_name": "FluxModularPipeline", "_blocks_class_name": "FluxAutoBlocks"}'
REQUEST = Request("a fox runs through the snow", width=64, height=64, steps=4)


class Standin(nn.Module):
    """What an engine looks like to the pipeline: no ModelMixin, and another module behind it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    @property
    def config(self) -> Any:
        return self.inner.config

    def forward(
        self,
        hidden_states: torch.Tensor,
        audio_hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        timestep_indices: torch.Tensor,
        token_tags: torch.Tensor,
        position_ids: torch.Tensor,
        video_indices: torch.Tensor,
        audio_indices: torch.Tensor,
        text_indices: torch.Tensor,
        attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Any:
        self.calls += 1
        return self.inner(
            hidden_states,
            audio_hidden_states,
            encoder_hidden_states,
            timestep,
            timestep_indices,
            token_tags,
            position_ids,
            video_indices,
            audio_indices,
            text_indices,
            return_dict=return_dict,
        )


class Recorder:
    """A `Progress` that remembers."""

    def __init__(self) -> None:
        self.phases: list[list[Any]] = []
        self.notes: list[str] = []

    def phase(self, name: str, total: int | None) -> None:
        self.phases.append([name, total, 0])

    def advance(self, count: int = 1) -> None:
        self.phases[-1][2] += count

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(directory, num_layers=3)
    return directory


def standin(tiny: Path, partition: str) -> Standin:
    with quiet_libraries():
        inner = MiniMaxH3Transformer3DModel.from_pretrained(
            str(tiny), subfolder=partition, dtype=torch.bfloat16
        )
    return Standin(inner)


@pytest.fixture(scope="module")
def pipe(tiny: Path) -> Any:
    modules = {name: standin(tiny, name) for name in ("transformer", "transformer_ref")}
    return load_pipeline(tiny, **modules)


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("media")
    noise = np.random.default_rng(0)
    for name, size in (("first.png", (48, 96, 3)), ("last.png", (64, 64, 3))):
        Image.fromarray(noise.integers(0, 256, size, dtype=np.uint8)).save(folder / name)
    sound = (0.1 * noise.standard_normal((2, 32_000))).astype(np.float32)
    write_mp4(folder / "clip.mp4", Clip(noise.integers(0, 256, (24, 64, 96, 3), dtype=np.uint8), sound))
    write_mp4(folder / "short.mp4", Clip(np.zeros((12, 64, 64, 3), np.uint8), sound[:, :16_000]))
    return {path.stem: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def baseline(pipe: Any) -> Clip:
    return generate(pipe, REQUEST)


def conditioned(task: str, media: dict[str, Path]) -> Request:
    changes: dict[str, dict[str, Any]] = {
        "t2va": {},
        "first": {"image": media["first"]},
        "last": {"last_image": media["last"]},
        "both": {"image": media["first"], "last_image": media["last"]},
        "ref2va": {"references": (media["clip"], media["first"])},
    }
    return replace(REQUEST, **changes[task])


@pytest.mark.parametrize("task", ["t2va", "first", "last", "both", "ref2va"])
def test_every_task_ends_in_an_mp4(
    pipe: Any, media: dict[str, Path], task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = conditioned(task, media)
    module = getattr(pipe, request.partition)
    module.calls = 0
    recorder = Recorder()
    clip = generate(pipe, request, progress=recorder)
    assert module.calls == request.forwards == 3
    assert recorder.phases == [["encode", None, 0], ["denoise", 3, 3], ["decode", None, 0]]
    assert clip.frames.shape == (124, 64, 64, 3)
    assert clip.waveform.shape == (2, 165_600)
    assert clip.frames.std() > 20

    write_mp4(tmp_path / "out.mp4", clip)
    decoded = read_mp4(tmp_path / "out.mp4")
    assert decoded.frames.shape == clip.frames.shape
    assert (decoded.fps, decoded.sample_rate) == (24, 32_000)
    # Progress is ours to draw: the libraries stay silent.
    assert capsys.readouterr() == ("", "")


def test_the_clip_is_that_of_plain_diffusers(baseline: Clip, tiny: Path) -> None:
    with quiet_libraries():
        plain = ModularPipeline.from_pretrained(str(tiny))
        plain.load_components(dtype={"transformer": torch.bfloat16})
    expected = plain(
        prompt=REQUEST.prompt,
        width=64,
        height=64,
        num_frames=124,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        output=["videos", "audio"],
    )
    assert np.array_equal(baseline.frames, np.rint(expected["videos"][0] * 255).astype(np.uint8))
    assert np.array_equal(baseline.waveform, expected["audio"][0].numpy())


def test_partitions_come_from_the_checkpoint_when_asked(baseline: Clip, tiny: Path) -> None:
    own = load_pipeline(tiny, from_checkpoint=("transformer",))
    dtypes = {parameter.dtype for parameter in own.transformer.parameters()}
    assert dtypes == {torch.float32, torch.bfloat16}
    assert own.transformer_ref is None
    assert np.array_equal(generate(own, REQUEST).frames, baseline.frames)


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"prompt": "a red car"}, {"flow_shift": 5.0}, {"audio_flow_shift": 9.0}]
)
def test_every_setting_reaches_the_clip(pipe: Any, baseline: Clip, change: dict[str, Any]) -> None:
    assert not np.array_equal(generate(pipe, replace(REQUEST, **change)).frames, baseline.frames)


def test_a_shift_does_not_outlive_its_request(pipe: Any, baseline: Clip) -> None:
    generate(pipe, replace(REQUEST, steps=2, flow_shift=5.0, audio_flow_shift=9.0))
    assert np.array_equal(generate(pipe, REQUEST).frames, baseline.frames)


def test_rounded_frames_are_noted(pipe: Any) -> None:
    recorder = Recorder()
    clip = generate(pipe, replace(REQUEST, frames=126, steps=2), progress=recorder)
    assert len(clip.frames) == 141
    assert len(recorder.notes) == 1


def test_a_stop_between_forwards_leaves_the_pipeline_usable(pipe: Any, baseline: Clip) -> None:
    pipe.transformer.calls = 0
    with pytest.raises(Interrupted, match="after 2 of 3 forwards"):
        generate(pipe, REQUEST, should_stop=lambda: pipe.transformer.calls == 2)
    assert np.array_equal(generate(pipe, REQUEST).frames, baseline.frames)


def test_denoising_alone_ends_with_the_last_forward(pipe: Any, baseline: Clip) -> None:
    pipe.transformer.calls = 0
    recorder = Recorder()
    denoise(pipe, REQUEST, progress=recorder)
    assert pipe.transformer.calls == REQUEST.forwards
    assert recorder.phases == [["encode", None, 0], ["denoise", 3, 3]]
    assert np.array_equal(generate(pipe, REQUEST).frames, baseline.frames)


def test_values_that_are_not_finite_are_refused(pipe: Any) -> None:
    def poison(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
        return outputs[0] * float("nan"), outputs[1]

    hook = pipe.transformer.register_forward_hook(poison)
    try:
        with pytest.raises(H3CompileError, match="not finite"):
            generate(pipe, replace(REQUEST, steps=2))
    finally:
        hook.remove()


def test_a_task_without_its_partition_is_refused(tiny: Path, pipe: Any, media: dict[str, Path]) -> None:
    lone = load_pipeline(tiny, transformer=pipe.transformer)
    with pytest.raises(H3CompileError, match="needs the partition transformer_ref"):
        generate(lone, conditioned("ref2va", media))


def test_a_reference_video_that_is_too_short_is_refused(pipe: Any, media: dict[str, Path]) -> None:
    with pytest.raises(H3CompileError, match=r"short.mp4 is 0\.50 s"):
        generate(pipe, replace(REQUEST, references=(media["short"],)))


def test_a_folder_without_the_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"modular_model_index\.json"):
        load_pipeline(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot read"), (FLUX, "holds a FluxModularPipeline")],
)
def test_an_index_of_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "modular_model_index.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load_pipeline(tmp_path)


def test_a_damaged_component_is_named(tiny: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "tiny"
    shutil.copytree(tiny, damaged)
    weights = damaged / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot load vae"):
        load_pipeline(damaged)
