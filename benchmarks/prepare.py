"""What benchmarks of the kernels that prepare the operands of SAGE attention share.

A variant prepares all operands of CHECKED rows (its kernels take any number) and is compared with the
reference: largest difference in steps of the eight-bit type, share of values that differ, largest relative
difference of a scale. Specs are compiled to files, which other processes may do; launches are timed back to
back. `row_variants.py` and `rank_share.py` run them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from h3compile.errors import BuildError
from h3compile.ops.kernels.compile import compile_spec, usage
from h3compile.ops.launch import Binary, Launch, Run, Spec
from h3compile.ops.sage_prepare import SAGE_PREPARE, Tuning, launched
from h3compile.ops.sage_quantized import Six

D, TURNED, EPS = 128, 96, 1e-5
CHECKED, PADDING = 2003, 37  # rows compared with the reference, and how many of them are padding


@dataclass(frozen=True)
class Variant:
    """A launch shape of what is prepared."""

    tuning: Tuning
    qk: str = "fp8_e4m3"
    k_block: int = 128


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
    """How far a variant is from the reference."""

    steps: int = 0
    differing: float = 0.0
    scales: float = 0.0

    @property
    def right(self) -> bool:
        return self.steps <= 1 and self.differing < 4e-3 and self.scales < 1e-6


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
