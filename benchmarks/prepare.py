"""Times and checks launch shapes of the kernels that prepare the operands of SAGE attention, on the GPU here.

    bash benchmarks/on_device.sh python3 benchmarks/prepare.py --out DIR

Variants are compiled in parallel first; each prepares all operands of CHECKED rows (its kernels take any
number) and is compared with the reference: largest difference in steps of the eight-bit type, share of
values that differ, largest relative difference of a scale. Every kernel of a variant that no earlier one has
is then timed, launched back to back.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from h3compile.errors import BuildError
from h3compile.ops.cubin import Kernels
from h3compile.ops.kernels.compile import ARCHES, compile_spec, usage
from h3compile.ops.launch import Binary, Launch, Run, Spec
from h3compile.ops.sage_prepare import SAGE_PREPARE, TUNING, Tuning, launched
from h3compile.ops.sage_quantized import Six

D, TURNED, EPS = 128, 96, 1e-5
COPY = 4.17e12  # bytes a second of a copy on an H200
CHECKED, PADDING = 2003, 37  # rows compared with the reference, and how many of them are padding


@dataclass(frozen=True)
class Variant:
    """A launch shape; ``expected`` is the time in milliseconds that was predicted for its new kernel."""

    label: str
    tuning: Tuning
    qk: str = "fp8_e4m3"
    k_block: int = 128
    expected: str = ""


def variants() -> Iterator[Variant]:
    """As the provider launches them; other settings are in row_variants.py."""
    for qk in ("fp8_e4m3", "int8"):
        for k_block, tuning in TUNING.items():
            yield Variant(f"{qk} {k_block}", tuning, qk, k_block)


@dataclass(frozen=True)
class Inputs:
    """A joint projection [1, rows, 3 * heads * D] and what norms and turns it."""

    qkv: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    heads: int
    valid: int

    def prepare(self, run: Run, variant: Variant) -> Six:
        query, key, value = self.qkv[0].view(-1, 3, self.heads, D).unbind(1)
        shared = {name: getattr(self, name) for name in ("q_weight", "k_weight", "cos", "sin")}
        options = (EPS, variant.qk, variant.k_block, True, self.valid)
        return launched(run, (query, key, value), shared, *options, variant.tuning)

    def reference(self, qk: str, k_block: int) -> Six:
        tables = (self.q_weight, self.k_weight, self.cos, self.sin)
        options = (self.heads, EPS, qk, k_block, True, self.valid)
        return cast(Six, SAGE_PREPARE.reference(self.qkv, *tables, *options))


def make_inputs(rows: int, valid: int, heads: int, device: str) -> Inputs:
    """Heads of different size with outlier channels and a mean; padding is NaN."""
    generator = torch.Generator(device).manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    qkv = torch.empty(1, rows, 3 * heads * D, dtype=torch.bfloat16, device=device)
    gain, mean = 1 + normal(3 * heads * D).abs(), normal(3 * heads * D)
    gain[98::D] *= 10
    for start in range(0, rows, 4096):
        part = qkv[0, start : start + 4096]
        part.copy_(normal(*part.shape) * gain + mean)
    qkv[:, valid:] = float("nan")
    angles = 6.28 * normal(rows, TURNED)
    q_weight, k_weight = ((1 + 0.1 * normal(D)).bfloat16() for _ in range(2))
    return Inputs(qkv, q_weight, k_weight, angles.cos().bfloat16(), angles.sin().bfloat16(), heads, valid)


def steps(values: torch.Tensor) -> torch.Tensor:
    """Eight-bit values as integers in order, one apart where they are neighbours."""
    if values.dtype == torch.int8:
        return values.int()
    bits = values.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


@dataclass
class Report:
    """What a variant gave: errors against the reference, and milliseconds of its kernels."""

    label: str
    expected: str
    failed: str = ""
    steps: int = 0
    differing: float = 0.0
    scales: float = 0.0
    whole: float = 0.0
    kernels: dict[str, float] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        return not self.failed and self.steps <= 1 and self.differing < 4e-3 and self.scales < 1e-6


def compare(got: Six, expected: Six, report: Report) -> None:
    for one, other in zip(got, expected, strict=True):
        if one.dtype == torch.float32:
            error = float(((one - other).abs() / other).max()) if bool(one.isfinite().all()) else math.inf
            report.scales = max(report.scales, error)
            continue
        for mine, theirs in zip(one, other, strict=True):  # a head at a time
            apart = (steps(mine) - steps(theirs)).abs()
            report.steps = max(report.steps, int(apart.max()))
            report.differing = max(report.differing, float((apart > 0).float().mean()))


@dataclass(frozen=True)
class Compiled:
    spec: Spec
    binary: Binary | None
    about: str  # registers, stack and shared memory, or why there is no binary


def compiled(spec: Spec, arch: str, folder: Path) -> Compiled:
    try:
        fields = asdict(compile_spec(spec, arch))
    except BuildError as error:
        return Compiled(spec, None, str(error))
    code = fields.pop("code")
    file = folder / spec.key
    file.write_bytes(code)
    used = usage(code)
    about = f"{used.registers} regs {used.stack} stack {fields['shared']} shared"
    return Compiled(spec, Binary(file=file, **fields), about)


def specs_of(chosen: list[Variant], rows: int, heads: int) -> set[Spec]:
    found: set[Spec] = set()
    with FakeTensorMode():
        table = torch.empty(rows, TURNED, dtype=torch.bfloat16)
        weight = torch.empty(D, dtype=torch.bfloat16)
        qkv = torch.empty(1, rows, 3 * heads * D, dtype=torch.bfloat16)
        inputs = Inputs(qkv, weight, weight, table, table, heads, rows)
        for variant in chosen:
            inputs.prepare(lambda launch: found.add(launch.spec), variant)
    return found


def name_of(launch: Launch) -> str:
    """The kernel, and what it writes."""
    name = launch.spec.kernel.partition(":")[2].removesuffix("_kernel")
    if name != "quantize":
        return name
    return "quantize_q" if dict(launch.spec.constants)["BLOCK"] == 1 else "quantize_k"


def _events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]  # type: ignore[no-untyped-call]


def timed(function: Callable[[], None], seconds: float) -> float:
    """Median milliseconds of launches back to back, of the second half of ``seconds``."""
    start, end = _events(2)
    function()
    start.record()
    for _ in range(4):
        function()
    end.record()
    end.synchronize()
    count = max(8, math.ceil(seconds * 4000 / start.elapsed_time(end)))
    events = _events(count + 1)
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    events[-1].synchronize()
    samples: list[float] = [one.elapsed_time(other) for one, other in itertools.pairwise(events)]
    return statistics.median(samples[count // 2 :])


def _each(run: Run, launches: list[Launch]) -> None:
    for launch in launches:
        run(launch)


def measure(
    chosen: list[Variant], ready: dict[Spec, Compiled], rows: int, heads: int, seconds: float
) -> list[Report]:
    kernels = Kernels(
        {spec.key: one.binary for spec, one in ready.items() if one.binary}, torch.device("cuda", 0)
    )
    inputs = make_inputs(rows, rows - PADDING, heads, "cuda")
    few = make_inputs(CHECKED, CHECKED - PADDING, heads, "cuda")
    expected: dict[tuple[str, int], Six] = {}
    reports: list[Report] = []
    timings: dict[tuple[Spec, tuple[int, int, int]], float] = {}
    part = rows * heads * D
    moved = {"statistics": 4 * part, "quantize_q": 3 * part, "quantize_k": 3 * part, "quantize_v": 3 * part}
    for variant in chosen:
        report = Report(variant.label, variant.expected)
        reports.append(report)
        launches: list[Launch] = []
        inputs.prepare(launches.append, variant)
        report.failed = next((ready[x.spec].about for x in launches if ready[x.spec].binary is None), "")
        if report.failed:
            print(f"{variant.label}: {report.failed}", flush=True)
            continue
        key = (variant.qk, variant.k_block)
        if key not in expected:
            expected[key] = few.reference(*key)
        compare(few.prepare(kernels, variant), expected[key], report)
        verdict = "" if report.right else "WRONG "
        print(
            f"{verdict}{variant.label}: {report.steps} step in {report.differing:.1e},"
            f" scales {report.scales:.1e} | {variant.expected}",
            flush=True,
        )
        known = len(timings)
        for launch in launches:
            name, place = name_of(launch), (launch.spec, launch.grid)
            if place not in timings:
                ms = timings[place] = timed(functools.partial(kernels, launch), seconds)
                rate = moved.get(name, 0) / ms / 1e9
                print(
                    f"    {name:12} {ms:7.3f} ms {rate:5.2f} TB/s {rate * 1e12 / COPY:5.2f} of a copy"
                    f"  {ready[launch.spec].about}",
                    flush=True,
                )
            report.kernels[name] = timings[place]

        if len(timings) - known > 1:  # not one kernel changed, but what is prepared
            report.whole = timed(functools.partial(_each, kernels, launches), seconds)
            print(f"    {'whole':12} {report.whole:7.3f} ms", flush=True)
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=37_760)
    parser.add_argument("--heads", type=int, default=56)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each kernel")
    parser.add_argument("--compile-only", metavar="ARCH", help="such as sm_90a; needs no GPU")
    arguments = parser.parse_args()
    started = time.perf_counter()
    chosen = list(variants())
    arch = arguments.compile_only
    if arch is None:
        major, minor = torch.cuda.get_device_capability()
        arch = next(name for name, number in ARCHES.items() if number == 10 * major + minor)
    specs = specs_of(chosen, arguments.rows, arguments.heads)
    folder = Path(tempfile.mkdtemp())
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        done = pool.map(functools.partial(compiled, arch=arch, folder=folder), specs)
        ready = {one.spec: one for one in done}
    print(f"{arch}: {len(ready)} kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)
    if arguments.compile_only is not None:
        for one in ready.values():
            print(one.spec.kernel, one.spec.warps, dict(one.spec.constants), one.about)
        return
    reports = measure(chosen, ready, arguments.rows, arguments.heads, arguments.seconds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = {"device": torch.cuda.get_device_name(), "rows": arguments.rows, "heads": arguments.heads}
    target = arguments.out / f"prepare_{arguments.rows}.json"
    target.write_text(json.dumps({**about, "variants": [asdict(report) for report in reports]}, indent=1))
    print(f"whole script {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
