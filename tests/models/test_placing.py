"""Components come to the device while they work, and compute the same wherever they live."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.hooks.group_offloading import ModuleGroup
from PIL import Image
from torch import nn

from h3compile.models.clip import Clip
from h3compile.models.generate import generate, load_pipeline
from h3compile.models.mp4 import write_mp4
from h3compile.models.placing import Placement, Placing, shorten, vacate
from h3compile.models.request import Request
from h3compile.models.tiny import write_tiny

REQUEST = Request("a fox runs through the snow", width=64, height=64, steps=2)
NAMES = ("text_encoder", "vae", "audio_vae")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(directory, num_layers=2)
    return directory


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Request]:
    """One that only reads text, one with a key frame, one with a picture and a video with sound."""
    folder = tmp_path_factory.mktemp("media")
    noise = np.random.default_rng(0)
    Image.fromarray(noise.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(folder / "a.png")
    sound = (0.1 * noise.standard_normal((2, 32_000))).astype(np.float32)
    write_mp4(folder / "b.mp4", Clip(noise.integers(0, 256, (24, 64, 96, 3), dtype=np.uint8), sound))
    return {
        "t2va": REQUEST,
        "fl2va": replace(REQUEST, image=folder / "a.png"),
        "ref2va": replace(REQUEST, references=(folder / "b.mp4", folder / "a.png")),
    }


def pipeline(tiny: Path, placement: Placement) -> Any:
    return load_pipeline(
        tiny,
        from_checkpoint=("transformer", "transformer_ref"),
        placements=dict.fromkeys(NAMES, placement),
    )


@pytest.fixture(scope="module")
def expected(tiny: Path, requests: dict[str, Request]) -> dict[str, Clip]:
    pipe = pipeline(tiny, "resident")
    return {task: generate(pipe, request) for task, request in requests.items()}


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Weights that Diffusers has taken off the device read as NaN; the classes of what it brought."""
    brought: list[str] = []
    kept: dict[nn.Parameter | torch.Tensor, torch.Tensor] = {}

    def values(group: ModuleGroup) -> list[Any]:
        inside = [value for module in group.modules for value in (*module.parameters(), *module.buffers())]
        return [value for value in (*inside, *group.parameters, *group.buffers) if value.is_floating_point()]

    def onload(group: ModuleGroup) -> None:
        brought.append(type(group.onload_leader).__name__)
        for value in values(group):
            if value in kept:
                value.data = kept.pop(value)

    def offload(group: ModuleGroup) -> None:
        for value in values(group):
            if value not in kept:
                kept[value] = value.data
                value.data = torch.full_like(value.data, float("nan"))

    monkeypatch.setattr(ModuleGroup, "_onload_from_memory", onload)
    monkeypatch.setattr(ModuleGroup, "_offload_to_memory", offload)
    yield brought


@pytest.mark.slow
@pytest.mark.parametrize("task", ["t2va", "fl2va", "ref2va"])
def test_streamed_components_read_no_weight_that_is_not_there(
    tiny: Path, requests: dict[str, Request], expected: dict[str, Clip], absent: list[str], task: str
) -> None:
    pipe = pipeline(tiny, "streamed")
    absent.clear()
    clip = generate(pipe, requests[task])
    assert absent.count("Linear") > 51  # of the text encoder alone
    assert np.array_equal(clip.frames, expected[task].frames)
    assert np.array_equal(clip.waveform, expected[task].waveform)


@pytest.mark.slow
def test_the_check_can_fail(tiny: Path, absent: list[str]) -> None:
    pipe = pipeline(tiny, "streamed")
    weight = pipe.text_encoder.model.language_model.layers[3].mlp.up_proj.weight
    assert bool(weight.isnan().all())


@pytest.mark.slow
@pytest.mark.parametrize("task", ["t2va", "fl2va", "ref2va"])
def test_moved_components_are_there_only_while_they_work(
    tiny: Path,
    requests: dict[str, Request],
    expected: dict[str, Clip],
    task: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = pipeline(tiny, "moved")
    modules = {name: getattr(pipe, name) for name in NAMES}
    seen: list[tuple[str, tuple[str, ...]]] = []

    def there() -> tuple[str, ...]:
        return tuple(name for name, module in modules.items() if module._hf_hook._host)

    for name, module in modules.items():
        for method in ("encode", "decode"):
            if (inner := getattr(module, method, None)) is not None:
                monkeypatch.setattr(module, method, _noting(inner, lambda n=name: seen.append((n, there()))))
    model = pipe.text_encoder.model
    model.register_forward_hook(lambda *_: seen.append(("text_encoder", there())))
    transformer = getattr(pipe, requests[task].partition)
    transformer.register_forward_hook(lambda *_: seen.append(("transformer", there())))
    clip = generate(pipe, requests[task])
    assert all(present == ((name,) if name in NAMES else ()) for name, present in seen), seen
    assert {name for name, _ in seen} == {*NAMES, "transformer"}
    assert there() == ()
    assert np.array_equal(clip.frames, expected[task].frames)
    assert np.array_equal(clip.waveform, expected[task].waveform)


def _noting(method: Any, note: Any) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        note()
        return result

    return noted


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("offset", torch.ones(2))
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.linear(x)) + self.offset


def test_one_leaves_before_the_other_comes_and_nothing_is_copied_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # There is no second device here whose tensors a parameter could take: a copy stands for one on it.
    monkeypatch.setattr(torch.Tensor, "to", lambda value, device: value.clone())
    modules = {"a": Small(), "b": Small()}
    placing = Placing(dict.fromkeys(modules, "moved"), "cpu")
    at_home = {name: addresses(module) for name, module in modules.items()}
    for name, module in modules.items():
        placing.put(name, module)
    placing.put("c", object())  # a tokenizer

    def away() -> list[str]:
        return [name for name, module in modules.items() if at_home[name].isdisjoint(addresses(module))]

    assert away() == []
    for name in ("a", "a", "b", "a"):
        assert modules[name](torch.ones(2)).isfinite().all()
        assert away() == [name]
        assert modules["a"].tied.weight is modules["a"].linear.weight
    vacate({**modules, "c": object()})
    assert {name: addresses(module) for name, module in modules.items()} == at_home


def addresses(module: nn.Module) -> set[int]:
    return {value.data_ptr() for value in (*module.parameters(), *module.buffers())}


def test_bytes_decide_between_moved_and_streamed() -> None:
    whole = 4 * (4 + 2 + 2 + 2)  # the tied weight counts once
    large, small = Small(), Small()
    placing = Placing({"large": whole - 1, "small": whole}, "cpu")
    placing.put("large", large)
    placing.put("small", small)
    assert not hasattr(large, "_hf_hook") and hasattr(large.linear, "_diffusers_hook")
    assert hasattr(small, "_hf_hook") and not hasattr(small.linear, "_diffusers_hook")


def test_a_resident_component_is_put_there() -> None:
    module = Small()
    Placing({}, "meta").put("a", module)
    assert module.linear.weight.device.type == "meta"


def test_what_cannot_be_streamed_is_moved(tiny: Path) -> None:
    pipe = load_pipeline(tiny, placements=dict.fromkeys(NAMES, "streamed"))
    assert hasattr(pipe.audio_vae, "_hf_hook")
    assert not hasattr(pipe.vae, "_hf_hook") and not hasattr(pipe.text_encoder, "_hf_hook")


def test_layers_above_the_state_that_is_read_are_dropped_without_a_change(tiny: Path) -> None:
    pipe = load_pipeline(tiny)
    whole = pipe.text_encoder
    layers = whole.model.language_model.layers
    config = whole.config.text_config
    layers.extend(copy.deepcopy(layers[0]) for _ in range(2))
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index
    config.num_hidden_layers = len(layers)
    tokens = torch.arange(1, 6)[None]

    def state() -> torch.Tensor:
        outputs = whole.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        return outputs.hidden_states[50]

    with torch.no_grad():
        before = state()
        shorten(whole, 50)
        assert len(layers) == config.num_hidden_layers == 51
        assert torch.equal(state(), before)
