"""Ranks as processes with a device each: NCCL where there are two GPUs, and the same over gloo on a CPU."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import h3compile
from h3compile.cli.ranks import _environment, _store
from h3compile.models.tiny import write_tiny
from h3compile.ops import ring_attention
from h3compile.pipeline.testing import ROUNDING_BOUND, distance

Inputs = dict[str, torch.Tensor]
Built = Callable[..., Path]
Several = Callable[..., "list[End]"]

GPUS = torch.cuda.device_count()
needs_two = pytest.mark.skipif(GPUS < 2, reason=f"{GPUS} CUDA devices, and two ranks need two")
# Over gloo tests/e2e and tests/runtime have the same: here it shows that these tests do what they say.
dry = pytest.mark.skipif(os.environ.get("H3COMPILE_SHARD") != "all", reason="over gloo with all shards alone")
DEVICES = [pytest.param("cpu", marks=dry), pytest.param("cuda", marks=(pytest.mark.gpu, needs_two))]
WORK = Path(__file__).with_name("rank_work.py")

LOSSY = "fp8,sage(k_block=16),skip(threshold=1.0,until=0.8),dlo(resident=1)"
# Relative: sums in another order through four blocks. On a GPU a product of other rows is another kernel,
# which may divide sums otherwise too.
FP32_BOUND = {"cpu": 2e-6, "cuda": 1e-5}
SECONDS = 10.0  # from a failure to the end of all processes
PATIENCE = 3.0
PARTITIONS = {"t2va": "transformer", "fl2va": "transformer", "ref2va": "transformer_ref"}


def most(device: str) -> int:
    """How many ranks to start."""
    return 2 if device == "cpu" else max(count for count in (2, 4, 8) if count <= GPUS)


@dataclass
class End:
    """How a rank ended: exit code, what it left, and the seconds from the failure to its end."""

    code: int | None
    outputs: list[tuple[list[torch.Tensor], int]] = field(default_factory=list)
    kind: str = ""
    text: str = ""
    mine: bool = False
    seconds: float = math.nan
    said: str = ""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A function from device, passes and dtype to an engine of a tiny model with heads that kernels take.

    What is asked of it does not depend on who computes a rank's share; ``lowered`` takes a minute.
    """
    folder = tmp_path_factory.mktemp("ranks")
    made: dict[tuple[str, str, torch.dtype, bool], Path] = {}
    checkpoints: dict[torch.dtype, Path] = {}

    def of(device: str, passes: str, dtype: torch.dtype, lowered: bool = False) -> Path:
        if dtype not in checkpoints:
            checkpoints[dtype] = folder / str(dtype).removeprefix("torch.")
            write_tiny(checkpoints[dtype], dtype=dtype, attention_head_dim=128, rope_freq_dim=16)
        key = (device, passes, dtype, lowered)
        if key not in made:
            made[key] = folder / f"{len(made)}.h3e"
            h3compile.build(
                str(checkpoints[dtype]),
                passes=passes,
                target="auto" if device == "cuda" else "cpu",
                backend="inductor" if lowered else "eager",
                steps=(4,),
                partitions=tuple(dict.fromkeys(PARTITIONS.values())),
                output=made[key],
            )
        return made[key]

    return of


@pytest.fixture
def several(tmp_path: Path) -> Several:
    """A function that runs rank_work.py in ``count`` processes, and how each of them ended."""

    def run(
        count: int, device: str, engines: Sequence[Path], forwards: list[Inputs], **job: object
    ) -> list[End]:
        folder = tmp_path / f"ranks{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        torch.save(forwards, folder / "forwards.pt")
        word = {"device": device, "engines": [str(path) for path in engines], **job}
        word["forwards"] = str(folder / "forwards.pt")
        with _store() as port, started(count, json.dumps(word), folder, port) as processes:
            ends = wait(processes, folder, 240, failing="fail" in job)
        for rank, end in enumerate(ends):
            end.said = (folder / f"stderr.{rank}").read_text()
            if (folder / f"{rank}.json").exists():
                vars(end).update(json.loads((folder / f"{rank}.json").read_text()))
            elif "fail" not in job:
                assert end.code == 0, end.said[-4000:]
                end.outputs = torch.load(folder / f"{rank}.pt", weights_only=True)
        return ends

    return run


@contextmanager
def started(count: int, job: str, folder: Path, port: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = []
    try:
        for rank in range(count):
            with (folder / f"stderr.{rank}").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(WORK), job, str(folder)],
                        env=_environment(os.environ, rank, count, folder, port, debug=False),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait(processes: list[subprocess.Popen[bytes]], folder: Path, limit: float, failing: bool) -> list[End]:
    """Until all have ended, or those that can have: for at most `SECONDS` after the failure."""
    deadline = time.time() + limit
    ended: dict[int, float] = {}
    failed_at = math.nan
    while len(ended) < len(processes) and time.time() < deadline:
        for rank, process in enumerate(processes):
            if rank not in ended and process.poll() is not None:
                ended[rank] = time.time()
        if math.isnan(failed_at) and (folder / "failed_at").exists():
            text = (folder / "failed_at").read_text()
            if text:
                failed_at = float(text)
                deadline = failed_at + PATIENCE + SECONDS
        if failing and math.isnan(failed_at) and ended:
            break  # before it came to that
        time.sleep(0.02)
    return [
        End(process.poll(), seconds=ended.get(rank, math.inf) - failed_at)
        for rank, process in enumerate(processes)
    ]


def alone(
    path: Path, device: str, forwards: list[Inputs], partition: str = "transformer"
) -> list[torch.Tensor]:
    """What an engine of one rank gives."""
    module = h3compile.load(path, partition=partition)
    given = [{name: value.to(device) for name, value in inputs.items()} for inputs in forwards]
    return [output.cpu() for inputs in given for output in module(**inputs, return_dict=False)]


def same_on_all(ends: list[End]) -> list[list[torch.Tensor]]:
    """What rank 0 gives, by engine, once all are found to give the same bits and to have sent as much."""
    first, *others = ends
    for other in others:
        for (one, sent), (two, as_much) in zip(first.outputs, other.outputs, strict=True):
            assert all(map(torch.equal, one, two)) and sent == as_much > 0
    return [made for made, _ in first.outputs]


def ways(count: int) -> list[str]:
    """How so many ranks may share, the two of which nothing is shared twice left out."""
    found = [f"sp(ulysses={count})", f"sp(ring={count})"]
    return found if count < 4 else [*found, f"sp(ulysses=2,ring={count // 2})"]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("task", PARTITIONS)
def test_float32_is_that_of_one_rank_up_to_the_order_of_sums(
    built: Built, several: Several, requests_of: Callable[..., Iterator[Inputs]], device: str, task: str
) -> None:
    # Odd numbers of rows, one of text among them; M from 1 to 4.
    forwards = list(requests_of(task, torch.float32))
    partition = PARTITIONS[task]
    expected = alone(built(device, "", torch.float32), device, forwards, partition)
    count = most(device)
    engines = [built(device, way, torch.float32) for way in ways(count)]
    for bind in (False, True) if device == "cuda" and task == "t2va" else (False,):
        found = same_on_all(several(count, device, engines, forwards, bind=bind, partition=partition))
        for way, made in zip(ways(count), found, strict=True):
            apart = max(distance(a, b) for a, b in zip(made, expected, strict=True))
            print(f"{device}, {way}, {task}: {apart:.1e} from one rank")
            assert apart <= FP32_BOUND[device], way


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["local", "allgather"])
def test_every_pass_together_is_as_far_from_float32_as_on_one_rank(
    built: Built, several: Several, requests_of: Callable[..., Iterator[Inputs]], device: str, mode: str
) -> None:
    first, *_, last = requests_of("t2va", torch.bfloat16)
    times = (first["token_tags"] == 2).long()
    later = first | {"timestep": torch.tensor([0.0625, 0.31]), "timestep_indices": times}
    forwards = [first, later, last]
    exact = alone(built(device, "-fuse", torch.bfloat16), device, forwards)
    one = off(alone(built(device, LOSSY, torch.bfloat16), device, forwards), exact)
    lossy = LOSSY.replace("resident=1", f"resident=1,mode={mode}")
    count = most(device)
    engine = built(device, f"sp(ulysses={count}),{lossy}", torch.bfloat16)
    (made,) = same_on_all(several(count, device, [engine], forwards))
    print(f"{device}, {count} ranks, {mode}: {off(made, exact):.4f} off, one rank {one:.4f}")
    assert 0.01 < off(made, exact) <= ROUNDING_BOUND * one


def off(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The distance of all outputs together."""
    return math.hypot(*(distance(a, b) for a, b in zip(found, exact, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_gathered_blocks_and_their_pieces_give_the_same_bits(
    built: Built, several: Several, requests_of: Callable[..., Iterator[Inputs]], device: str
) -> None:
    forwards = [*requests_of("t2va", torch.bfloat16)][:3] * 2
    count = most(device)
    plans = ["", ",dlo(resident=1,mode=allgather)", ",dlo(resident=0,slots=1,mode=allgather,pieces=3)"]
    engines = [built(device, f"sp(ulysses={count}){plan}", torch.bfloat16) for plan in plans]
    whole, *gathered = same_on_all(several(count, device, engines, forwards))
    for made in gathered:
        assert all(map(torch.equal, whole, made))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "rank 1 failed with ValueError: boom"),
        ("kill", "rank 1 has ended while the others are in forward 4"),
        ("hang", f"rank 1 came no further in forward 4 for {PATIENCE:g} s"),
        ("stop", "rank 1 has given no sign of life for"),
    ],
)
def test_a_rank_that_fails_in_the_midst_of_a_step_ends_all(
    built: Built, several: Several, packed: Callable[..., Inputs], device: str, how: str, reason: str
) -> None:
    forwards = [packed("t2va", text=7, video=301, audio=14)]
    count = most(device)
    engine = built(device, f"sp(ulysses={count})", torch.bfloat16, device == "cuda")
    ends = several(count, device, [engine], forwards, fail=how, patience=PATIENCE)
    print(device, count, how, [(end.code, round(end.seconds, 2)) for end in ends])
    others = [end for rank, end in enumerate(ends) if rank != 1]
    allowed = SECONDS + (PATIENCE if how in ("hang", "stop") else 0)
    assert all(end.seconds < allowed and end.code == 1 for end in others), ends
    if how == "kill":
        assert ends[1].code == -signal.SIGKILL
    elif how != "stop":  # which nothing but its parent can end
        assert ends[1].code == 1 and ends[1].seconds < allowed, ends
    told = [end for end in others if end.kind]
    assert all(end.kind == "RankFailure" and end.text.startswith(reason) for end in told), ends
    # Gloo does not let go of who waits, so that a process ends from within, with the line.
    assert told or (device == "cpu" and how in ("hang", "stop"))
    # One rank is to say why: by the error that it raises, or by the line where its process ends from within.
    lines = [line for end in ends for line in end.said.splitlines() if line.startswith(f"error: {reason}")]
    assert sum(end.mine for end in told) + len(lines) == (how != "raise"), ends


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("rows", "cut", "width"), [(13, 5, 16), (191, 190, 128), (2001, 1000, 128)])
def test_attention_to_two_stretches_merges_to_that_to_all(
    device: str, rows: int, cut: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    exact = [torch.randn(1, 3, rows, width, generator=generator).double().to(device) for _ in range(3)]
    truth = torch.nn.functional.scaled_dot_product_attention(*exact)
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 8e-3)):
        query, key, value = (part.to(dtype) for part in exact)
        first, second = (
            ring_attention._attended(query, key[:, :, keys], value[:, :, keys])
            for keys in (slice(cut), slice(cut, None))
        )
        out, _ = ring_attention._merged(*first, *second)
        assert distance(out, truth) <= bound, dtype
