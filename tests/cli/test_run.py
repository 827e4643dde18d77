"""`run`: every complaint before anything is loaded, and the whole way with stand-ins for what is heavy."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from h3compile.engine.loader import open_engine
from h3compile.errors import Interrupted
from h3compile.models.clip import Clip
from h3compile.models.mp4 import read_mp4
from h3compile.models.request import Request
from h3compile.progress import Progress
from h3compile.runtime.measures import MeasuredStep


@dataclass
class Heavy:
    """Stands for the runtime and Diffusers; ``calls`` is what they were asked, in order."""

    calls: list[tuple[str, object]] = field(default_factory=list)
    steps: Callable[[Callable[[], bool]], None] = lambda stop: None
    measured: tuple[MeasuredStep, ...] = ()

    def load(self, path: Path, device: str | None, **options: object) -> torch.nn.Module:
        self.calls.append(("load", (path, device, options)))
        module = torch.nn.Identity()
        module.device = torch.device("cpu")  # type: ignore[assignment]
        module.measured = lambda: self.measured  # type: ignore[assignment]
        return module

    def load_pipeline(self, model: Path, **options: object) -> str:
        self.calls.append(("load_pipeline", (model, options)))
        return "pipe"

    def generate(
        self, pipe: str, request: Request, *, progress: Progress, should_stop: Callable[[], bool]
    ) -> Clip:
        self.calls.append(("generate", request))
        self.steps(should_stop)
        frames = np.zeros((request.frames, request.height, request.width, 3), np.uint8)
        return Clip(frames, np.zeros((2, 32_000), np.float32))


@pytest.fixture
def heavy(monkeypatch: pytest.MonkeyPatch) -> Heavy:
    made = Heavy()
    runtime, models = ModuleType("h3compile.runtime.load"), ModuleType("h3compile.models.generate")
    vars(runtime).update(load=made.load)
    vars(models).update(load_pipeline=made.load_pipeline, generate=made.generate)
    monkeypatch.setitem(sys.modules, "h3compile.runtime.load", runtime)
    monkeypatch.setitem(sys.modules, "h3compile.models.generate", models)
    return made


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["-o", "x.avi"], "cannot write x.avi: give a name that ends in .mp4"),
        (["-o", "none/x.mp4"], "there is no folder none: make it first"),
        (["--size", "64"], "'64' is not a size: write WIDTHxHEIGHT, such as 1344x768"),
        (["--size", "100x64"], "width 100 is not a multiple of 32: use 96 or 128"),
        (["--frames", "100"], "H3 makes clips of 5 to 15 s"),
        (["--steps", "1"], "1 steps: give 2 to 1000 grid points"),
        (["--prompt", " "], "the prompt is empty"),
        (["--shift", "0"], "flow shift 0.0 is not positive"),
        (["--image", "none.png"], "none.png"),
        (["--expect", "0123"], "not the expected one"),
        (["--components", "elsewhere"], "`run` has no other place for text encoder and VAEs"),
        (["--reference", "REFERENCE"], "references need the partition transformer_ref, and "),
        (["--model", "none"], "there is no checkpoint folder none: give --model FOLDER"),
        (["--report", "none/r.json"], "there is no folder none: make it first"),
        (["--report", "r.json"], "skips nothing and has nothing to report: leave --report out"),
        (["--report", "x.mp4"], "the clip and its report are both to be x.mp4: name two files"),
        ([], "does not say where the other components are: give --model FOLDER"),
    ],
)
def test_a_bad_request_is_one_line_and_loads_nothing(  # type: ignore[no-untyped-def]
    h3compile, heavy: Heavy, engine: Path, tmp_path: Path, monkeypatch, arguments: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    picture(tmp_path / "picture.png")
    given = ["picture.png" if argument == "REFERENCE" else argument for argument in arguments]
    done = h3compile("run", engine, "--prompt", "a kite", "-o", "x.mp4", *given)
    assert done.exit_code == 1
    assert line in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert heavy.calls == []
    assert not (tmp_path / "x.mp4").exists()


def picture(path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (64, 64), "red").save(path)


def test_a_clip_is_written_and_both_numbers_are_told(  # type: ignore[no-untyped-def]
    h3compile, heavy: Heavy, engine: Path, tmp_path: Path
) -> None:
    output = tmp_path / "kite.mp4"
    size = ("--size", "64x32", "--frames", "121", "--steps", "4", "--seed", "7", "--shift", "6")
    size += ("--patience", "7")
    done = h3compile(
        "run", engine, "--prompt", "a kite", "--model", tmp_path, "--device", "cpu", *size, "-o", output
    )
    assert done.exit_code == 0, done.stderr
    (_, loaded), (_, (model, options)), (_, request) = heavy.calls
    path, device, asked = loaded
    assert (path, device) == (engine, "cpu")
    lengths = {"rows": 50 + 414 + 2 * 37, "video_rows": 2 * 37, "audio_rows": 414, "text_rows": 50}
    rows = {**lengths, "timesteps": 2}
    assert asked == {"partition": "transformer", "expect": None, "rows": rows, "patience": 7.0}
    assert model == tmp_path and options["placements"] == {}
    assert isinstance(options["transformer"], torch.nn.Identity) and options["transformer_ref"] is None
    assert request == Request("a kite", width=64, height=32, frames=124, steps=4, seed=7, flow_shift=6.0)
    assert "4 grid points = 3 forwards" in done.stdout
    assert "121 frames become 124" in done.stderr
    assert read_mp4(output).frames.shape == (124, 32, 64, 3)


def test_the_digest_is_passed_on(h3compile, heavy: Heavy, engine: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    digest = open_engine(engine).digest
    small = ("--size", "32x32", "--model", tmp_path, "-o", tmp_path / "x.mp4")
    assert h3compile("run", engine, "--prompt", "a", "--expect", digest, *small).exit_code == 0
    name, (path, device, options) = heavy.calls[0]
    assert (name, path, device, options["expect"]) == ("load", engine, None, digest)


def test_an_interrupt_ends_after_the_step_and_leaves_no_file(  # type: ignore[no-untyped-def]
    h3compile, heavy: Heavy, engine: Path, tmp_path: Path
) -> None:
    finished: list[int] = []

    def steps(stop: Callable[[], bool]) -> None:
        for step in range(3):
            if stop():
                raise Interrupted("stopped between steps")
            if step == 1:
                os.kill(os.getpid(), signal.SIGINT)
            finished.append(step)

    heavy.steps = steps
    output = tmp_path / "out" / "x.mp4"
    output.parent.mkdir()
    done = h3compile("run", engine, "--prompt", "a", "--size", "32x32", "--model", tmp_path, "-o", output)
    assert finished == [0, 1]
    assert done.exit_code == 130
    assert "stopping after this step" in done.stderr and done.stderr.endswith("interrupted\n")
    assert list(output.parent.iterdir()) == []


def test_an_interrupt_after_the_last_step_writes_nothing(  # type: ignore[no-untyped-def]
    h3compile, heavy: Heavy, engine: Path, tmp_path: Path
) -> None:
    heavy.steps = lambda stop: os.kill(os.getpid(), signal.SIGINT)
    output = tmp_path / "x.mp4"
    done = h3compile("run", engine, "--prompt", "a", "--size", "32x32", "--model", tmp_path, "-o", output)
    assert (done.exit_code, output.exists()) == (130, False)


def test_what_was_skipped_is_told_and_reported(  # type: ignore[no-untyped-def]
    h3compile, heavy: Heavy, varied: Path, tmp_path: Path
) -> None:
    counts = torch.tensor([[1, 4], [3, 4]], dtype=torch.int32)
    heavy.measured = (
        MeasuredStep(1.0, {"block": "block.dense"}, dict.fromkeys(("h0", "y"), torch.zeros_like(counts[0]))),
        MeasuredStep(0.5, {}, {"h0": counts[0], "y": counts[1]}),
    )
    small = ("--size", "32x32", "--model", tmp_path, "-o", tmp_path / "x.mp4")
    done = h3compile("run", varied, "--prompt", "a", *small)
    assert done.exit_code == 0, done.stderr
    line = "50.0% of all; none in 1 of 2 steps, 50.0% in the first of the others and 50.0% in the last"
    assert f"skipped tiles  {line}" in done.stdout
    assert "report" not in done.stdout

    report = tmp_path / "skipped.json"
    assert h3compile("run", varied, "--prompt", "a", "--report", report, *small).exit_code == 0
    table = json.loads(report.read_text("utf-8"))
    assert table["calls"] == ["block.0", "block.1"]
    assert [step["skipped"] for step in table["steps"]] == [[0, 0], [1, 3]]


def test_an_engine_that_measures_nothing_says_nothing_of_it(  # type: ignore[no-untyped-def]
    h3compile, heavy: Heavy, engine: Path, tmp_path: Path
) -> None:
    small = ("--size", "32x32", "--model", tmp_path, "-o", tmp_path / "x.mp4")
    done = h3compile("run", engine, "--prompt", "a", *small)
    assert done.exit_code == 0 and "skipped" not in done.stdout


def test_the_help_states_the_defaults_of_a_request(h3compile) -> None:  # type: ignore[no-untyped-def]
    text = " ".join(h3compile("run", "--help").stdout.split())
    standard = Request("a")
    shown = (f"{standard.width}x{standard.height}", standard.frames, standard.steps, standard.seed)
    for value in (*shown, f"{standard.flow_shift:g}", f"{standard.audio_flow_shift:g}"):
        assert f"[default: {value}]" in text
