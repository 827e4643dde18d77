"""What a rank of sequence parallelism has of a block, on one GPU: a half, a quarter, an eighth of it.

    bash benchmarks/on_device.sh python3 benchmarks/rank_share.py --out DIR

Of P ranks one has 1/P of the rows, in linears and row kernels, and all rows of 1/P of the heads, from the
norms of queries and keys to the end of attention. Every kernel is checked and then timed at 28, 14 and 7 of
56 heads right after its full size, back to back, on operands that the L2 cache does not hold. Of every share
the table has the rate, that over the rate of the full size, and both as the cost model predicts them; * marks
less than 0.9 of the full size. The last lines are whole blocks, of the faster one where there are two of a
kernel, without what ranks exchange.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch
from prepare import Compiled, compiled, timed
from rank_share_calls import HEADS, Ready, Subject, subjects

from h3compile.engine.machine import kernel_arch
from h3compile.ops.cubin import Kernels
from h3compile.ops.launch import Launch, Spec
from h3compile.plan.work import released
from h3compile.targets import Target, detect, find_target

RANKS, HELD = (1, 2, 4, 8), 0.9
COLD = 200e6  # bytes that calls go round in: four times an H200's L2
BATCH = 1e-3  # seconds of calls between two events


@dataclass
class Share:
    """One kernel on one of ``ranks`` ranks; rates in the unit of its line."""

    ranks: int
    predicted_ms: float
    predicted: float
    predicted_of_full: float = 1.0
    ms: float | None = None
    rate: float | None = None
    of_full: float | None = None
    held: bool | None = None  # at least 0.9 of the full size
    error: float | None = None
    wrong: bool = False

    def text(self) -> str:
        expected = f"({self.predicted:6.0f} {self.predicted_of_full:4.2f})"
        if self.rate is None or self.of_full is None:
            return expected
        mark = " " if self.held else "*"
        return f"{self.rate:6.0f} {self.of_full:4.2f}{mark} {expected}{' WRONG' if self.wrong else ''}"


@dataclass
class Line:
    """A row of the table: a kernel, and its shares."""

    name: str
    unit: str
    places: Mapping[str, tuple[int, ...]]  # in the blocks that have it, by passes
    about: str = ""  # what its kernels take, or why there is none
    failed: bool = False
    shares: list[Share] = field(default_factory=list)

    def text(self) -> str:
        return f"{self.name:28} {self.unit:7} " + " | ".join(share.text() for share in self.shares)


def predicted(subject: Subject, target: Target, rows: int) -> Line:
    """The line of a subject before anything runs."""
    line = Line(subject.name, subject.unit, subject.places)
    for ranks in RANKS:
        seconds = subject.seconds(target, rows, ranks)
        line.shares.append(
            Share(ranks, seconds * 1e3, subject.work(rows, ranks) / seconds / scale(subject.unit))
        )
    for share in line.shares:
        share.predicted_of_full = share.predicted / line.shares[0].predicted
    return line


def scale(unit: str) -> float:
    return 1e12 if unit == "TFLOP/s" else 1e9


def launches_of(ready: Ready) -> list[Launch]:
    found: list[Launch] = []
    ready.start(found.append)
    return found


def specs_of(chosen: Sequence[Subject], arch: str) -> dict[Spec, str]:
    """What the subjects launch of ours, and one that wants it."""
    found: dict[Spec, str] = {}
    for subject in chosen:
        for ranks in RANKS if subject.ours else ():
            for launch in launches_of(subject.ready(ranks, "meta", arch)):
                found.setdefault(launch.spec, subject.name)
    return found


def repeated(ready: Sequence[Ready], kernels: Kernels, count: int) -> Callable[[], None]:
    """``count`` calls that take turns among equal ones; launches of ours are made once and repeated."""
    calls: list[Callable[[], object]] = []
    for one in ready:
        launches = launches_of(one)
        calls += [
            functools.partial(_each, kernels, launches) if launches else functools.partial(one.start, kernels)
        ]
    turns = itertools.cycle(calls)

    def run() -> None:
        for call in itertools.islice(turns, count):
            call()

    return run


def _each(kernels: Kernels, launches: Sequence[Launch]) -> None:
    for launch in launches:
        kernels(launch)


def measure(subject: Subject, line: Line, kernels: Kernels, arch: str, rows: int, seconds: float) -> None:
    """Checks every share of ``subject`` and times them one right after the other."""
    runs: list[Callable[[], None]] = []
    counts: list[int] = []
    for share in line.shares:
        copies = math.ceil(COLD / subject.bytes(rows, share.ranks))
        torch.manual_seed(0)
        ready = [subject.ready(share.ranks, "cuda", arch) for _ in range(copies)]
        share.error = ready[0].error(ready[0].start(kernels))
        share.wrong = not share.error <= ready[0].bound
        counts.append(max(copies, math.ceil(BATCH / (share.predicted_ms / 1e3))))
        runs.append(repeated(ready, kernels, counts[-1]))
    for share, run, count in zip(line.shares, runs, counts, strict=True):
        share.ms = timed(run, seconds) / count
        share.rate = subject.work(rows, share.ranks) / (share.ms / 1e3) / scale(subject.unit)
        share.of_full = share.rate / (line.shares[0].rate or share.rate)
        share.held = share.of_full >= HELD


def blocks(lines: Sequence[Line], milliseconds: Callable[[Share], float | None]) -> dict[str, list[float]]:
    """By passes, the milliseconds of all kernels of a block for each share, of the faster of two.

    Nothing where one of them is missing.
    """
    found: dict[str, list[float]] = {}
    for passes in dict.fromkeys(passes for line in lines for passes in line.places):
        best: dict[tuple[int, ...], list[float]] = {}
        own = [(line.places[passes], line) for line in lines if passes in line.places]
        together = {place for pieces, _ in own if len(pieces) > 1 for place in pieces}
        for pieces, line in own:
            times = [milliseconds(share) for share in line.shares]
            if None not in times and (len(pieces) > 1 or pieces[0] not in together):
                before = best.get(pieces, [math.inf] * len(times))
                best[pieces] = list(map(min, before, times))  # type: ignore[arg-type]
        places = sorted(place for pieces in best for place in pieces)
        if places == list(range(len(released(passes).regions["block"].pieces))):
            found[passes] = [sum(times) for times in zip(*best.values(), strict=True)]
    return found


def shown(lines: Sequence[Line]) -> None:
    """The sums over a block, and what P ranks make of it without what they exchange."""
    for passes, expected in blocks(lines, lambda share: share.predicted_ms).items():
        measured = blocks(lines, lambda share: share.ms).get(passes, [])
        for at, ranks in enumerate(RANKS):
            text = f"({expected[at]:7.2f} ms, {expected[0] / expected[at] / ranks:4.2f})"
            if measured:
                text = (
                    f"{measured[at]:7.2f} ms, {measured[0] / measured[at] / ranks:4.2f} of 1/{ranks} {text}"
                )
            print(f"block {passes:10} 1/{ranks} {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for rank_share.json")
    parser.add_argument("--rows", type=int, default=37_760, help="of the sequence, a multiple of 8")
    parser.add_argument("--only", default=".", help="regular expression over the names of kernels")
    parser.add_argument("--seconds", type=float, default=0.15, help="for each kernel and share")
    parser.add_argument("--compile-only", metavar="ARCH", help="such as sm_90a; needs no GPU")
    options = parser.parse_args()
    if options.rows % max(RANKS):
        parser.error(f"{options.rows} rows cannot be shared evenly")
    torch.set_grad_enabled(False)
    started, arch = time.perf_counter(), options.compile_only
    if arch is None:
        arch = kernel_arch(torch.device("cuda", 0))
    target = detect() if options.compile_only is None else find_target("h200")
    chosen = [subject for subject in subjects(options.rows) if re.search(options.only, subject.name)]
    lines = {subject.name: predicted(subject, target, options.rows) for subject in chosen}
    wanted = specs_of(chosen, arch)
    with tempfile.TemporaryDirectory() as name:
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
            ready = list(pool.map(functools.partial(compiled, arch=arch, folder=Path(name)), wanted))
        for one in ready:
            lines[wanted[one.spec]].failed |= one.binary is None
            lines[wanted[one.spec]].about = one.about
        print(f"{arch}: {len(ready)} kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)
        told(target, options.rows)
        if options.compile_only is None:
            run_all(chosen, lines, ready, arch, options.rows, options.seconds)
        else:
            for line in lines.values():
                print(line.text(), line.about, flush=True)
    shown(list(lines.values()))
    options.out.mkdir(parents=True, exist_ok=True)
    about = {
        "device": arch if options.compile_only else torch.cuda.get_device_name(),
        "target": target.name,
        "torch": torch.__version__,
        "rows": options.rows,
        "heads": HEADS,
        "blocks_ms": blocks(list(lines.values()), lambda share: share.ms),
        "blocks_predicted_ms": blocks(list(lines.values()), lambda share: share.predicted_ms),
    }
    (options.out / "rank_share.json").write_text(
        json.dumps({**about, "lines": [asdict(line) for line in lines.values()]}, indent=1)
    )
    print(f"whole script {time.perf_counter() - started:.0f} s", flush=True)


def told(target: Target, rows: int) -> None:
    heads = " | ".join(f"1/{ranks}: {rows // ranks} rows, {HEADS // ranks} heads" for ranks in RANKS)
    print(f"rate, of the full size (both predicted, {target.name}) at {heads}", flush=True)


def run_all(
    chosen: Sequence[Subject],
    lines: dict[str, Line],
    ready: Sequence[Compiled],
    arch: str,
    rows: int,
    seconds: float,
) -> None:
    binaries = {one.spec.key: one.binary for one in ready if one.binary is not None}
    kernels = Kernels(binaries, torch.device("cuda", 0))
    for subject in chosen:
        line = lines[subject.name]
        if line.failed:
            print(f"{line.name:28} {line.about}", flush=True)
            continue
        measure(subject, line, kernels, arch, rows, seconds)
        print(line.text(), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
