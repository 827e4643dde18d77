"""Settings of the row kernels below 0.85 of a copy, in one run on a GPU: checked, then timed.

    bash benchmarks/on_device.sh python3 benchmarks/row_variants.py --out DIR

SETTINGS and NORMS hold every setting with the share of a copy that was predicted for it. A run prints last
the lines to put into ``TUNING`` of h3compile/ops/sage_prepare.py, and the best of every kernel.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from elementwise import EPS, HIDDEN, dequantized, distance, exact_of, normal, packed_index, recorded
from prepare import (
    CHECKED,
    PADDING,
    Compiled,
    Report,
    Variant,
    compare,
    compiled,
    make_inputs,
    name_of,
    specs_of,
    timed,
)

from h3compile.engine.machine import kernel_arch
from h3compile.ops import OPERATORS
from h3compile.ops.cubin import Kernels
from h3compile.ops.launch import Launch, Spec
from h3compile.ops.operator import Operand, Operator
from h3compile.ops.sage_prepare import TUNING, Pass, Tuning
from h3compile.ops.sage_quantized import Six

HEADS, D, PARTS = 56, 128, 6
BAR = 0.85
# How much further from float64 than the reference a result may be.
ROOM = 1.001


@dataclass(frozen=True)
class Walk:
    """How the statistics go through K and V: fields of `Tuning`."""

    members: int
    stages: int
    k_ahead: int
    v_ahead: int
    run: int
    warps: int = 4
    registers: int | None = None


def applied(tuning: Tuning, k_block: int, kernel: str, change: Walk | Pass) -> Tuning:
    """``tuning`` with the setting of one kernel."""
    if isinstance(change, Pass):
        if kernel == "quantize_q":
            return replace(tuning, query=change)
        # A program that has as many rows as a scale has keys finds the scale itself.
        return replace(tuning, key=change, extrema=tuning.extrema and change.rows < k_block)
    return replace(
        tuning,
        members=change.members,
        stages=change.stages,
        k_ahead=change.k_ahead,
        v_ahead=change.v_ahead,
        run=change.run,
        warps=change.warps,
        registers=change.registers,
    )


@dataclass(frozen=True)
class Setting:
    """A setting of one kernel of `sage_prepare`: what replaces a field of the tuning for ``k_block`` keys."""

    kernel: str  # as `prepare.name_of` names it
    k_block: int
    change: Walk | Pass
    predicted: float

    @property
    def label(self) -> str:
        return " ".join(f"{name} {value}" for name, value in asdict(self.change).items())

    @property
    def variant(self) -> Variant:
        tuning = applied(TUNING[self.k_block], self.k_block, self.kernel, self.change)
        return Variant(tuning, k_block=self.k_block)


def _statistics(
    k_block: int, *settings: tuple[int, int, int, int, int, int, int | None, float]
) -> Iterator[Setting]:
    for *walk, predicted in settings:
        yield Setting("statistics", k_block, Walk(*walk), predicted)


def _keys(k_block: int, *settings: tuple[int, int, int, int, int | None, float]) -> Iterator[Setting]:
    for rows, heads, ahead, warps, registers, predicted in settings:
        yield Setting("quantize_k", k_block, Pass(rows, heads, ahead, warps, registers), predicted)


# What other settings came to on an H200 is in results/h200_row_variants.json.
SETTINGS: tuple[Setting, ...] = (
    # members, stages, k_ahead, v_ahead, run, warps, registers -> share predicted
    *_statistics(
        128,
        (2, 4, 1, 8, 128, 4, 128, 0.81),
        (2, 5, 1, 8, 128, 4, 128, 0.81),
        (2, 4, 1, 8, 128, 2, 128, 0.81),
        (2, 4, 1, 8, 256, 4, None, 0.78),
        (4, 4, 1, 8, 128, 2, None, 0.81),
        (4, 4, 1, 8, 128, 1, None, 0.80),
        (4, 5, 1, 8, 128, 2, 224, 0.81),
        (2, 4, 2, 8, 128, 4, None, 0.84),
        (2, 3, 2, 8, 128, 2, None, 0.84),
        (1, 3, 1, 8, 128, 4, None, 0.71),
    ),
    *_statistics(
        16,
        (2, 1, 1, 8, 128, 4, None, 0.87),
        (2, 1, 1, 4, 128, 4, None, 0.87),
        (2, 1, 1, 4, 256, 4, None, 0.86),
        (4, 1, 1, 8, 128, 2, None, 0.87),
    ),
    Setting("quantize_q", 128, Pass(8, 8, 1, 4), 0.90),
    Setting("quantize_q", 128, Pass(8, 8, 2, 4), 0.86),
    # rows, heads, ahead, warps, registers -> share predicted
    *_keys(
        128,
        (4, 8, 3, 2, None, 0.84),
        (8, 8, 3, 4, None, 0.82),
        (8, 8, 5, 4, None, 0.83),
        (4, 8, 5, 2, None, 0.84),
        (4, 4, 3, 2, None, 0.83),
    ),
    *_keys(
        16,
        (16, 4, 4, 8, 64, 0.76),
        (16, 4, 2, 8, 64, 0.76),
        (16, 8, 4, 8, 80, 0.74),
        (16, 2, 2, 4, None, 0.75),
    ),
)


@dataclass(frozen=True)
class Norm:
    """A setting of `norm_modulate.fp8`; shares predicted where all rows gather one table row, and any."""

    warps: int
    registers: int | None
    predicted: tuple[float, float]

    @property
    def label(self) -> str:
        limit = f" registers {self.registers}" if self.registers else ""
        return f"warps {self.warps}{limit}"


NORMS = (
    Norm(4, 72, (0.88, 0.83)),
    Norm(4, None, (0.84, 0.78)),
    Norm(4, 64, (0.78, 0.73)),
    Norm(8, None, (0.78, 0.72)),
    Norm(2, 128, (0.81, 0.78)),
)


@dataclass(frozen=True)
class Row:
    """A line of the result."""

    kernel: str
    setting: str
    predicted: float
    ms: float
    share: float
    right: bool
    about: str


def norm_operands(device: str, rows: int, scattered: bool) -> tuple[Operand, ...]:
    weight = normal(device, HIDDEN) * 0.1 + 1
    table = normal(device, PARTS, PARTS * HIDDEN, scale=0.3)
    return normal(device, 1, rows, HIDDEN), weight, table, packed_index(device, rows, scattered), 0, 1, EPS


def norm_launch(launch: Launch, norm: Norm) -> Launch:
    constants = {**dict(launch.spec.constants), "BLOCK": 256 * norm.warps}
    spec = replace(
        launch.spec, constants=tuple(constants.items()), warps=norm.warps, registers=norm.registers
    )
    return replace(launch, spec=spec)


def norm_operator() -> Operator:
    return next(operator for operator in OPERATORS if operator.name == "norm_modulate.fp8")


def copy_rate(rows: int, seconds: float) -> float:
    """Bytes a second of a copy as large as K and V."""
    source = torch.randn(2 * rows, HEADS * D, device="cuda").bfloat16()
    target = torch.empty_like(source)
    return 4 * source.numel() / timed(lambda: target.copy_(source), seconds) * 1e3


class Bench:
    """Checks and times launches of kernels that are ready."""

    def __init__(self, ready: dict[Spec, Compiled], rows: int, seconds: float) -> None:
        self.ready = ready
        self.rows = rows
        self.seconds = seconds
        self.rate = copy_rate(rows, seconds)
        binaries = {spec.key: one.binary for spec, one in ready.items() if one.binary}
        self.kernels = Kernels(binaries, torch.device("cuda", 0))

    def row(
        self, kernel: str, setting: str, predicted: float, launch: Launch, bytes: int, right: bool
    ) -> Row:
        ms = timed(functools.partial(self.kernels, launch), self.seconds)
        share = bytes / ms * 1e3 / self.rate
        row = Row(kernel, setting, predicted, ms, share, right, self.ready[launch.spec].about)
        mark = "" if right else "  WRONG"
        print(
            f"{kernel:28} {setting:52} {ms:6.3f} ms {share:5.2f} ({predicted:4.2f})  {row.about}{mark}",
            flush=True,
        )
        return row

    def failed(self, kernel: str, setting: str, predicted: float, reason: str) -> Row:
        print(f"{kernel:28} {setting:52} {reason}", flush=True)
        return Row(kernel, setting, predicted, 0.0, 0.0, False, reason)

    def prepare(self) -> Iterator[Row]:
        inputs = make_inputs(self.rows, self.rows - PADDING, HEADS, "cuda")
        few = make_inputs(CHECKED, CHECKED - PADDING, HEADS, "cuda")
        expected: dict[int, Six] = {}
        part = self.rows * HEADS * D
        for setting in SETTINGS:
            variant, name = setting.variant, f"{setting.kernel} {setting.k_block}"
            launches: list[Launch] = []
            inputs.prepare(launches.append, variant)
            reason = next(
                (self.ready[x.spec].about for x in launches if self.ready[x.spec].binary is None), ""
            )
            if reason:
                yield self.failed(name, setting.label, setting.predicted, reason)
                continue
            for launch in launches:
                self.kernels(launch)
            report = Report()
            if setting.k_block not in expected:
                expected[setting.k_block] = few.reference(variant.qk, setting.k_block)
            compare(few.prepare(self.kernels, variant), expected[setting.k_block], report)
            (launch,) = (launch for launch in launches if name_of(launch) == setting.kernel)
            moved = (4 if setting.kernel == "statistics" else 3) * part
            yield self.row(name, setting.label, setting.predicted, launch, moved, report.right)

    def norms(self) -> Iterator[Row]:
        operator = norm_operator()
        provider = next(provider for provider in operator.providers if provider.name == "triton")
        for number, scattered in enumerate((False, True)):
            torch.manual_seed(0)
            name = f"norm_modulate.fp8{', scattered' * scattered}"
            operands = norm_operands("cuda", self.rows, scattered)
            few = norm_operands("cuda", CHECKED, scattered)
            exact = exact_of(operator, list(few))
            largest = ROOM * distance(dequantized(operator.reference(*few)), exact)
            launch = recorded(operator, operands)
            for norm in NORMS:
                changed = norm_launch(launch, norm)
                ready = self.ready[changed.spec]
                if ready.binary is None:
                    yield self.failed(name, norm.label, norm.predicted[number], ready.about)
                    continue

                def run(launch: Launch, norm: Norm = norm) -> None:
                    self.kernels(norm_launch(launch, norm))

                error = distance(dequantized(provider.launch(run, "sm_90a", *few)), exact)
                right = error <= largest
                moved = operator.cost(*operands).bytes
                yield self.row(name, norm.label, norm.predicted[number], changed, moved, right)


def chosen(rows: list[Row]) -> Iterator[str]:
    """The fastest right setting of every kernel, as the lines to put into the tables."""

    def best(kernel: str) -> Row | None:
        return max(
            (row for row in rows if row.kernel == kernel and row.right),
            key=lambda row: row.share,
            default=None,
        )

    found = {name: best(name) for name in dict.fromkeys(row.kernel for row in rows)}
    by_label = {(f"{setting.kernel} {setting.k_block}", setting.label): setting for setting in SETTINGS}
    for k_block, base in TUNING.items():
        tuning: Tuning = base
        held = 16 if k_block == 16 else 128
        for kernel in (f"statistics {held}", "quantize_q 128", f"quantize_k {held}"):
            row = found.get(kernel)
            if row is None:
                continue
            setting = by_label[kernel, row.setting]
            tuning = applied(tuning, k_block, setting.kernel, setting.change)
        yield f"    {k_block}: {tuning},"
    for name, row in found.items():
        if row is not None:
            below = "" if row.share >= BAR else f"  BELOW {BAR}"
            yield f"{name}: {row.share:.2f} with {row.setting}{below}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for row_variants.json")
    parser.add_argument("--rows", type=int, default=37_760)
    parser.add_argument("--seconds", type=float, default=0.2, help="for each setting")
    parser.add_argument("--compile-only", metavar="ARCH", help="such as sm_90a; needs no GPU")
    arguments = parser.parse_args()
    started = time.perf_counter()
    arch = arguments.compile_only
    if arch is None:
        arch = kernel_arch(torch.device("cuda", 0))
    specs = specs_of([setting.variant for setting in SETTINGS], arguments.rows, HEADS)
    norm = recorded(norm_operator(), norm_operands("meta", arguments.rows, False))
    specs |= {norm_launch(norm, one).spec for one in NORMS}
    folder = Path(tempfile.mkdtemp())
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        done = pool.map(functools.partial(compiled, arch=arch, folder=folder), specs)
        ready = {one.spec: one for one in done}
    print(f"{arch}: {len(ready)} kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)
    if arguments.compile_only is not None:
        for one in ready.values():
            print(one.spec.kernel, one.spec.warps, one.about)
        return
    bench = Bench(ready, arguments.rows, arguments.seconds)
    print(f"copy {bench.rate / 1e12:.2f} TB/s; share of it (predicted)", flush=True)
    rows = [*bench.prepare(), *bench.norms()]
    print(*chosen(rows), sep="\n", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = {"device": torch.cuda.get_device_name(), "rows": arguments.rows, "copy": bench.rate}
    text = json.dumps({**about, "settings": [asdict(row) for row in rows]}, indent=1)
    (arguments.out / "row_variants.json").write_text(text)
    print(f"whole script {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
