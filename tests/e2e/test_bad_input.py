"""What users get wrong, through the command line: one line with cause and mend, and nothing left behind."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import h3compile
from h3compile.cli.main import application
from h3compile.errors import EngineError, H3CompileError
from h3compile.program.calibration import Calibration, write_calibration
from h3compile.runtime.module import CompiledTransformer
from h3compile.targets import find_target, present

pytestmark = pytest.mark.slow

Checkpoints = Callable[[torch.dtype], Path]
Engines = Callable[[torch.dtype, str], Path]
Damage = Callable[[Path], None]

PROGRESS = re.compile(r"\[ *\d+\.\d s\] .+")
BF16 = torch.bfloat16


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(application(), [str(argument) for argument in arguments])


def assert_one_line(done: Result, *words: str) -> None:
    """The command failed, and said why in one line that holds ``words``; the rest is progress."""
    assert done.exit_code == 1, (done.exit_code, done.stderr)
    *progress, line = done.stderr.splitlines()
    assert all(PROGRESS.fullmatch(text) for text in progress), done.stderr
    assert re.fullmatch(r"error: .+: .+", line), line
    for word in words:
        assert word in line
    assert done.stdout == ""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An empty folder to build in."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def assert_empty(folder: Path) -> None:
    assert list(folder.iterdir()) == []


# --- checkpoints ---


def first_shard(model: Path) -> Path:
    return min((model / "transformer").glob("*.safetensors"))


def truncate(model: Path) -> None:
    with first_shard(model).open("r+b") as file:
        file.truncate(first_shard(model).stat().st_size - 100)


def drop_tensor(model: Path) -> None:
    tensors = load_file(first_shard(model))
    lost = min(tensors)
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, first_shard(model))
    index = model / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    record = json.loads(index.read_text())
    del record["weight_map"][lost]
    index.write_text(json.dumps(record))


def reshape_tensor(model: Path) -> None:
    tensors = load_file(first_shard(model))
    name = min(tensors)
    tensors[name] = torch.cat([tensors[name], tensors[name]])
    save_file(tensors, first_shard(model))


def rename_class(model: Path) -> None:
    config = model / "transformer" / "config.json"
    config.write_text(config.read_text().replace("MiniMaxH3Transformer3DModel", "WanTransformer3DModel"))


def remove_shard(model: Path) -> None:
    first_shard(model).unlink()


def remove_weights(model: Path) -> None:
    for path in (model / "transformer").glob("*.safetensors*"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, ("00001-of-", "truncated")),
        (remove_shard, ("lacks 1 of", "00001-of-")),
        (drop_tensor, ("lacks 1 tensor", "download it again")),
        (reshape_tensor, ("1 tensor", "of the wrong shape", "not [")),
        (rename_class, ("config.json", "'WanTransformer3DModel'", "not of MiniMaxH3Transformer3DModel")),
        (remove_weights, ("has no safetensors file",)),
    ],
)
def test_a_damaged_checkpoint(
    damage: Damage, words: tuple[str, ...], checkpoints: Checkpoints, tmp_path: Path, out: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoints(BF16), model)
    damage(model)
    done = command("build", "--model", model, "--target", "cpu", "-o", out / "x.h3e")
    assert_one_line(done, *words)
    assert_empty(out)


def test_no_such_model(out: Path, tmp_path: Path) -> None:
    output = ("--target", "cpu", "-o", out / "x.h3e")
    assert_one_line(
        command("build", "--model", tmp_path / "none", *output), "there is no model", "give a folder"
    )
    assert_one_line(command("build", "--model", "nobody/nothing", *output), "run hf download nobody/nothing")
    (tmp_path / "empty").mkdir()
    assert_one_line(command("build", "--model", tmp_path / "empty", *output), "holds no safetensors")
    assert_empty(out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--passes", "hoits"), "unknown pass 'hoits': did you mean 'hoist'?"),
        (("--passes", "-fold-shedule"), "did you mean 'fold-schedule'?"),
        (("--passes", "-outline"), "needs 'outline': add outline, or take out"),
        (("--target", "h20000"), "'h20000': did you mean 'h200'?"),
        (("--backend", "inducter"), "'inducter': did you mean 'inductor'?"),
        (("--partition", "transfromer"), "'transfromer' is no partition: did you mean 'transformer'?"),
        (("--steps", "1"), "a schedule has at least 2 grid points"),
    ],
)
def test_an_unknown_name(arguments: tuple[str, ...], words: str, checkpoints: Checkpoints, out: Path) -> None:
    done = command("build", "--model", checkpoints(BF16), *arguments, "-o", out / "x.h3e")
    assert_one_line(done, words)
    assert_empty(out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "cpu", "--provider", "attention=cudnn"), "cpu with the backend inductor takes no prov"),
        (("--target", "b300", "--backend", "eager", "--provider", "attention=cudnn"), "the backend eager"),
        (("--target", "b300", "--provider", "attention=cuddn"), "attention has no provider 'cuddn'"),
        (("--target", "b300", "--provider", "attention=gluon"), "'gluon' cannot serve attention.default on"),
        (
            ("--target", "b300", "--provider", "sage_attention=triton"),
            "'triton' of sage_attention has nothing",
        ),
        (
            ("--target", "b300", "--passes", "sage(qk=int8)"),
            "b300 (sm_103a) multiply no integers: build with",
        ),
        (("--target", "cpu", "--passes", "skip(threshold=nan)"), "skip: threshold is nan, and must be"),
        (("--target", "cpu", "--passes", "skip(sparsity=0.5,fit=1+5000)"), "give a threshold of inf"),
    ],
)
def test_a_fast_form_that_cannot_be(
    arguments: tuple[str, ...], words: str, checkpoints: Checkpoints, out: Path
) -> None:
    assert_one_line(command("build", "--model", checkpoints(BF16), *arguments, "-o", out / "x.h3e"), words)
    assert_empty(out)


@pytest.mark.parametrize(
    ("amax", "partition", "words"),
    [
        (None, None, "is no calibration ("),
        ({"blocks.0.to_q.weight": 1.0}, "transformer", "the calibration has nothing for "),
        ({"blocks.0.to_q.weight": 1.0}, "transformer_ref", "holds the scales of transformer_ref, and transf"),
        (
            {"blocks.0.to_q.weight": 0.0},
            "transformer",
            "is no calibration, with 0.0 for blocks.0.to_q.weight",
        ),
    ],
    ids=["truncated", "another model", "another partition", "a scale of zero"],
)
def test_a_calibration_that_does_not_fit(
    amax: dict[str, float] | None,
    partition: str | None,
    words: str,
    checkpoints: Checkpoints,
    tmp_path: Path,
    out: Path,
) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, Calibration(amax or {}, partition))
    if amax is None:
        path.write_bytes(path.read_bytes()[:-20])
    options = ("--target", "cpu", "--passes", f"fp8(calibration={path})", "-o", out / "x.h3e")
    assert_one_line(command("build", "--model", checkpoints(BF16), *options), words)
    assert_empty(out)


# --- engines ---

KINDS_OF_FILE = (
    "engine.json",
    "regions/*.json",
    "regions/*.inductor/region.json",
    "regions/*.inductor/region.py",
    "regions/*.inductor/*.so",
    "weights/*/*.safetensors",
    "tables/*/*.safetensors",
    "ir/*.txt",
    "report.html",
)


def copied(engine: Path, folder: Path) -> Path:
    return Path(shutil.copytree(engine, folder / "x.h3e"))


def run(engine: Path, output: Path, *arguments: str | Path) -> Result:
    return command("run", engine, "--prompt", "a kite", "--size", "64x64", *arguments, "-o", output)


def test_every_file_is_of_a_kind(engines: Engines) -> None:
    engine = engines(BF16, "inductor")
    matched = {path for kind in KINDS_OF_FILE for path in engine.glob(kind)}
    assert matched == {path for path in engine.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", KINDS_OF_FILE)
def test_a_flipped_byte(kind: str, engines: Engines, tmp_path: Path, out: Path) -> None:
    engine = copied(engines(BF16, "inductor"), tmp_path)
    path = min(engine.glob(kind))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    name = path.relative_to(engine).as_posix()
    assert_one_line(run(engine, out / "x.mp4"), name, "build or copy the engine again")
    assert_one_line(command("inspect", "--verify", engine), name)
    with pytest.raises(EngineError, match=re.escape(name)):
        h3compile.load(engine)
    assert_empty(out)


def rewritten(engine: Path, **fields: object) -> None:
    path = engine / "engine.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields, sort_keys=True, indent=1) + "\n")


def test_a_newer_schema(engines: Engines, tmp_path: Path, out: Path) -> None:
    engine = copied(engines(BF16, "folded"), tmp_path)
    rewritten(engine, schema_version=99, invented_in_future=True)
    for done in (run(engine, out / "x.mp4"), command("inspect", engine), command("finalize", engine)):
        assert_one_line(done, "99", "upgrade h3compile")
    assert_empty(out)


def absent_target() -> str:
    return next(name for name in ("b300", "a100") if not present(find_target(name)))


def test_for_another_target(checkpoints: Checkpoints, engines: Engines, tmp_path: Path, out: Path) -> None:
    target, model = absent_target(), checkpoints(BF16)
    for backend, words in (("inductor", ("is not finished", "h3compile finalize")), ("eager", (target,))):
        engine = tmp_path / f"{backend}.h3e"
        options = ("--target", target, "--backend", backend, "--steps", "4")
        assert command("build", "--model", model, *options, "-o", engine).exit_code == 0
        assert_one_line(run(engine, out / "x.mp4"), *words)
    assert_one_line(command("finalize", tmp_path / "inductor.h3e"), f"{target}, which is not in this machine")
    done = run(engines(BF16, "folded"), out / "x.mp4", "--device", "cuda")
    assert_one_line(done, "was built for cpu", "cannot run on cuda")
    assert_empty(out)


def test_no_engine(tmp_path: Path, out: Path) -> None:
    assert_one_line(run(tmp_path / "none.h3e", out / "x.mp4"), "there is no engine at")
    assert_one_line(command("inspect", tmp_path), "is not an engine")
    assert_empty(out)


# --- requests ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--frames", "100"), "100 frames make 4.17 s, and H3 makes clips of 5 to 15 s: ask for 120 to"),
        (("--frames", "400"), "and H3 makes clips of 5 to 15 s: ask for 120 to"),
        (("--size", "100x64"), "width 100 is not a multiple of 32: use 96 or 128"),
        (("--size", "64x72"), "height 72 is not a multiple of 32: use 64 or 96"),
    ],
)
def test_a_clip_that_cannot_be_made(
    arguments: tuple[str, ...], words: str, engines: Engines, out: Path
) -> None:
    assert_one_line(run(engines(BF16, "folded"), out / "x.mp4", *arguments), words)
    assert_empty(out)


def test_rounded_frame_counts_are_told(engines: Engines, out: Path) -> None:
    done = run(engines(BF16, "folded"), out / "x.mp4", "--frames", "126", "--steps", "2")
    assert done.exit_code == 0, done.stderr
    assert "126 frames become 141 (5.88 s): the video VAE decodes 17 n + 5" in done.stderr
    assert "2 grid points = 1 forwards" in done.stdout
    assert [path.name for path in out.iterdir()] == ["x.mp4"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("token_tags", "they describe the same rows"),
        ("timestep_indices", "they describe the same rows"),
        ("position_ids", "they describe the same rows"),
        ("hidden_states", "they describe the same rows"),
        ("text_indices", "they describe the same rows"),
    ],
)
def test_row_counts_that_disagree(
    name: str,
    words: str,
    modules: Callable[[torch.dtype, str, str], CompiledTransformer],
    packed: Callable[..., dict[str, torch.Tensor]],
) -> None:
    inputs = packed("t2va", text=7, video=37, audio=14)
    axis = 1 if name == "hidden_states" else 0
    inputs[name] = inputs[name].narrow(axis, 0, inputs[name].shape[axis] - 1)
    with pytest.raises(H3CompileError, match=words) as caught:
        modules(BF16, "folded", "transformer")(**inputs)
    assert "\n" not in str(caught.value)
