"""`run --gpus`: starting ranks, ending all of them when one fails, and saying once why."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from h3compile.cli.clip import Job
from h3compile.cli.outcome import Outcome, first_reason, outcome_of
from h3compile.cli.ranks import ranks_of, run_ranks
from h3compile.engine.manifest import Manifest, ParallelRecord
from h3compile.errors import H3CompileError, Interrupted, RankFailure
from h3compile.models.request import Request

BEGIN = """
import os, signal, sys, time
from h3compile.cli.rank import attend
from h3compile.errors import H3CompileError, RankFailure
rank = int(os.environ["RANK"])

def work(job):
    with open(f"{job}/pid.{rank}", "w") as file:
        file.write(str(os.getpid()))
    act(job)
"""

Ranks = Callable[[str], None]


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    """A function that runs the body of ``act(job)`` on four ranks; none is left when it ends."""

    def run(body: str) -> None:
        script = tmp_path / "rank.py"
        lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
        script.write_text(f"{BEGIN}\ndef act(job):\n{lines}\nattend(work)\n")
        try:
            run_ranks(str(tmp_path), 4, command=(sys.executable, str(script)))
        finally:
            assert alive(tmp_path) == []

    return run


def alive(folder: Path) -> list[int]:
    pids = [int(path.read_text() or 0) for path in folder.glob("pid.*")]
    return [
        pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]


def test_ranks_that_end_well_say_nothing(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    ranks('print(rank, os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"])')
    assert capfd.readouterr() == ("0 4 0\n", "")


@pytest.mark.parametrize(
    ("act", "line"),
    [
        ('raise ValueError("boom")', "rank 2 failed with ValueError: boom"),
        ('raise H3CompileError("no memory", "take less")', "rank 2: no memory: take less"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 2 was ended by SIGKILL"),
        ('print("no device", file=sys.stderr); os._exit(7)', "rank 2 ended with exit code 7: no device"),
    ],
)
def test_one_rank_failing_ends_all_within_seconds(
    ranks: Ranks, capfd: pytest.CaptureFixture[str], act: str, line: str
) -> None:
    begun = time.monotonic()
    with pytest.raises(H3CompileError) as raised:
        ranks(f"if rank == 2:\n    time.sleep(0.2)\n    {act}\ntime.sleep(100)")
    assert str(raised.value).startswith(line)
    assert time.monotonic() - begun < 15
    assert capfd.readouterr() == ("", ""), "the caller says it, once"


def test_a_rank_deaf_to_requests_is_ended(ranks: Ranks) -> None:
    with pytest.raises(H3CompileError, match="rank 3 failed with KeyError"):
        ranks(
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "if rank == 3:\n    time.sleep(0.5)\n    raise KeyError(1)\ntime.sleep(100)"
        )


def test_what_ranks_were_told_counts_after_what_one_did(ranks: Ranks) -> None:
    with pytest.raises(H3CompileError) as raised:
        ranks(
            'if rank == 1:\n    time.sleep(0.4)\n    raise H3CompileError("too hot", "cool it")\n'
            'raise RankFailure("rank 1 failed: too hot", rank=1)'
        )
    assert str(raised.value) == "rank 1: too hot: cool it"


def interrupt(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_an_interrupt_is_told_to_rank_0_which_ends_the_others(ranks: Ranks, tmp_path: Path) -> None:
    interrupt(2.0)
    with pytest.raises(KeyboardInterrupt):
        ranks('try:\n    time.sleep(100)\nfinally:\n    open(f"{job}/cleaned.{rank}", "w").close()\n')
    assert sorted(path.name for path in tmp_path.glob("cleaned.*")) == [f"cleaned.{r}" for r in range(4)]


def test_a_second_interrupt_ends_all_at_once(ranks: Ranks) -> None:
    interrupt(2.0)
    interrupt(3.0)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ranks("signal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(100)")
    assert time.monotonic() - begun < 20


def test_ranks_notice_that_who_started_them_is_gone(ranks: Ranks, tmp_path: Path) -> None:
    def parent() -> None:
        ranks("time.sleep(100)")

    started = multiprocessing.get_context("fork").Process(target=parent)
    started.start()
    deadline = time.monotonic() + 20
    while len(alive(tmp_path)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(alive(tmp_path)) == 4
    started.kill()
    started.join()
    while alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RankFailure("rank 1 is gone", "look"), Outcome("others", "rank 1 is gone", "look")),
        (H3CompileError("no", "yes"), Outcome("failed", "no", "yes")),
        (KeyboardInterrupt(), Outcome("interrupt")),
        (Interrupted("stopped"), Outcome("interrupt")),
        (KeyError("x"), Outcome("bug", "KeyError: 'x'")),
    ],
)
def test_an_outcome_is_told_whole(error: BaseException, outcome: Outcome) -> None:
    assert Outcome.decode(outcome_of(error).encode()) == outcome


def test_what_every_rank_says_is_nobodys_own() -> None:
    outcomes = [Outcome("failed", "no engine", "build it")] * 2
    assert str(first_reason(outcomes, [1, 1], ["", ""])) == "no engine: build it"
    told = Outcome("others", "rank 1 came no further")
    assert str(first_reason([told, None], [1, None], ["", ""])) == "rank 1 came no further"
    assert isinstance(first_reason([Outcome("interrupt"), None], [130, 0], ["", ""]), Interrupted)


def test_a_job_is_told_whole(tmp_path: Path) -> None:
    request = Request("a kite", image=tmp_path / "a.png", references=(tmp_path / "b.png",), seed=7)
    job = Job(
        tmp_path / "e", tmp_path / "m", tmp_path / "x.mp4", request, ("a note",), "cpu", True, patience=3.0
    )
    assert Job.decode(job.encode()) == job
    assert job.on("cuda:1").device == "cuda:1"


def manifest_of(arch: str, ranks: int) -> Manifest:
    """As much of a manifest as is asked for who runs it."""
    parallel = ParallelRecord.model_construct(ulysses=ranks, ring=1) if ranks > 1 else None
    return Manifest.model_construct(arch=arch, parallel=parallel)


@pytest.mark.parametrize(
    ("arch", "device", "line"),
    [
        ("cpu-avx2", "banana", "2 ranks cannot run on banana: rank N takes the CPU: leave --device out"),
        ("cpu-avx2", "cuda", "2 ranks cannot run on cuda: rank N takes the CPU"),
        ("sm_90a", "cuda:1", "2 ranks cannot run on cuda:1: rank N takes GPU N"),
        ("sm_90a", "cpu", "2 ranks cannot run on cpu: rank N takes GPU N"),
        ("sm_90a", "cuda", "e.h3e needs 2 GPUs here and this machine has 1: run it where they are"),
    ],
)
def test_ranks_take_devices_of_their_own(
    monkeypatch: pytest.MonkeyPatch, arch: str, device: str, line: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(H3CompileError, match=line):
        ranks_of(Path("e.h3e"), manifest_of(arch, 2), None, device)
    assert ranks_of(Path("e.h3e"), manifest_of("cpu-avx2", 2), None, "cpu") == 2


def test_torchrun_starts_as_many_here_as_there_are_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on two machines of two GPUs, and four on one of those."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert ranks_of(Path("e.h3e"), manifest_of("sm_90a", 4), None, None) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(H3CompileError, match="needs 4 GPUs here and this machine has 2"):
        ranks_of(Path("e.h3e"), manifest_of("sm_90a", 4), None, None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(H3CompileError, match="runs as one process, and 2 were started: start 1"):
        ranks_of(Path("e.h3e"), manifest_of("sm_90a", 1), None, None)


@pytest.mark.slow
def test_what_fails_on_one_rank_alone_is_said_once(tmp_path: Path) -> None:
    """Under torchrun, before the ranks meet: rank 1 is given a path where nothing is."""
    script = tmp_path / "start.sh"
    script.write_text(
        '[ "$RANK" = 0 ] && exec sleep 600\n'
        f"exec {Path(sys.executable).parent}/h3compile run {tmp_path}/no.h3e --prompt x -o {tmp_path}/x.mp4\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run(
        [*command, "bash", str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert done.stderr.count("no.h3e") == 1, done.stderr
    both = script.with_name("both.sh")
    both.write_text(script.read_text().splitlines()[1] + "\n")
    done = subprocess.run(
        [*command, "bash", str(both)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr.count("no.h3e") == 1, done.stderr
