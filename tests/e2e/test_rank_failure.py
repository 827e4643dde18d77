"""`h3compile run` on four ranks, as a user starts it: the clip, and what a rank that does not go on means.

And ranks that go on: after inputs that rank 0 refuses, and under another `leading`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import h3compile
from h3compile.errors import H3CompileError
from h3compile.models.mp4 import read_mp4
from h3compile.runtime.module import CompiledTransformer

# Of 8 bits: the velocities of four ranks differ from those of one in the last bits of float32.
PIXEL_BOUND = 1
VELOCITY_BOUND = 2e-6

Engines = Callable[[torch.dtype, str], Path]


def command(engine: Path, output: Path, steps: int) -> list[str]:
    main = "from h3compile.cli.main import main; main()"
    options = ["--prompt", "a red kite", "--size", "64x64", "--steps", str(steps), "--lossless"]
    return [sys.executable, "-c", main, "run", str(engine), *options, "-o", str(output)]


@pytest.mark.slow
def test_ranks_follow_another_leading_and_go_on_after_inputs_that_are_refused(
    engines: Engines,
    modules: Callable[..., CompiledTransformer],
    packed: Callable[..., dict[str, torch.Tensor]],
    on_ranks: Callable[..., list[object]],
) -> None:
    path = engines(torch.float32, "ranks4")
    requests = [
        packed("t2va", text=text, video=video, audio=14, dtype=torch.float32)
        for text, video in ((7, 37), (9, 63))
    ]
    one = modules(torch.float32, "one", "transformer")
    bad = ({"hidden_states": None}, {"encoder_hidden_states": torch.zeros(7, 64)})
    refusals = []
    for wrong in bad:
        with pytest.raises(H3CompileError) as raised:
            one(**requests[0] | wrong)
        refusals.append(str(raised.value))
    assert refusals[0] == "hidden_states is a NoneType: pass a torch.Tensor"

    def work(rank: int) -> object:
        module = h3compile.load(path)
        if rank:
            return [module.follow() for _ in requests]
        found = []
        for number, given in enumerate(requests):
            with module.leading():
                time.sleep(number)
                for wrong, line in zip(bad, refusals, strict=True):
                    with pytest.raises(H3CompileError) as raised:
                        module(**given | wrong)
                    assert str(raised.value) == line
                    found.append(module(**given, return_dict=False)[0])
        return found

    found, *followed = on_ranks(4, work)
    assert followed == [[2, 2]] * 3
    for number, given in enumerate(requests):
        expected = one(**given, return_dict=False)[0]
        for sample in found[2 * number : 2 * number + 2]:  # type: ignore[index]
            assert (sample - expected).abs().max() < VELOCITY_BOUND


@contextmanager
def started(arguments: list[str], hears_interrupts: Callable[[], None]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=hears_interrupts,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ranks_of(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    found = psutil.Process(process.pid).children()
    return {int(child.environ()["RANK"]): child for child in found if "RANK" in child.environ()}


def until(process: subprocess.Popen[str], text: str) -> list[str]:
    """The lines of stderr up to one that has ``text``."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


@pytest.mark.slow
def test_a_clip_of_four_ranks_is_that_of_one(engines: Engines, tmp_path: Path) -> None:
    clips = []
    for kind in ("one", "ranks4"):
        output = tmp_path / f"{kind}.mp4"
        done = subprocess.run(
            command(engines(torch.float32, kind), output, 4), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr and "4 grid points = 3 forwards" in done.stdout
        clips.append(read_mp4(output))
    one, four = clips
    assert np.abs(one.frames.astype(int) - four.frames.astype(int)).max() <= PIXEL_BOUND
    assert np.abs(one.waveform - four.waveform).max() < 1e-3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.mp4", "ranks4.mp4"]


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "line"),
    [
        (signal.SIGKILL, "error: rank 2 was ended by SIGKILL: "),
        (signal.SIGTERM, "error: rank 2 was interrupted"),
    ],
)
def test_a_rank_that_is_killed_ends_all_with_one_line(
    engines: Engines,
    tmp_path: Path,
    hears_interrupts: Callable[[], None],
    number: signal.Signals,
    line: str,
) -> None:
    output = tmp_path / "x.mp4"
    arguments = command(engines(torch.float32, "ranks4"), output, 900)
    with started(arguments, hears_interrupts) as process:
        before = until(process, "denoise")
        ranks = ranks_of(process)
        assert sorted(ranks) == [0, 1, 2, 3]
        time.sleep(0.5)
        begun = time.monotonic()
        ranks[2].send_signal(number)
        out, rest = process.communicate(timeout=60)
        seconds = time.monotonic() - begun
    assert process.returncode == 1
    lines = rest.splitlines()
    assert len(lines) == 1 and lines[0].startswith(line), rest
    assert out == "" and "Traceback" not in "".join(before)
    assert seconds < 20
    assert list(tmp_path.iterdir()) == []
    assert not any(rank.is_running() for rank in ranks.values())


@pytest.mark.slow
def test_ctrl_c_ends_all_after_the_step(
    engines: Engines, tmp_path: Path, hears_interrupts: Callable[[], None]
) -> None:
    arguments = command(engines(torch.float32, "ranks4"), tmp_path / "x.mp4", 900)
    with started(arguments, hears_interrupts) as process:
        until(process, "denoise")
        ranks = ranks_of(process)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert rest.count("\n") == 2 and "stopping after this step" in rest and rest.endswith("interrupted\n"), (
        rest
    )
    assert list(tmp_path.iterdir()) == []
    assert not any(rank.is_running() for rank in ranks.values())


@pytest.mark.slow
def test_another_number_of_gpus_is_refused_before_anything_starts(engines: Engines, tmp_path: Path) -> None:
    arguments = [*command(engines(torch.float32, "ranks4"), tmp_path / "x.mp4", 4), "--gpus", "2"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "was built for 4 GPUs, not 2: run it with --gpus 4, or build it with --passes 'sp(ranks=2)'\n"
    )
    assert done.stderr.count("\n") == 1
