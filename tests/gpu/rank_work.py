"""A rank of test_ranks.py: a process that loads engines, runs forwards, and may fail in the midst of one.

    python rank_work.py JOB FOLDER

JOB is the JSON of a `Job`; torchrun's variables say which rank this is. The outputs are left in FOLDER as
RANK.pt, or how the rank came to its end as RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import h3compile
from h3compile.runtime.module import CompiledTransformer

FAILING = 1  # the rank that fails


@dataclass(frozen=True)
class Job:
    """``engines`` run the forwards in the file ``forwards``, on the ``group`` ranks they were built for.

    With ``bind`` the world is told its device when it is initialized. ``fail``: how rank `FAILING` ends in
    the midst of a later forward; the others are to notice within ``patience`` seconds and a few.
    """

    device: str
    engines: Sequence[str]
    forwards: str
    partition: str = "transformer"
    bind: bool = False
    fail: str | None = None
    patience: float = 60.0


def connect(job: Job, rank: int) -> torch.device:
    torch.set_num_threads(1)
    if job.device == "cpu":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device if job.bind else None)
    return device


def outputs(job: Job, forwards: Sequence[dict[str, torch.Tensor]]) -> list[tuple[list[torch.Tensor], int]]:
    """By engine all outputs one after the other, and the bytes sent."""
    found = []
    for path in job.engines:
        module = h3compile.load(path, partition=job.partition, patience=job.patience)
        made = [output.cpu() for inputs in forwards for output in module(**inputs, return_dict=False)]
        found.append((made, module.stats.bytes_sent))
    return found


def plant(module: CompiledTransformer, how: str, folder: Path) -> None:
    """Has the next forward fail in its second block, after exchanges of the first one were asked for."""
    executor = module._parts.runner._calls[2].executor
    run, calls = executor._run, 0

    def fails(arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        nonlocal calls
        calls += 1
        if calls < 2:
            return run(arguments)
        time.sleep(1)  # until it has told the others that it is in this forward
        (folder / "failed_at").write_text(str(time.time()))
        match how:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                time.sleep(1000)
        raise ValueError("boom")

    executor._run = fails


def fail(job: Job, rank: int, forwards: Sequence[dict[str, torch.Tensor]], folder: Path) -> None:
    module = h3compile.load(job.engines[0], patience=job.patience)
    for _ in range(3):
        module(**forwards[0])
    if rank == FAILING:
        assert job.fail is not None
        plant(module, job.fail, folder)
    for _ in range(3):
        module(**forwards[0])


def left(folder: Path, rank: int, work: Callable[[], object]) -> int:
    try:
        work()
    except BaseException as error:
        word = {"kind": type(error).__name__, "text": str(error), "mine": getattr(error, "mine", False)}
        (folder / f"{rank}.json").write_text(json.dumps(word))
        return 1
    return 0


def main() -> None:
    job, folder, rank = Job(**json.loads(sys.argv[1])), Path(sys.argv[2]), int(os.environ["RANK"])
    device = connect(job, rank)
    forwards = [
        {name: value.to(device) for name, value in inputs.items()}
        for inputs in torch.load(job.forwards, weights_only=True)
    ]

    def work() -> None:
        if job.fail is not None:
            fail(job, rank, forwards, folder)
        else:
            torch.save(outputs(job, forwards), folder / f"{rank}.pt")
            # Whoever ends first takes the connections of the others along.
            dist.barrier(device_ids=[rank] if device.type == "cuda" else None)

    code = left(folder, rank, work)
    sys.stderr.flush()
    # Not by returning: after a failure the backends' threads may wait for ranks that are gone.
    os._exit(code)


if __name__ == "__main__":
    main()
