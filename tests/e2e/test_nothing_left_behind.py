"""A build that is interrupted, or runs out of disk, leaves nothing behind."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from h3compile.cli.main import application
from h3compile.engine import writer

pytestmark = pytest.mark.slow

Checkpoints = Callable[[torch.dtype], Path]

# The real command, slowed down where it would be over before a signal arrives.
COMMAND = """
import time
from h3compile.engine.writer import EngineWriter
write = EngineWriter._write
def slowly(self, path, *arguments):
    write(self, path, *arguments)
    if path.startswith(("weights/", "tables/")):
        time.sleep(0.1)
EngineWriter._write = slowly
from h3compile.cli.main import main
main()
"""
# Phase of the build, backend, and whether to wait for a compiler to run before the signal.
MOMENTS = [
    ("trace", "eager", False),
    ("lower", "inductor", True),
    ("weights", "eager", False),
    ("tables", "eager", False),
]


def compilers_of(group: int) -> list[str]:
    """The names of the other processes in a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")
        except OSError:
            continue
        if int(fields[2].split()[2]) == group and entry.name != str(group):
            found.append(fields[0].partition("(")[2])
    return found


@pytest.mark.parametrize(("phase", "backend", "compiling"), MOMENTS, ids=[m[0] for m in MOMENTS])
def test_an_interrupt(
    phase: str,
    backend: str,
    compiling: bool,
    checkpoints: Checkpoints,
    tmp_path: Path,
    hears_interrupts: Callable[[], None],
) -> None:
    out, scratch, cache = (tmp_path / name for name in ("out", "scratch", "cache"))
    for folder in (out, scratch, cache):
        folder.mkdir()
    options = ["--model", checkpoints(torch.bfloat16), "--target", "cpu", "--backend", backend]
    child = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "build", *options, "-o", out / "deep" / "x.h3e"],
        env={**os.environ, "TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hears_interrupts,
    )
    try:
        assert child.stderr is not None
        said = next(line for line in child.stderr if f"] {phase}" in line)
        while compiling and not any("cc1plus" in name for name in compilers_of(child.pid)):
            assert child.poll() is None
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGINT)  # a terminal sends Ctrl-C to the compilers as well
        stdout, stderr = child.communicate(timeout=60)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    assert (child.returncode, stdout) == (130, ""), said + stderr
    assert stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in stderr
    assert list(out.iterdir()) == []
    assert list(scratch.iterdir()) == []
    # A compiler that a signal ends takes a moment to go, more on a busy machine.
    deadline = time.monotonic() + 30
    while compilers_of(child.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert compilers_of(child.pid) == []


# The file in which the disk fills up, and whether an engine is there that the build may replace.
FULL = {
    "graph": ("regions/", False),
    "weights": ("weights/", False),
    "tables": ("tables/", True),
    "report": ("report.html", False),
    "manifest": ("engine.json", True),
}


@pytest.mark.parametrize(("prefix", "replaced"), FULL.values(), ids=FULL)
def test_a_full_disk(
    prefix: str,
    replaced: bool,
    checkpoints: Checkpoints,
    engines: Callable[[torch.dtype, str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk fills up in the middle of a file; an engine that was to be replaced stays as it was."""
    path = tmp_path / "x.h3e"
    if replaced:
        shutil.copytree(engines(torch.bfloat16, "folded"), path)
    before = contents(tmp_path)
    write = writer._write_all

    def full(descriptor: int, chunk: bytes | memoryview) -> int:
        if f".partial/{prefix}" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            write(descriptor, memoryview(chunk)[: len(chunk) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, chunk)

    monkeypatch.setattr(writer, "_write_all", full)
    options = ["--model", checkpoints(torch.bfloat16), "--target", "cpu", "--backend", "eager", "--overwrite"]
    done = CliRunner().invoke(application(), ["build", *map(str, options), "-o", str(path)])
    assert done.exit_code == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"error: the disk is full: {prefix}")
    assert "free some space or write the engine elsewhere" in line
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Mounts a small disk in a namespace of its own: nobody needs to be root, and nothing stays mounted.
SMALL_DISK = """
mkdir "$DISK" && mount -t tmpfs -o size="$SIZE" tmpfs "$DISK" || exit 77
"$@"
code=$?
find "$DISK" -mindepth 1 > "$LEFT"
exit $code
"""


@pytest.mark.parametrize(("size", "file"), [("64k", "ir/"), ("700k", "the engine needs ")])
def test_a_small_disk(size: str, file: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A disk that is really too small: for the graphs, and for the weights, which are not begun."""
    disk, left = tmp_path / "disk", tmp_path / "left"
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", SMALL_DISK, "sh"]
    command = [sys.executable, "-c", "from h3compile.cli.main import main; main()", "build"]
    options = ["--model", checkpoints(torch.bfloat16), "--target", "cpu", "--backend", "eager"]
    done = subprocess.run(
        [*namespace, *command, *map(str, options), "-o", str(disk / "x.h3e")],
        env={**os.environ, "DISK": str(disk), "SIZE": size, "LEFT": str(left)},
        capture_output=True,
        text=True,
        check=False,
    )
    if not left.exists():
        pytest.skip(f"this machine lets no user mount a disk in a namespace: {done.stderr}")
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: the disk is full: {file}")
    assert left.read_text() == ""
