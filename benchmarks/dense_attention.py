"""BF16 attention under sustained load: variants of the Gluon kernel for sm_90a, the Triton kernel, and cuDNN.

    python benchmarks/dense_attention.py --out DIR [--only TEXT]

On an H200 attention is limited by power once it has run for a while, so each kernel is timed in bursts of a
second, taking turns, and the second half of a burst counts; beside it what the first launches after half a
second of rest take. Each variant is first run in a process of its own, under a time limit: a barrier that is
never reached hangs the context it is in.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import torch

from h3compile.errors import BuildError
from h3compile.ops.cubin import Kernels
from h3compile.ops.kernels.compile import compile_spec, usage
from h3compile.ops.launch import Binary, Launch, Spec, ceil_div

D, HEADS = 128, 56
WIDTH = HEADS * D
LENGTHS = (1, 15, 17, 63, 127, 129, 191, 255, 1000)
PADDING = 70
LIMIT = 6e-3  # relative error, by norm, against float64
CHECK_SECONDS, TIME_SECONDS = 60, 150
BURST_SECONDS, ROUNDS = 1.0, 2
SHARED = 227 * 1024

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """A kernel to compile, and the milliseconds it was predicted to take under sustained load."""

    name: str
    spec: Spec
    predicted: float

    @property
    def rows(self) -> int:
        rows = dict(self.spec.constants)["Q_TILE"]
        assert isinstance(rows, int)
        return rows


def spec(kernel: str, q: int, k: int, stages: int, gluon: bool, **options: bool) -> Spec:
    """q and k contiguous, v a part of the joint projection."""
    pointers = tuple((name, "*bf16") for name in ("q", "k", "v", "out"))
    constants = {
        "counts": None, "HEADS": HEADS, "Q_STRIDE": WIDTH, "K_STRIDE": WIDTH, "V_STRIDE": 3 * WIDTH,
        "THRESHOLD": 0.0, "Q_TILE": q, "K_TILE": k, "STAGES": stages, **options,
    }  # fmt: skip
    types = (*pointers, ("rows", "i32"), ("valid", "i32"))
    return Spec(f"{kernel}:dense_kernel", types, tuple(constants.items()), 4, stages, gluon=gluon)


def variants() -> list[Variant]:
    """What is compared; o: scores ahead of the softmax, h: queries held in registers, l: lazy rescaling."""

    def gluon(q: int, k: int, stages: int, letters: str, predicted: float) -> Variant:
        options = {"OVERLAP": "o" in letters, "Q_HELD": "h" in letters, "LAZY": "l" in letters}
        return Variant(
            f"{q}x{k} s{stages} {letters}", spec("dense_hopper", q, k, stages, True, **options), predicted
        )

    return [
        gluon(128, 128, 2, "o", 67.0),
        gluon(128, 128, 2, "ol", 65.0),
        gluon(128, 128, 2, "ohl", 63.5),
        gluon(128, 128, 3, "ohl", 63.0),
        gluon(128, 128, 2, "hl", 66.0),
        gluon(192, 64, 4, "ol", 64.5),
        gluon(192, 64, 4, "hl", 62.5),
        gluon(192, 128, 2, "l", 63.0),
        gluon(256, 64, 4, "ol", 63.5),
        gluon(256, 64, 4, "l", 66.0),
        gluon(256, 128, 2, "l", 66.0),
        Variant("triton 64x64 s3", spec("attention", 64, 64, 3, False), 85.0),
    ]


@dataclass
class Report:
    """A line of the table; sustained and cool are milliseconds."""

    name: str
    predicted: float = 0.0
    registers: int = 0
    stack: int = 0
    shared: int = 0
    failed: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    sustained: float = 0.0
    cool: float = 0.0
    rounds: list[float] = field(default_factory=list)
    power: list[str] = field(default_factory=list)


def compiled(variant: Variant, folder: Path) -> tuple[Report, dict[str, object]]:
    """Compile into ``folder``; the second part is what `Binary` is made of, empty when it failed."""
    report = Report(variant.name, variant.predicted)
    try:
        cubin = compile_spec(variant.spec, "sm_90a")
    except BuildError as error:
        report.failed = str(error)
        return report, {}
    used = usage(cubin.code)
    report.registers, report.stack, report.shared = used.registers, used.stack, cubin.shared
    if cubin.shared > SHARED:
        report.failed = "too much shared memory"
        return report, {}
    file = folder / f"{variant.spec.key}.cubin"
    file.write_bytes(cubin.code)
    return report, {
        **{key: value for key, value in asdict(cubin).items() if key != "code"},
        "file": str(file),
    }


def runner(variant: Variant, folder: Path) -> Callable[[Operands, torch.Tensor, int], None]:
    """(q, k, v), out, valid -> a launch of the compiled variant."""
    fields = json.loads((folder / "binaries.json").read_text())[variant.name]
    binary = Binary(**{**fields, "file": Path(fields["file"])})
    kernels = Kernels({variant.spec.key: binary}, torch.device("cuda", 0))

    def run(operands: Operands, out: torch.Tensor, valid: int) -> None:
        rows = out.shape[0]
        grid = (ceil_div(rows, variant.rows), HEADS, 1)
        kernels(Launch(variant.spec, grid, (*operands, out, rows, valid)))

    return run


def inputs(kind: str, rows: int, valid: int) -> Operands:
    """Random q, k, v [rows, HEADS, D], NaN from row ``valid`` on.

    outlier: four channels of K ten times as large, and a mean; ramp: keys grow towards the first, which the
    Gluon kernel reads last, so that maxima rise until the end.
    """
    generator = torch.Generator("cuda").manual_seed(rows)
    joint = torch.empty(rows, 3 * WIDTH, dtype=torch.bfloat16, device="cuda")
    for start in range(0, rows, 4096):
        part = joint[start : start + 4096]
        part.copy_(torch.randn(part.shape, generator=generator, device="cuda"))
    q, k, v = (part.unflatten(1, (HEADS, D)) for part in joint.chunk(3, 1))
    if kind == "outlier":
        k += torch.randn(HEADS, D, generator=generator, device="cuda").bfloat16()
        k[..., 98:102] *= 10
    if kind == "ramp":
        k *= torch.linspace(12, 0.1, rows, device="cuda").bfloat16()[:, None, None]
    joint[valid:] = float("nan")
    return q.contiguous(), k.contiguous(), v


def exact(operands: Operands, valid: int, queries: torch.Tensor, heads: list[int]) -> torch.Tensor:
    """Float64 attention of some rows of some heads, [queries, heads, D]."""
    out = []
    for head in heads:
        q, k, v = (part[:valid, head].double() for part in operands)
        out.append(torch.softmax(q[queries] @ k.T * D**-0.5, -1) @ v)
    return torch.stack(out, 1)


def check(variant: Variant, folder: Path, rows: int) -> None:
    """Errors of a variant as JSON on standard output: by kind at the full length, and the worst short one."""
    run = runner(variant, folder)
    errors: dict[str, float] = {}
    for kind, valid, total in (
        *(("gaussian", length, length + PADDING) for length in LENGTHS),
        *((kind, 1000, 1000 + PADDING) for kind in ("outlier", "ramp")),
        *((kind, rows, rows) for kind in ("gaussian", "outlier", "ramp")),
    ):
        operands = inputs(kind, total, valid)
        out = torch.full((total, HEADS, D), float("nan"), dtype=torch.bfloat16, device="cuda")
        run(operands, out, valid)
        torch.cuda.synchronize()
        heads = [0, 29, 55]
        queries = torch.arange(valid, device="cuda")
        if valid > 4096:
            queries = torch.cat((queries[:64], queries[valid // 2 : valid // 2 + 64], queries[-64:]))
        truth = exact(operands, valid, queries, heads)
        error = float((out[queries][:, heads].double() - truth).norm() / truth.norm())
        if not (bool(out.isfinite().all()) and bool((out[valid:] == 0).all())):
            error = float("inf")
        name = kind if valid == rows else "short"
        errors[name] = max(errors.get(name, 0.0), error)
        if not error < LIMIT:
            errors[f"{kind} {valid}"] = error
    print(json.dumps(errors))


def checked(report: Report, folder: Path, rows: int) -> None:
    """Run `check` in a process of its own."""
    command = [sys.executable, __file__, "--out", str(folder), "--check", report.name, "--rows", str(rows)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        report.failed = f"no answer in {CHECK_SECONDS} s"
        return
    if done.returncode:
        report.failed = (done.stderr.strip().splitlines() or ["killed"])[-1][:200]
        return
    report.errors = json.loads(done.stdout.splitlines()[-1])
    wrong = {name: error for name, error in report.errors.items() if not error < LIMIT}
    if wrong:
        report.failed = f"wrong: {wrong}"


def burst(call: Callable[[], object], count: int) -> tuple[list[float], str]:
    """Milliseconds of ``count`` launches back to back, and power and clock in the middle of them."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    state = ""
    if count > 8 and shutil.which("nvidia-smi"):
        events[count // 2].synchronize()
        query = "--query-gpu=power.draw.instant,clocks.sm,temperature.gpu"
        done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True)
        state = done.stdout.strip()
    events[-1].synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)], state


def measure(names: list[str], folder: Path, rows: int) -> None:
    """Cool and sustained milliseconds of the named variants and cuDNN, as JSON lines while they are made."""
    operands = inputs("gaussian", rows, rows)
    out = torch.empty(rows, HEADS, D, dtype=torch.bfloat16, device="cuda")
    calls: dict[str, Callable[[], object]] = {}
    for variant in variants():
        if variant.name in names:
            run = runner(variant, folder)
            calls[variant.name] = lambda run=run: run(operands, out, rows)
    q, k, v = (part[None].transpose(1, 2) for part in operands)
    # No bias, and no sums of exponentials.
    calls["cudnn"] = lambda: torch.ops.aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, False)
    counts = {}
    for name, call in calls.items():
        burst(call, 1)
        time.sleep(0.5)
        times, _ = burst(call, 3)
        counts[name] = max(10, int(1000 * BURST_SECONDS / min(times)) + 1)
        print(json.dumps({"name": name, "cool": statistics.median(times)}), flush=True)
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times, state = burst(call, counts[name])
            late = statistics.median(times[len(times) // 2 :])
            print(json.dumps({"name": name, "sustained": late, "state": state}), flush=True)


def measured(reports: dict[str, Report], folder: Path, rows: int) -> None:
    """Run `measure` in a process of its own, and take over what it had printed when it ended."""
    names = [name for name, report in reports.items() if not report.failed]
    command = [
        sys.executable,
        __file__,
        "--out",
        str(folder),
        "--rows",
        str(rows),
        "--measure",
        ",".join(names),
    ]
    log = folder / "measured.jsonl"
    with log.open("w") as file:
        try:
            subprocess.run(command, stdout=file, timeout=TIME_SECONDS, check=True)
        except subprocess.SubprocessError as error:
            print(f"measuring stopped early: {error}")
    for text in log.read_text().splitlines():
        line = json.loads(text)
        report = reports.setdefault(line["name"], Report(line["name"]))
        if "cool" in line:
            report.cool = line["cool"]
        else:
            report.rounds.append(line["sustained"])
            report.power.append(line["state"])
            report.sustained = statistics.median(report.rounds)


def table(reports: dict[str, Report], rows: int) -> None:
    """Print what was measured, the fastest first, then what failed."""
    flop = 4 * rows * rows * WIDTH
    print(
        f"{'variant':18} {'sustained':>9} {'TFLOP/s':>7} {'cool':>6} {'guess':>6} {'gauss':>8} {'outlier':>8}"
        f" {'ramp':>8} {'short':>8} reg stack shared  power, clock, temperature"
    )
    for report in sorted(reports.values(), key=lambda report: report.sustained or 1e9):
        if report.failed:
            print(f"{report.name:18} FAILED {report.failed}")
            continue
        rate = flop / report.sustained / 1e9 if report.sustained else 0.0
        errors = " ".join(f"{report.errors.get(k, 0):8.1e}" for k in ("gaussian", "outlier", "ramp", "short"))
        print(
            f"{report.name:18} {report.sustained:9.2f} {rate:7.1f} {report.cool:6.2f} {report.predicted:6.1f}"
            f" {errors} {report.registers:3} {report.stack:5} {report.shared:6}  {'; '.join(report.power)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for dense_attention.json")
    parser.add_argument("--rows", type=int, default=37760)
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--compile-only", action="store_true", help="no GPU: only build the variants")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check is not None:
        check(next(v for v in variants() if v.name == options.check), options.out, options.rows)
        return
    if options.measure is not None:
        measure(options.measure.split(","), options.out, options.rows)
        return
    started = time.perf_counter()
    chosen = [variant for variant in variants() if options.only in variant.name]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Forked before CUDA is touched: the workers have everything imported.
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
            built = list(pool.map(compiled, chosen, [folder] * len(chosen)))
        reports = {report.name: report for report, _ in built}
        binaries = {report.name: fields for report, fields in built if fields}
        (folder / "binaries.json").write_text(json.dumps(binaries))
        print(f"compiled {len(binaries)} variants, {time.perf_counter() - started:.0f} s", flush=True)
        if options.compile_only:
            table(reports, options.rows)
            return
        ready = [report for report in reports.values() if not report.failed]
        with ThreadPoolExecutor(len(ready)) as threads:
            list(threads.map(lambda report: checked(report, folder, options.rows), ready))
        print(f"checked, {time.perf_counter() - started:.0f} s", flush=True)
        measured(reports, folder, options.rows)
    table(reports, options.rows)
    options.out.mkdir(parents=True, exist_ok=True)
    lines = [asdict(report) for report in reports.values()]
    (options.out / "dense_attention.json").write_text(json.dumps(lines, indent=1))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
