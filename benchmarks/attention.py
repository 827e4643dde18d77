"""Times and checks the attention of this package on the GPU that is here, beside that of others.

    bash benchmarks/on_device.sh python3 benchmarks/attention.py --out DIR [--only REGEX] [--rows 37760]

Kernels are compiled in parallel first. Each provider is compared with float64 attention at awkward lengths
with poisoned padding, and at full length on a slice of heads and query rows (Gaussian inputs, and inputs with
strong key-channel outliers and a key mean), then timed back to back. FLOP are 4 * rows^2 * heads * 128; bytes
are the operands of a launch. cuDNN's FP8 attention (nvidia-cudnn-frontend) is among the providers where it is
installed, and so is FlashInfer with --flashinfer: its kernels may take a minute and a half to compile. A
provider that calls a package and fails says why in its line. SageAttention is timed where it is installed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch
from attention_inputs import (
    BLOCKS,
    KINDS,
    Case,
    D,
    Inputs,
    attended,
    cases,
    make_inputs,
    provider,
    relative,
    sampled,
    stand_in,
)

from h3compile.engine.machine import kernel_arch
from h3compile.errors import BuildError, H3CompileError
from h3compile.ops.cubin import Kernels
from h3compile.ops.kernels.compile import compile_spec, usage
from h3compile.ops.launch import Binary, Launch, Run, Spec
from h3compile.ops.operator import Outputs
from h3compile.ops.sage_scales import WHOLE

LENGTHS = (1, 15, 16, 17, 63, 127, 128, 129, 191, 255, 1000)
SHORT_HEADS = 3
# Relative errors on short documents beyond which something is wrong, not rounded.
BOUNDS = {"attention": 0.006, "sage_attention": 0.16}


@dataclass
class Report:
    """A line of the table."""

    name: str
    unit: str = "TFLOP/s"
    failed: str = ""
    registers: int = 0
    stack: int = 0
    ms: float = 0.0  # back to back, with the card hot
    cool: float = 0.0  # in turns, each after a pause
    rate: float = 0.0  # of ``unit``
    errors: dict[str, float] = field(default_factory=dict)  # relative, by input
    wrong: list[tuple[int, float, bool]] = field(default_factory=list)  # valid length, error, padding zero
    skipped: float | None = None

    def line(self) -> str:
        if self.failed:
            return f"{self.name:46} {self.failed}"
        used = f"{self.registers:3} + {self.stack}" if self.registers else ""
        errors = " ".join(f"{kind} {error:.4f}" for kind, error in self.errors.items())
        skipped = "" if self.skipped is None else f" skipped {self.skipped:.3f}"
        wrong = f" WRONG {self.wrong}" if self.wrong else ""
        return (
            f"{self.name:46} {self.ms:8.3f} ms {self.rate:7.1f} {self.unit:7} (cool {self.cool:7.3f})"
            f" {used:9} {errors}{skipped}{wrong}"
        )


def timed(runs: dict[str, Callable[[], object]], rounds: int, budget: float) -> dict[str, float]:
    """Median milliseconds of each callable, taking turns."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    started = time.perf_counter()
    for turn in range(rounds + 1):
        for name, function in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            if turn:
                samples[name].append(begin.elapsed_time(end))
        if turn and time.perf_counter() - started > budget:
            break
    return {name: statistics.median(values) for name, values in samples.items()}


def timed_hot(
    runs: dict[str, Callable[[], object]], cool: dict[str, float], seconds: float
) -> dict[str, float]:
    """Median milliseconds of launches back to back, of the second half of ``seconds``.

    A card at its power limit lowers its clocks: inside a model nothing runs as fast as alone.
    """
    found: dict[str, float] = {}
    for name, function in runs.items():
        count = max(4, math.ceil(seconds * 1000 / cool[name]))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            function()
            event.record()
        events[-1].synchronize()
        samples = [one.elapsed_time(other) for one, other in itertools.pairwise(events)]
        found[name] = statistics.median(samples[count // 2 :])
    return found


def told(problem: Exception) -> str:
    """The first line of what went wrong."""
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:150]}"


def alone(outputs: Outputs) -> torch.Tensor:
    """The result of an attention without the counts of tiles."""
    return outputs if isinstance(outputs, torch.Tensor) else outputs[0]


# Of another package, from q, k, v [1, rows, heads, D]: a function that computes attention of that shape.
Peer = Callable[[], torch.Tensor]


def by_sageattention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Peer:
    """Quantizing is within the time."""
    sageattn = importlib.import_module("sageattention").sageattn
    parts = [part.transpose(1, 2).contiguous() for part in (q, k, v)]
    return lambda: sageattn(*parts, tensor_layout="HND", is_causal=False).transpose(1, 2)


PEER = "SageAttention, with quantization"


class Bench:
    """Measures on one device; a report of every case and of what is timed beside them, by name."""

    def __init__(self, arch: str, run: Run, ready: list[Case], reports: dict[str, Report]) -> None:
        self.arch, self.run, self.cases, self.reports = arch, run, ready, reports

    def call(self, case: Case, x: Inputs, rows: int) -> Callable[[], Outputs]:
        """A launch of ``case`` on ``x``."""
        operands = x.operands(self.run, self.arch, case, rows)
        return functools.partial(
            provider(case.operator, case.provider).launch, self.run, self.arch, *operands
        )

    def attempt(self, case: Case, call: Callable[[], Outputs]) -> Outputs | None:
        """What ``call`` gives, or nothing, and the reason in the report, where another package fails."""
        report = self.reports[case.name]
        if report.failed:
            return None
        try:
            return call()
        except H3CompileError:
            raise
        except Exception as problem:  # whatever a package of others raises
            if provider(case.operator, case.provider).package is None:
                raise
            report.failed = told(problem)
            return None

    def check_short(self) -> None:
        """Every row of every head at awkward lengths, rows after the valid ones poisoned."""
        for valid in LENGTHS:
            x = make_inputs("gaussian", valid + 200, valid, SHORT_HEADS, valid)
            truth = attended(x, range(x.heads), torch.arange(valid, device="cuda"))
            for case in self.cases:
                if case.share is not None:
                    continue
                outputs = self.attempt(case, self.call(case, x, valid))
                if outputs is None:
                    continue
                out = alone(outputs)[0]
                error = relative(out[:valid], truth) if bool(out.isfinite().all()) else float("nan")
                clean = bool((out[valid:] == 0).all())
                report = self.reports[case.name]
                if not (error < BOUNDS[case.operator.partition(".")[0]] and clean):
                    report.wrong.append((valid, round(error, 4), clean))
                report.errors["short"] = max(report.errors.get("short", 0.0), error)

    def measure(self, rows: int, heads: int, rounds: int) -> None:
        """Errors and times at full length."""
        queries = torch.randint(0, rows, (192,), device="cuda")
        slices = [0, heads // 2]
        runs: dict[str, Callable[[], object]] = {}
        x = make_inputs("outlier", rows, rows, heads, 7)
        for kind in ("outlier", "gaussian"):
            if kind == "gaussian":
                runs.clear()
                x = make_inputs(kind, rows, rows, heads, 7)
            error = functools.partial(sampled, attended(x, slices, queries), queries, slices)
            for case in self.cases:
                run = self.call(case, x, rows)
                outputs = self.attempt(case, run)
                if outputs is None:
                    continue
                report = self.reports[case.name]
                report.errors[kind] = error(alone(outputs))
                if isinstance(outputs, tuple):
                    skipped, considered = outputs[1].tolist()
                    report.skipped = skipped / considered
                runs[case.name] = run
            self.add_peer(runs, x, kind, error)
        moved = self.add_preparation(runs, x)
        flop = 4 * rows * rows * heads * D
        cool = timed(runs, rounds, 60.0)
        for name, ms in timed_hot(runs, cool, 0.7).items():
            report = self.reports.setdefault(name, Report(name))
            report.unit = "TB/s" if name in moved else "TFLOP/s"
            report.cool, report.ms, report.rate = cool[name], ms, moved.get(name, flop) / ms / 1e9

    def add_peer(
        self,
        runs: dict[str, Callable[[], object]],
        x: Inputs,
        kind: str,
        error: Callable[[torch.Tensor], float],
    ) -> None:
        """What SageAttention makes of ``x``; where it fails it says why, and is left out."""
        report = self.reports.setdefault(PEER, Report(PEER))
        if report.failed:
            return
        try:
            run = by_sageattention(*x.normed)
            report.errors[kind] = error(run())
        except Exception as problem:  # whatever a package of others raises
            report.failed = told(problem)
        else:
            runs[PEER] = run

    def add_preparation(self, runs: dict[str, Callable[[], object]], x: Inputs) -> dict[str, int]:
        """Preparing, in parts, whole and with the attention after it; the bytes that the former move."""
        moved: dict[str, int] = {}
        seen: set[Spec] = set()
        for qk, block in KINDS:
            launches: list[Launch] = []
            x.prepared(launches.append, self.arch, qk, block)
            for index, launch in enumerate(launches):
                if launch.spec in seen:
                    continue
                seen.add(launch.spec)
                name = f"  {index} {launch.spec.kernel.partition(':')[2]} {qk} {block}"
                moved[name] = sum(a.nbytes for a in launch.arguments if isinstance(a, torch.Tensor))
                runs[name] = functools.partial(self.run, launch)
            if block not in (BLOCKS[0], WHOLE):
                continue
            name = f"prepare {qk} {block or 'whole'}"
            moved[name] = sum(moved_by(x.prepared(self.run, self.arch, qk, block), x.qkv))
            runs[name] = functools.partial(x.prepared, self.run, self.arch, qk, block)
            for case in self.cases:
                failed = self.reports[case.name].failed
                if (case.operator, case.qk, case.block, failed) == ("sage_attention.default", qk, block, ""):
                    name = f"prepare + {case.name}"
                    runs[name] = functools.partial(self.both, case, x)
        return moved

    def both(self, case: Case, x: Inputs) -> None:
        """SAGE with all that comes before it."""
        prepared = x.prepared(self.run, self.arch, case.qk, case.block)
        launch = provider(case.operator, case.provider).launch
        launch(self.run, self.arch, *prepared, case.block, torch.bfloat16, x.valid)


def moved_by(prepared: tuple[torch.Tensor, ...], qkv: torch.Tensor) -> Iterator[int]:
    """Bytes of the operands written, of the projection, and of its keys and values once more."""
    yield from (part.nbytes for part in prepared)
    yield qkv.nbytes * 5 // 3


def specs_of(arch: str, ready: Iterable[Case], rows: int, heads: int) -> dict[Spec, str]:
    """What the cases launch on documents of ``rows`` rows, and on short ones; a case that wants it."""
    found: dict[Spec, str] = {}
    for count in dict.fromkeys((heads, SHORT_HEADS)):
        x = stand_in(count)
        launches: list[Launch] = []
        for qk, block in KINDS:
            x.prepared(launches.append, arch, qk, block)
        found.update((launch.spec, "prepare") for launch in launches)
        for case in ready:
            # A function of torch launches none of our kernels.
            by_torch = (case.operator, case.provider) == ("attention.default", "cudnn")
            if by_torch or (case.share is not None and count != heads):
                continue
            launches = []
            operands = x.operands(lambda _: None, arch, case, rows)
            provider(case.operator, case.provider).launch(launches.append, arch, *operands)
            found.update((launch.spec, case.name) for launch in launches)
    return found


def compiled(spec: Spec, arch: str, folder: Path) -> tuple[Spec, Binary | str, int, int]:
    """Compile in a worker: the binary, or why there is none; registers and stack."""
    try:
        fields = asdict(compile_spec(spec, arch))
    except BuildError as error:
        return spec, str(error), 0, 0
    code = fields.pop("code")
    file = folder / spec.key
    file.write_bytes(code)
    used = usage(code)
    return spec, Binary(file=file, **fields), used.registers, used.stack


def built(specs: dict[Spec, str], arch: str, reports: dict[str, Report], folder: Path) -> dict[str, Binary]:
    """The binaries of ``specs``, by key; what a kernel takes, or why it is missing, is reported."""
    binaries: dict[str, Binary] = {}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for spec, binary, registers, stack in pool.map(
            functools.partial(compiled, arch=arch, folder=folder), specs
        ):
            report = reports.setdefault(specs[spec], Report(specs[spec]))
            if isinstance(binary, str):
                report.failed = binary
                continue
            binaries[spec.key] = binary
            if specs[spec] != "prepare":
                report.registers, report.stack = registers, stack
    return binaries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=".", help="regular expression over the names of attentions")
    parser.add_argument("--rows", type=int, default=37_760)
    parser.add_argument("--heads", type=int, default=56)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flashinfer", action="store_true")
    parser.add_argument("--compile-only", metavar="ARCH", help="such as sm_90a; needs no GPU")
    arguments = parser.parse_args()
    started = time.perf_counter()
    arch = arguments.compile_only
    if arch is None:
        arch = kernel_arch(torch.device("cuda", 0))
    x = stand_in(arguments.heads)
    wanted = [
        case
        for case in cases()
        if re.search(arguments.only, case.name)
        and (arguments.flashinfer or case.provider != "flashinfer")
        and provider(case.operator, case.provider).refused(
            arch, x.operands(lambda _: None, arch, case, arguments.rows), named=True
        )
        is None
    ]
    reports = {case.name: Report(case.name) for case in wanted}
    specs = specs_of(arch, wanted, arguments.rows, arguments.heads)
    with tempfile.TemporaryDirectory() as folder:
        binaries = built(specs, arch, reports, Path(folder))
        print(f"{arch}: {len(specs)} kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)
        if arguments.compile_only is None:
            ready = [case for case in wanted if not reports[case.name].failed]
            bench = Bench(arch, Kernels(binaries, torch.device("cuda", 0)), ready, reports)
            bench.check_short()
            bench.measure(arguments.rows, arguments.heads, arguments.rounds)
    for report in sorted(reports.values(), key=lambda report: (report.unit, report.ms)):
        print(report.line(), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"attention_{arguments.rows}.json"
    device = arch if arguments.compile_only else torch.cuda.get_device_name()
    about = {"device": device, "rows": arguments.rows, "heads": arguments.heads, "torch": torch.__version__}
    target.write_text(
        json.dumps({**about, "lines": [asdict(report) for report in reports.values()]}, indent=1)
    )
    print(f"whole script {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
