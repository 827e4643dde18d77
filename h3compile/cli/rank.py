"""One rank of `h3compile run`: a process that `h3compile.cli.ranks` or torchrun started."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import typer

from h3compile.cli.clip import Job, load_module, make_clip
from h3compile.cli.command import BUG, FAILED, INTERRUPTED
from h3compile.cli.outcome import FOLDER, READY, leave, outcome_of
from h3compile.cli.ranks import world
from h3compile.errors import H3CompileError, RankFailure

__all__ = ["attend", "main", "said_once", "take_part"]

# Seconds in which torchrun's store must answer.
_REACHED = 5

_CODES = {"failed": FAILED, "bug": BUG, "interrupt": INTERRUPTED, "others": FAILED}


@contextmanager
def said_once() -> Iterator[None]:
    """What fails in the block may fail on every rank alike: one raises it, the others end without a word."""
    try:
        yield
    except H3CompileError:
        found = world()
        if found is None or _claim(str(found[0])):
            raise
        raise typer.Exit(FAILED) from None


def take_part(job: Job) -> NoReturn:
    """Runs ``job`` as the rank the environment names, and ends the process; one rank says why it failed."""
    rank, _ = world() or (0, 1)
    _hear_signals(rank)
    _finish(lambda: run_part(job), _say_once)


def main() -> NoReturn:
    """A rank that `h3compile.cli.ranks` started; its job and its outcome are files."""
    attend(lambda text: run_part(Job.decode(text)))


def attend(work: Callable[[str], None]) -> NoReturn:
    """Runs ``work`` with the job of this rank, leaves its outcome for the parent, and ends the process."""
    rank, folder = int(os.environ["RANK"]), Path(os.environ[FOLDER])
    _hear_signals(rank)
    threading.Thread(target=_follow_parent, name="h3compile-parent", daemon=True).start()
    if rank == 0:
        (folder / READY).touch()

    _finish(lambda: work((folder / "job").read_text(encoding="utf-8")), leave)


def run_part(job: Job) -> None:
    """This rank's part of ``job``: rank 0 makes the clip, the others compute what they are sent."""
    import torch
    import torch.distributed as dist

    from h3compile.cli.console import facts, stdout
    from h3compile.cli.progress import shown
    from h3compile.engine.loader import open_engine

    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    on_cpu = open_engine(job.engine, verify=False).manifest.arch.startswith("cpu")
    if not on_cpu:
        torch.cuda.set_device(local)
    dist.init_process_group("gloo" if on_cpu else "nccl")
    job = job.on("cpu" if on_cpu else f"cuda:{local}")
    if rank == 0:
        with shown() as progress:
            rows = make_clip(job, progress, leads=True)
        stdout().print(facts(rows))
    else:
        load_module(job).follow()
    dist.destroy_process_group()


def _finish(work: Callable[[], None], tell: Callable[[BaseException], None]) -> NoReturn:
    code = 0
    try:
        work()
    except BaseException as error:
        tell(error)
        code = _CODES[outcome_of(error).kind]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Not by returning: after a failure the backends' threads may wait for ranks that are gone.
    os._exit(code)


def _hear_signals(rank: int) -> None:
    # Rank 0 decides when to stop, the others follow it.
    signal.signal(signal.SIGINT, signal.default_int_handler if rank == 0 else signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _follow_parent() -> None:
    """Ends this process, cleanly if it can, when the one that started it is gone."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(5)
    os._exit(FAILED)


def _say_once(error: BaseException) -> None:
    outcome = outcome_of(error)
    if not (error.mine if isinstance(error, RankFailure) else _claim(os.environ["RANK"])):
        return
    if outcome.kind == "interrupt":
        print("interrupted", file=sys.stderr)
        return
    kind = "bug" if outcome.kind == "bug" else "error"
    mend = f": {outcome.mend}" if outcome.mend else ""
    print(f"{kind}: rank {os.environ['RANK']}: {outcome.cause}{mend}", file=sys.stderr)


def _claim(rank: str) -> bool:
    """Whether no other rank has said yet why it failed; where nobody knows of the others, each says it."""
    from torch._C._distributed_c10d import TCPStore

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    # Torchrun's own store, which is there before the ranks meet, and after one has gone.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=_REACHED)
        )
        return bool(store.compare_set(f"h3compile/said/{attempt}", "", rank) == rank.encode())
    except (KeyError, ValueError, RuntimeError):
        return True


if __name__ == "__main__":
    main()
