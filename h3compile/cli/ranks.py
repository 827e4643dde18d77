"""Runs a job on several ranks of this machine: starts a process each, and ends all of them when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from h3compile.cli.outcome import DEBUG, FOLDER, READY, Outcome, first_reason
from h3compile.errors import EngineError, H3CompileError

if TYPE_CHECKING:
    from h3compile.engine.manifest import Manifest

__all__ = ["COMMAND", "ranks_of", "run_ranks", "world"]

COMMAND = (sys.executable, "-m", "h3compile.cli.rank")

_PERIOD = 0.05  # seconds between two looks at the processes
_LINGER = 1.0  # seconds in which the others may tell why they ended too
_TERM = 3.0  # seconds from a request to end to its enforcement


def ranks_of(engine: Path, manifest: Manifest, gpus: int | None, device: str | None) -> int:
    """How many ranks run an engine: as many as it was built for.

    Raises `EngineError` where ``gpus``, or the processes that torchrun started, are not as many, and
    `H3CompileError` where this machine has not the devices, or ``device`` is not what each of them takes.
    """
    count = 1 if manifest.parallel is None else manifest.parallel.ulysses * manifest.parallel.ring
    if gpus is not None and gpus != count:
        again = "-sp" if gpus == 1 else f"sp(ranks={gpus})"
        raise EngineError(
            f"{engine} was built for {count} {'GPU' if count == 1 else 'GPUs'}, not {gpus}",
            f"run it with --gpus {count}, or build it with --passes '{again}'",
        )
    started = world()
    if started is not None and started[1] != count:
        processes = "one process" if count == 1 else f"{count} processes"
        raise EngineError(
            f"{engine} runs as {processes}, and {started[1]} were started",
            f"start {count}, or build it with --passes 'sp(ranks={started[1]})'",
        )
    if count == 1:
        return count
    kind = "cpu" if manifest.arch.startswith("cpu") else "cuda"
    if device not in (None, kind):
        takes = "the CPU" if kind == "cpu" else "GPU N"
        raise H3CompileError(
            f"{count} ranks cannot run on {device}: rank N takes {takes}", "leave --device out"
        )
    if kind == "cuda":
        import torch

        here = count if started is None else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        found = torch.cuda.device_count()
        if found < here:
            raise H3CompileError(
                f"{engine} needs {here} GPUs here and this machine has {found or 'none'}",
                "run it where they are",
            )
    return count


def world() -> tuple[int, int] | None:
    """The number of this process and how many there are, where torchrun or the like started several."""
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return (rank, size) if size > 1 else None


def run_ranks(job: str, count: int, *, command: Sequence[str] = COMMAND, debug: bool = False) -> None:
    """Runs ``command`` on ``count`` ranks, each with the text ``job`` in its folder.

    Returns when all have ended well. Raises the first reason as `H3CompileError` when one did not, and
    `KeyboardInterrupt` after Ctrl-C, which rank 0 is told first: it stops after its step. A second Ctrl-C
    ends all at once. No process is left in any case, nor when this one is killed: they notice.
    """
    with tempfile.TemporaryDirectory(prefix="h3compile-ranks-") as name, _store() as port:
        folder = Path(name)
        folder.joinpath("job").write_text(job, encoding="utf-8")
        started: list[subprocess.Popen[bytes]] = []
        interrupts = _Interrupts(folder, started)
        try:
            with interrupts.heard():
                for rank in range(count):
                    started.append(_start(command, rank, count, folder, port, debug))
                _wait(started)
        finally:
            codes = [process.poll() for process in started]  # before any is ended from here
            _end(started)
        if len(codes) == count and not any(codes) and None not in codes:
            return
        _show_cursor()
        outcomes = [_outcome(folder, rank) for rank in range(count)]
        words = [_last_line(folder / f"stderr.{rank}") for rank in range(count)]
        reason = first_reason(outcomes, codes, words)
    if interrupts.count:
        raise KeyboardInterrupt
    raise reason


@contextmanager
def _store() -> Iterator[int]:
    """The port of a store that outlives every rank."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def _start(
    command: Sequence[str], rank: int, count: int, folder: Path, port: int, debug: bool
) -> subprocess.Popen[bytes]:
    # Rank 0 speaks to the user; what the others say counts only when they end without an outcome.
    with (folder / f"stderr.{rank}").open("wb") as log:
        return subprocess.Popen(
            command,
            env=_environment(os.environ, rank, count, folder, port, debug),
            stdin=subprocess.PIPE,  # its end tells a rank that this process is gone
            stdout=None if rank == 0 else subprocess.DEVNULL,
            stderr=None if rank == 0 or debug else log,
            start_new_session=True,  # a terminal's Ctrl-C comes here alone
        )


def _environment(
    own: Mapping[str, str], rank: int, count: int, folder: Path, port: int, debug: bool
) -> dict[str, str]:
    """Torchrun's variables, and defaults where the user says nothing."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # NVLink's multicast needs a fabric manager that not every machine has, and gathers do well without.
        "NCCL_NVLS_ENABLE": "0",
    }
    fixed = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        FOLDER: str(folder),
    }
    if debug:
        fixed[DEBUG] = "1"
    return {**defaults, **own, **fixed}


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended, or a moment after one has ended badly."""
    deadline = float("inf")
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if any(codes) and deadline == float("inf"):
            deadline = time.monotonic() + _LINGER
        time.sleep(_PERIOD)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends what still runs: politely, so that half a file is removed, and then at once."""
    with _deaf():
        for send in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in processes:
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        send(process)
            deadline = time.monotonic() + _TERM
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()


class _Interrupts:
    """Ctrl-C: the first is passed on to rank 0, the second raises."""

    def __init__(self, folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self.count = 0
        self._folder = folder
        self._processes = processes

    @contextmanager
    def heard(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, self._hear)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        ready = (self._folder / READY).exists()
        if self.count > 1 or not ready or self._processes[0].poll() is not None:
            raise KeyboardInterrupt
        self._processes[0].send_signal(signal.SIGINT)


@contextmanager
def _deaf() -> Iterator[None]:
    """No interrupt ends the block: it lasts seconds."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _outcome(folder: Path, rank: int) -> Outcome | None:
    try:
        return Outcome.decode((folder / f"outcome.{rank}").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _show_cursor() -> None:
    """What rank 0 drew may have hidden it, and a process that is killed does not clean up."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")
        sys.stderr.flush()


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
