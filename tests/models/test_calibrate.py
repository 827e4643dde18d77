"""Calibration: against plain hooks on Diffusers' own transformer, and in the engine that is built with it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import h3compile
from h3compile.engine.layout import view
from h3compile.engine.loader import open_engine
from h3compile.errors import BuildError, CheckpointError, H3CompileError
from h3compile.models.calibrate import calibrate, quantizable
from h3compile.models.checkpoint import find_checkpoint, open_partition
from h3compile.models.generate import denoise, load_pipeline
from h3compile.models.h3 import UNQUANTIZED_MODULES, facts_for, release_dtype
from h3compile.models.request import Request
from h3compile.models.tiny import write_tiny
from h3compile.program.calibration import Calibration, read_calibration, write_calibration

modelopt = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None,
    reason="NVIDIA ModelOpt is not installed: pip install 'h3compile[calibrate]'",
)
REQUEST = Request("a fox runs through the snow", width=64, height=64, steps=4)
# E4M3 has a relative step of 2^-3; two layers of products of two such operands.
BOUND = 0.09


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(directory, num_layers=2)
    return directory


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media") / "picture.png"
    Image.effect_noise((64, 64), 80).convert("RGB").save(path)
    return path


@pytest.fixture(scope="module")
def requests(picture: Path) -> tuple[Request, ...]:
    """Two tasks, with other prompts, seeds, sizes and schedules."""
    other = replace(REQUEST, prompt="rain", image=picture, width=96, steps=3, seed=5)
    return REQUEST, other


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Any:
    """Diffusers' pipeline with a transformer that ModelOpt never sees."""
    return load_pipeline(tiny, from_checkpoint=("transformer",))


@pytest.fixture(scope="module")
def calibration(tiny: Path, requests: tuple[Request, ...]) -> Calibration:
    return calibrate(tiny, requests, device="cpu")


@pytest.fixture(scope="module")
def calibrated(calibration: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "calibration.json"
    write_calibration(path, calibration)
    return path


@contextmanager
def hooked(module: nn.Module, hook: Callable[..., None], **options: bool) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook, **options)
    try:
        yield
    finally:
        handle.remove()


def true_maxima(pipe: Any, requests: Sequence[Request]) -> dict[str, float]:
    """The largest input of every linear of Diffusers' transformer, kept ones too, by its weight."""
    found: dict[str, float] = {}

    def watch(name: str) -> Callable[..., None]:
        def note(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
            found[name] = max(found.get(name, 0.0), inputs[0].abs().max().item())

        return note

    linears = {name: m for name, m in pipe.transformer.named_modules() if isinstance(m, nn.Linear)}
    handles = [m.register_forward_pre_hook(watch(f"{name}.weight")) for name, m in linears.items()]
    for request in requests:
        denoise(pipe, request)
    for handle in handles:
        handle.remove()
    return found


@modelopt
def test_the_maxima_are_those_that_plain_hooks_see(
    calibration: Calibration, plain: Any, requests: tuple[Request, ...]
) -> None:
    seen = true_maxima(plain, requests)
    assert calibration.amax == {name: seen[name] for name in calibration.amax}
    # Each request raises some maximum, so neither was left out.
    for request in requests:
        assert any(true_maxima(plain, [request])[name] < found for name, found in calibration.amax.items())


@modelopt
def test_every_linear_that_fp8_quantizes_and_no_other(calibration: Calibration, tiny: Path) -> None:
    partition = open_partition(find_checkpoint(str(tiny)), "transformer")
    facts = facts_for(partition.config, {key: release_dtype(key) for key in partition.tensors})
    assert len(calibration.amax) == facts.expected["fp8"]["projection"] == 6 * (2 + 2) + 1
    for name in calibration.amax:
        assert len(partition.tensors.info(name).shape) == 2
        assert not set(name.split(".")) & set(UNQUANTIZED_MODULES)


@modelopt
def test_projections_of_one_input_have_one_maximum(calibration: Calibration) -> None:
    for block in ("transformer_blocks.0", "transformer_blocks.1", "token_refiner.refiner_blocks.1"):
        maxima = [calibration.amax[f"{block}.attn.to_{part}.weight"] for part in "qkv"]
        assert len(set(maxima)) == 1
        assert maxima[0] != calibration.amax[f"{block}.attn.to_out.0.weight"]


@modelopt
def test_references_calibrate_the_other_partition(
    calibration: Calibration, tiny: Path, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = replace(REQUEST, references=(picture,), steps=2)
    other = calibrate(find_checkpoint(str(tiny)), [request], partition="transformer_ref", device="cpu")
    assert other.amax.keys() == calibration.amax.keys()
    assert other.amax != calibration.amax
    assert capsys.readouterr() == ("", "")  # ModelOpt prints and warns


class Toy(nn.Module):
    """Two linears in a row, the second of which can be passed by."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, second: bool = True) -> torch.Tensor:
        out: torch.Tensor = self.first(x)
        return self.second(out) if second else out


@modelopt
def test_what_is_collected_changes_no_output() -> None:
    from h3compile.models.input_maxima import input_maxima

    toy, x = Toy(), torch.randn(3, 16)
    expected, got = toy(x), []
    found = input_maxima(toy, ["first"], lambda model: got.append(model(x)))
    assert found == {"first": x.abs().max().item()}
    assert torch.equal(got[0], expected)


@modelopt
@pytest.mark.parametrize(
    ("linears", "value", "second", "message"),
    [
        (("first", "second"), float("nan"), True, "the input of first is not finite: check the checkpoint"),
        (("second",), float("-inf"), True, "the input of second is not finite"),
        (("first",), 0.0, True, "the input of first is zero throughout"),
        (("first", "second"), 1.0, False, "no request has reached second"),
        (("first", "third"), 1.0, True, "ModelOpt does not watch third: pip install 'h3compile"),
    ],
)
def test_an_input_that_gives_no_scale_is_named(
    linears: tuple[str, ...], value: float, second: bool, message: str
) -> None:
    from h3compile.models.input_maxima import input_maxima

    x = torch.full((3, 16), value)
    with pytest.raises(H3CompileError, match=message.replace("[", r"\[")):
        input_maxima(Toy(), linears, lambda model: model(x, second))


@modelopt
def test_a_quantizer_that_is_on_beside_ours_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from h3compile.models import input_maxima

    asked = input_maxima.mtq.quantize

    def quantize(model: nn.Module, config: dict[str, Any]) -> None:
        entries = [*config["quant_cfg"], {"quantizer_name": "second.weight_quantizer", "enable": True}]
        asked(model, {**config, "quant_cfg": entries})

    monkeypatch.setattr(input_maxima.mtq, "quantize", quantize)
    with pytest.raises(H3CompileError, match="ModelOpt watches second"):
        input_maxima.input_maxima(Toy(), ["first"], lambda model: None)


def test_without_modelopt_the_extra_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h3compile.models.input_maxima", None)
    with pytest.raises(H3CompileError, match=r"ModelOpt cannot be imported .*: pip install 'h3compile\[cal"):
        calibrate(tiny, [REQUEST], device="cpu")


@pytest.mark.parametrize(
    ("requests", "options", "message"),
    [
        ([], {}, "there is no request to calibrate with"),
        ([replace(REQUEST, width=65)], {}, "width 65 is not a multiple of 32"),
        (
            [REQUEST],
            {"partition": "transformer_ref"},
            "t2va runs on transformer, and transformer_ref is to be",
        ),
        ([REQUEST], {"device": "gpu"}, "'gpu' is not a device"),
        ([REQUEST], {"device": "cuda:99"}, "cuda:99 is not there"),
        ([REQUEST], {"device": "meta"}, "meta cannot run the transformer: name one such as"),
    ],
)
def test_what_cannot_be_calibrated(
    tiny: Path, requests: list[Request], options: dict[str, str], message: str
) -> None:
    with pytest.raises(H3CompileError, match=message):
        calibrate(tiny, requests, **({"device": "cpu"} | options))


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no model"):
        calibrate(tmp_path / "none", [REQUEST], device="cpu")


def test_names_count_step_by_step() -> None:
    model = nn.ModuleDict(
        {name: nn.Linear(2, 2) for name in ("proj_in", "audio_proj_in", "proj_inner", "proj")}
    )
    assert quantizable(model) == ("proj_inner", "proj")


Forwards = list[dict[str, Any]]


def forwards_of(pipe: Any, request: Request) -> Forwards:
    """What the transformer is called with, forward by forward."""
    found: Forwards = []

    def note(_: nn.Module, __: tuple[()], inputs: dict[str, Any]) -> None:
        copied = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        found.append(copied)

    with hooked(pipe.transformer, note, with_kwargs=True):
        denoise(pipe, request)
    return found


@pytest.fixture(scope="module")
def engines(tiny: Path, calibrated: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Engines in BF16, with dynamic scales and with calibrated ones."""
    passes = {"bf16": "", "dynamic": "fp8", "static": f"fp8(calibration={calibrated})"}
    folder = tmp_path_factory.mktemp("engines")
    for name, asked in passes.items():
        h3compile.build(
            str(tiny), passes=asked, target="cpu", backend="eager", steps=(4,), output=folder / f"{name}.h3e"
        )
    return {name: folder / f"{name}.h3e" for name in passes}


@modelopt
@pytest.mark.slow
def test_the_scales_of_an_engine_are_the_maxima_over_448(
    engines: dict[str, Path], calibration: Calibration
) -> None:
    engine = open_engine(engines["static"])
    partition = engine.manifest.partitions["transformer"]
    found: dict[str, float] = {}
    for name, record in partition.ranges.items():
        buffer = engine.load_range("transformer", name)
        scales = [slot for slot in record.slots if slot.name.endswith(".input_scale")]
        found |= {f"{name}/{slot.name}": view(buffer, slot).item() for slot in scales}
    stems = {"block": "transformer_blocks", "refiner": "token_refiner.refiner_blocks"}
    expected = {"attn.to_qkv": "attn.to_q", "attn.to_out.0": "attn.to_out.0"} | {
        name: name for name in ("ff.net.0.proj", "ff.net.2")
    }
    for region, stem in stems.items():
        for index in range(2):
            for slot, linear in expected.items():
                amax = calibration.amax[f"{stem}.{index}.{linear}.weight"]
                scale = found.pop(f"{region}.{index}/{slot}.input_scale")
                assert scale == torch.tensor(amax / 448, dtype=torch.float32).item()
    (last,) = found.values()  # the text projection
    assert last == pytest.approx(calibration.amax["context_embedder.weight"] / 448)


@modelopt
@pytest.mark.slow
def test_static_scales_are_about_as_near_to_bf16_as_dynamic_ones(
    engines: dict[str, Path], plain: Any, record_property: Callable[[str, object], None]
) -> None:
    modules = {name: h3compile.load(path, device="cpu") for name, path in engines.items()}
    # Another prompt, size, schedule and seed than it was calibrated with.
    held_out = Request("a whale sings under the ice", width=64, height=96, steps=4, seed=77)
    worst = dict.fromkeys(("dynamic", "static"), 0.0)
    for inputs in forwards_of(plain, held_out):
        wanted = modules["bf16"](**inputs)
        for name in worst:
            for got, reference in zip(modules[name](**inputs), wanted, strict=True):
                assert got.isfinite().all()
                error = (got.float() - reference.float()).norm() / reference.float().norm()
                worst[name] = max(worst[name], error.item())
    record_property("relative error", worst)
    assert 0 < worst["dynamic"] < BOUND
    assert worst["static"] < min(BOUND, 1.25 * worst["dynamic"]), worst


@modelopt
@pytest.mark.parametrize("content", ["truncated", "foreign"])
def test_another_file_is_refused(calibrated: Path, tmp_path: Path, content: str) -> None:
    path = tmp_path / "calibration.json"
    whole = calibrated.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content == "truncated" else b'{"quant_algo": "FP8"}')
    with pytest.raises(BuildError, match=r"calibration\.json is no calibration .*: make one with"):
        read_calibration(path)


@modelopt
@pytest.mark.slow
def test_a_build_of_a_deeper_model_is_refused(calibrated: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "deeper", num_layers=3)
    with pytest.raises(BuildError, match=r"has nothing for transformer_blocks\.2\.attn\.to_q\.weight"):
        h3compile.build(
            str(tmp_path / "deeper"),
            passes=f"fp8(calibration={calibrated})",
            target="cpu",
            backend="eager",
            weightless=True,
            output=tmp_path / "graphs.h3e",
        )
