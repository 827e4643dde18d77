"""What the links of several ranks carry: collectives as exchanges ask for them, and copies from the host."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rank_work import Rank

from h3compile.ops.exchange import bytes_of
from h3compile.plan import collectives

# Bytes that a rank holds before or after. At 37,760 rows each of two ranks exchanges 812 MB for heads, 271 MB
# back, and 541 MB go round; a gathered block is 771 MB.
SIZES = (1 << 12, 1 << 20, 1 << 24, 1 << 27, 271 * 10**6, 541 * 10**6, 812 * 10**6)
HOST_BYTES = 512 << 20
REPEATS = 9


def links(rank: Rank) -> None:
    """Collectives of every size, copies from pinned memory alone and all at once; of the slowest rank."""
    rank.note("topology", topology())
    rank.note("nccl", str(torch.cuda.nccl.version()) if rank.options.gpu else "gloo")
    ranks = rank.options.ranks
    for size in SIZES[:3] if not rank.options.gpu else SIZES:
        part = size // ranks
        whole, other = (torch.randint(256, (part * ranks,)).to(torch.uint8).to(rank.device) for _ in range(2))
        mine = whole[:part].clone()

        def to_all(received: torch.Tensor = other, sent: torch.Tensor = whole) -> None:
            dist.all_to_all_single(bytes_of(received), bytes_of(sent))

        def gather(received: torch.Tensor = other, sent: torch.Tensor = mine) -> None:
            dist.all_gather_into_tensor(received, sent)

        def turn(received: torch.Tensor = other, sent: torch.Tensor = whole) -> None:
            after, before = (rank.number + 1) % ranks, (rank.number - 1) % ranks
            calls = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
            for work in dist.batch_isend_irecv(calls):
                work.wait()

        moved = part * (ranks - 1)
        kinds: tuple[tuple[collectives.Kind, Callable[[], None], int], ...] = (
            ("exchange", to_all, moved),
            ("gather", gather, moved),
            ("turn", turn, size),
        )
        for kind, call, carried in kinds:
            seconds = timed(rank, call)
            predicted = collectives.seconds(rank.target, carried, kind=kind)
            rank.note(
                f"{kind} {size}",
                {
                    "us": seconds * 1e6,
                    "gb_s": carried / seconds / 1e9,
                    "predicted_us": predicted * 1e6,
                    "over_predicted": seconds / predicted,
                },
            )
        del whole, other, mine
    if rank.options.gpu:
        copies(rank)


def copies(rank: Rank) -> None:
    """Pinned memory to the device: one rank alone, all ranks at once, and all beside a gather of blocks."""
    host = torch.randint(256, (HOST_BYTES,)).to(torch.uint8).pin_memory()
    here = host.to(rank.device)
    mine = here[: HOST_BYTES // rank.options.ranks].clone()
    gathered = torch.empty_like(here)
    stream = torch.cuda.Stream()

    def copy() -> None:
        here.copy_(host, non_blocking=True)

    def alone() -> None:
        if rank.number == 0:
            copy()

    def beside() -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(8):
                dist.all_gather_into_tensor(gathered, mine)
        copy()
        torch.cuda.current_stream().wait_stream(stream)

    for name, call in (("alone", alone), ("all", copy), ("beside_gathers", beside)):
        rank.note(f"copy_{name}_gb_s", HOST_BYTES / timed(rank, call) / 1e9)


def timed(rank: Rank, call: Callable[[], None]) -> float:
    """Seconds of the slowest rank, median: on a device by its own clock."""
    samples = []
    for _ in range(REPEATS + 2):
        rank.synchronize()
        dist.barrier(group=rank.control)
        if rank.options.gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()  # the ranks meet in it, so that what is timed begins on all of them together
            start.record()
            call()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) / 1e3)
        else:
            begun = time.perf_counter()
            call()
            samples.append(time.perf_counter() - begun)
    of_all = [said for said in rank.everybody(samples[2:]) if isinstance(said, list)]
    return statistics.median(max(turn) for turn in zip(*of_all, strict=True))


def topology() -> str:
    """What the driver says of how the devices are linked."""
    try:
        said = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return said.stdout
