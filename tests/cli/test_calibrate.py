"""`calibrate`: complaints before anything is loaded, what is asked for and written, and the real thing."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
import torch

from h3compile.models.request import Request
from h3compile.program.calibration import Calibration, read_calibration
from h3compile.progress import Progress

AMAX = {"context_embedder.weight": 2.5, "transformer_blocks.0.attn.to_q.weight": 40.0}
MAIN = "from h3compile.cli.main import main; main()"


@dataclass
class Heavy:
    """Stands for Diffusers and ModelOpt; ``calls`` is what they were asked."""

    calls: list[tuple[str, list[Request], dict[str, object]]] = field(default_factory=list)
    error: BaseException | None = None

    def calibrate(
        self, model: str, requests: list[Request], *, progress: Progress, **options: object
    ) -> Calibration:
        self.calls.append((model, requests, options))
        if self.error is not None:
            raise self.error
        return Calibration(AMAX, str(options["partition"]))


@pytest.fixture
def heavy(monkeypatch: pytest.MonkeyPatch) -> Heavy:
    made, module = Heavy(), ModuleType("h3compile.models.calibrate")
    vars(module).update(calibrate=made.calibrate)
    monkeypatch.setitem(sys.modules, "h3compile.models.calibrate", module)
    return made


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "prompts come from --prompts FILE or from --prompt TEXT: give one of them"),
        (
            ["--prompt", "a", "--prompts", "list.txt"],
            "prompts come from --prompts FILE or from --prompt TEXT",
        ),
        (["--prompts", "none.txt"], "cannot read none.txt"),
        (["--prompts", "empty.txt"], "empty.txt holds no prompt: write one a line"),
        (["--prompts", "binary.txt"], "cannot read binary.txt"),
        (["--prompt", " "], "the prompt is empty"),
        (["--prompt", "a", "--size", "64"], "'64' is not a size: write WIDTHxHEIGHT, such as 1344x768"),
        (["--prompt", "a", "--size", "100x64"], "width 100 is not a multiple of 32: use 96 or 128"),
        (["--prompt", "a", "--frames", "100"], "H3 makes clips of 5 to 15 s"),
        (["--prompt", "a", "--steps", "1"], "1 steps: give 2 to 1000 grid points"),
        (["--prompt", "a", "--seed", "-1"], "seed -1 is out of range"),
        (["--prompt", "a", "--image", "none.png"], "none.png"),
        (["--prompt", "a", "-o", "old.json"], "old.json is there already: give another name, or --overwrite"),
        (["--prompt", "a", "-o", "none/c.json"], "there is no folder none: make it first"),
        (["--prompt", "a", "-o", "."], "is a folder: give the name of a file"),
    ],
)
def test_a_bad_option_is_one_line_and_loads_nothing(  # type: ignore[no-untyped-def]
    h3compile, heavy: Heavy, tmp_path: Path, monkeypatch, arguments: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.txt").write_text("a\n")
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "old.json").write_text("old")
    output = [] if "-o" in arguments else ["-o", "new.json"]
    done = h3compile("calibrate", *arguments, *output)
    assert done.exit_code == 1
    assert line in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert heavy.calls == []
    assert not (tmp_path / "new.json").exists()
    assert (tmp_path / "old.json").read_text() == "old"


def test_every_option_reaches_the_requests(h3compile, heavy: Heavy, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    prompts, output = tmp_path / "prompts.txt", tmp_path / "c.json"
    prompts.write_text("a fox\n\n  a red car, rain \r\n", encoding="utf-8")
    options = ("--size", "64x32", "--frames", "121", "--steps", "4", "--seed", "7", "--device", "cpu")
    done = h3compile("calibrate", "--model", "m", "--prompts", prompts, *options, "-o", output)
    assert done.exit_code == 0, done.stderr
    same = {"width": 64, "height": 32, "frames": 124, "steps": 4}
    assert heavy.calls == [
        (
            "m",
            [Request("a fox", seed=7, **same), Request("a red car, rain", seed=8, **same)],
            {"partition": "transformer", "device": "cpu"},
        )
    ]
    assert done.stderr.count("121 frames become 124") == 1
    assert "4 grid points = 3 forwards" in done.stdout
    assert "2, largest inputs of 2.5 to 40" in done.stdout
    assert f"--partition transformer --passes 'fp8(calibration={output})'" in done.stdout
    assert read_calibration(output).amax == AMAX
    record = json.loads(output.read_text("utf-8"))
    assert (record["model"], record["partition"], record["requests"]) == ("m", "transformer", "2")


def test_references_choose_their_partition(h3compile, heavy: Heavy, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from PIL import Image

    picture = tmp_path / "picture.png"
    Image.new("RGB", (64, 64), "red").save(picture)
    arguments = ("calibrate", "--prompt", "a", "--overwrite", "-o", tmp_path / "c.json")
    assert h3compile(*arguments, "--reference", picture).exit_code == 0
    assert h3compile(*arguments, "--image", picture, "--last-image", picture).exit_code == 0
    assert h3compile(*arguments, "--partition", "transformer_ref").exit_code == 0
    (_, (by_reference,), one), (_, (by_frames,), two), (_, _, three) = heavy.calls
    assert by_reference.references == (picture,)
    assert (by_frames.image, by_frames.last_image) == (picture, picture)
    partitions = [options["partition"] for options in (one, two, three)]
    assert partitions == ["transformer_ref", "transformer", "transformer_ref"]


def test_overwrite_replaces(h3compile, heavy: Heavy, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    output = tmp_path / "c.json"
    output.write_text("old")
    assert h3compile("calibrate", "--prompt", "a", "--overwrite", "-o", output).exit_code == 0
    assert read_calibration(output).amax == AMAX


def test_an_interrupt_leaves_what_was_there(h3compile, heavy: Heavy, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    heavy.error = KeyboardInterrupt()
    output = tmp_path / "c.json"
    done = h3compile("calibrate", "--prompt", "a", "-o", output)
    assert (done.exit_code, list(tmp_path.iterdir())) == (130, [])
    output.write_text("old")
    assert h3compile("calibrate", "--prompt", "a", "--overwrite", "-o", output).exit_code == 130
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_full_disk_is_one_line_and_leaves_nothing(  # type: ignore[no-untyped-def]
    h3compile, heavy: Heavy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    done = h3compile("calibrate", "--prompt", "a", "-o", tmp_path / "c.json")
    assert done.exit_code == 1
    assert "c.json (No space left on device): choose another place" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_the_help_states_the_defaults_of_a_request(h3compile) -> None:  # type: ignore[no-untyped-def]
    text = " ".join(h3compile("calibrate", "--help").stdout.split())
    standard = Request("a")
    for value in (f"{standard.width}x{standard.height}", standard.frames, standard.steps, standard.seed):
        assert f"[default: {value}]" in text


needs_modelopt = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None,
    reason="NVIDIA ModelOpt is not installed: pip install 'h3compile[calibrate]'",
)
SMALL = ("--prompt", "a fox", "--size", "64x64")


@needs_modelopt
@pytest.mark.slow
def test_the_real_command_speaks_for_itself_alone(
    checkpoints: Callable[[torch.dtype], Path], tmp_path: Path
) -> None:
    command = ("calibrate", "--model", checkpoints(torch.bfloat16), *SMALL, "--steps", "3", "-o", "c.json")
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *map(str, command)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(read_calibration(tmp_path / "c.json").amax) == 6 * (4 + 2) + 1
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "calibration", "requests", "linears", "took", "to"
    ]  # fmt: skip
    lines = done.stderr.splitlines()
    assert lines and all(re.match(r"\[ *[\d.]+ s\] ", line) for line in lines), done.stderr


@needs_modelopt
@pytest.mark.slow
def test_a_real_interrupt_leaves_nothing(
    checkpoints: Callable[[torch.dtype], Path], tmp_path: Path, hears_interrupts: Callable[[], None]
) -> None:
    command = ("calibrate", "--model", checkpoints(torch.bfloat16), *SMALL, "--steps", "1000", "-o", "c.json")
    child = subprocess.Popen(
        [sys.executable, "-u", "-c", MAIN, *map(str, command)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hears_interrupts,
    )
    try:
        assert child.stderr is not None
        assert any("denoise (999)" in line for line in child.stderr)
        time.sleep(0.2)
        os.kill(child.pid, signal.SIGINT)
        _, rest = child.communicate(timeout=60)
    finally:
        child.kill()
    assert (child.returncode, rest) == (130, "interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_build_with_a_truncated_calibration_is_one_line(
    checkpoints: Callable[[torch.dtype], Path], h3compile: Callable[..., object], tmp_path: Path
) -> None:
    (tmp_path / "c.json").write_text('{"format": "h3compile-calibration-1", "amax": {"proj')
    passes = f"fp8(calibration={tmp_path / 'c.json'})"
    options = (
        "--model",
        checkpoints(torch.bfloat16),
        "--target",
        "cpu",
        "--backend",
        "eager",
        "--weightless",
    )
    done = h3compile("build", *options, "--passes", passes, "-o", tmp_path / "e.h3e")
    assert done.exit_code == 1  # type: ignore[attr-defined]
    assert "error: " in done.stderr.splitlines()[-1]  # type: ignore[attr-defined]
    assert "c.json is no calibration" in done.stderr.splitlines()[-1]  # type: ignore[attr-defined]
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]
