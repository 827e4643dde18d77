"""Times and checks variants of the attention kernels on the GPU that is here.

    bash benchmarks/on_device.sh python3 benchmarks/attention.py --out DIR [--variants REGEX] [--rows 37760]

Variants are compiled in parallel first. Each is compared with float64 attention at awkward lengths with
poisoned padding, and at full length on a slice of heads and query rows (Gaussian inputs, and inputs with
strong key-channel outliers and a key mean), then timed with CUDA events, the variants taking turns. FLOP
are 4 * rows^2 * heads * 128; bytes are those that a kernel must move.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch

from h3compile.errors import BuildError
from h3compile.ops.cubin import Kernels
from h3compile.ops.kernels.compile import ARCHES, compile_spec, usage
from h3compile.ops.launch import Binary, Launch, Spec, ceil_div

D, EPS, TURNED = 128, 1e-5, 96
LENGTHS = (1, 15, 16, 17, 63, 127, 128, 129, 191, 255, 1000)
SHARES = (0.1, 0.5, 0.8)  # lambda of Skip-Softmax

Constant = int | float | bool | None


@dataclass(frozen=True)
class Variant:
    """A kernel with its tuning; what depends on the inputs is added when it is launched."""

    name: str
    kernel: str  # module:function
    constants: tuple[tuple[str, Constant], ...]
    warps: int = 4
    stages: int = 3
    registers: int | None = None
    int8: bool = False
    expected: str = ""  # what was predicted before it was measured

    @property
    def kind(self) -> str:
        return self.kernel.partition(":")[2].removesuffix("_kernel")

    def get(self, name: str, default: Constant = None) -> Constant:
        return dict(self.constants).get(name, default)

    def number(self, name: str) -> int:
        value = self.get(name)
        assert isinstance(value, int), (self.name, name)
        return value


def sage(
    module: str,
    q: int,
    k: int,
    stages: int,
    registers: int | None,
    expected: str,
    options: dict[str, Constant],
) -> Variant:
    int8 = bool(options.pop("INT8", False))
    defaults = {"K_BLOCK": 128, "THRESHOLD": 0.0, "POLY": 0, "Q_TILE": q, "K_TILE": k, "STAGES": stages}
    words = ["hopper" if module == "attention_hopper" else "sage", "int8" if int8 else "fp8", f"{q}x{k}"]
    words += [f"s{stages}"] + ([f"r{registers}"] if registers else [])
    words += [f"{key.lower()}{value}" for key, value in options.items()]
    constants = tuple({**defaults, **options}.items())
    return Variant(" ".join(words), f"{module}:sage_kernel", constants, 4, stages, registers, int8, expected)


def triton(expected: str, registers: int | None = 168, **options: Constant) -> Variant:
    return sage("attention", 64, 128, 2, registers, expected, {"PARTIAL": False, **options})


def hopper(expected: str, stages: int = 4, **options: Constant) -> Variant:
    return sage("attention_hopper", 192, 128, stages, None, expected, {"LAG": 2, "HALVES": True, **options})


def dense(q: int, k: int, warps: int, stages: int, registers: int | None = None, expected: str = "",
          threshold: float = 0.0) -> Variant:  # fmt: skip
    constants = (("THRESHOLD", threshold), ("Q_TILE", q), ("K_TILE", k), ("STAGES", stages))
    name = f"dense {q}x{k} w{warps} s{stages}{f' r{registers}' if registers else ''}"
    name += f" threshold{threshold}" if threshold else ""
    return Variant(name, "attention:dense_kernel", constants, warps, stages, registers, expected=expected)


def prepare(kind: str, warps: int, expected: str = "", int8: bool = False, **constants: Constant) -> Variant:
    name = f"{kind}{' int8' if int8 else ''} w{warps} " + " ".join(
        f"{k.lower()}{v}" for k, v in constants.items()
    )
    return Variant(
        name, f"qk_prepare:{kind}_kernel", tuple(constants.items()), warps, 3, None, int8, expected
    )


def variants(rows: int) -> list[Variant]:
    low = [share * rows for share in SHARES]
    return [
        hopper("38.5 ms: L2 traffic is a third, products overlap the second half of the exponentials"),
        hopper("40: nothing overlaps within a warpgroup", HALVES=False),
        hopper("38.5: K and V come in time with 3 already", 3),
        hopper("38.5", 5),
        hopper("39.5: coupled more closely", LAG=1),
        hopper("37: if exponentials and F2FP share a pipe, else 40", POLY=1),
        hopper("39", POLY=1, HALVES=False),
        hopper("42: too many instructions", POLY=2),
        hopper("41: 64 moves a tile more", INT8=True),
        hopper("42", INT8=True, HALVES=False),
        hopper("40", INT8=True, POLY=1),
        hopper("41: 64 multiplications a tile more", K_BLOCK=64),
        hopper("42: and 8 loads", K_BLOCK=16),
        hopper("45", INT8=True, K_BLOCK=16),
        hopper("42 where nothing is skipped: two barriers a tile more", THRESHOLD=low[0]),
        hopper("42", THRESHOLD=low[1]),
        hopper("33: a third is skipped", THRESHOLD=low[2]),
        triton("44.6 as before"),
        triton("44: no exchange for the sum", PARTIAL=True),
        triton("44.5: ptxas spills less", 160),
        triton("45: less room", 152),
        triton("52: two programs an SM", 176),
        triton("46: bound by L2, not by exponentials", POLY=1),
        triton("45", INT8=True),
        triton("47", K_BLOCK=64),
        triton("48", K_BLOCK=16),
        triton("48", THRESHOLD=low[0]),
        triton("40", THRESHOLD=low[2]),
        dense(64, 64, 4, 3, None, "79 as before"),
        dense(64, 64, 4, 2, 168, "75: three programs an SM"),
        dense(128, 64, 8, 2, 128, "80: spills"),
        dense(128, 64, 8, 3, None, "80 as before"),
        dense(64, 64, 4, 2, 168, "80", low[0]),
        dense(64, 64, 4, 2, 168, "60", low[2]),
        prepare("statistics", 4, "0.32 ms: nothing is read twice", ROWS=256, STEP=16),
        prepare("statistics", 4, "0.33", ROWS=512, STEP=16),
        prepare("statistics", 4, "0.33: more in flight", ROWS=256, STEP=8),
        prepare("statistics", 8, "0.33", ROWS=256, STEP=32),
        prepare("statistics", 8, "0.34", ROWS=256, STEP=16),
        prepare("reduce", 4, "0.04", RUNS=32),
        prepare("quantize_q", 4, "0.25 ms (0.20 at the rate of a copy)", ROWS=16),
        prepare("quantize_q", 8, "0.25", ROWS=32),
        prepare("quantize_q", 2, "0.26", ROWS=16),
        prepare("quantize_q", 4, "0.28: half the warps", ROWS=32),
        prepare("quantize_q", 4, "0.25", True, ROWS=16),
        prepare("quantize_k", 8, "0.28", BLOCK=128, STEP=16),
        prepare("quantize_k", 16, "0.30", BLOCK=128, STEP=64),
        prepare("quantize_k", 16, "0.32", BLOCK=128, STEP=128),
        prepare("quantize_k", 8, "0.26", BLOCK=64, STEP=32),
        prepare("quantize_k", 4, "0.27", BLOCK=64, STEP=16),
        prepare("quantize_k", 4, "0.26", BLOCK=16, STEP=16),
        prepare("quantize_k", 2, "0.28", BLOCK=16, STEP=16),
        prepare("quantize_k", 8, "0.28", True, BLOCK=128, STEP=16),
        prepare("quantize_k", 4, "0.26", True, BLOCK=16, STEP=16),
        prepare("quantize_v", 4, "0.22", CHANNELS=64),
        prepare("quantize_v", 8, "0.23", CHANNELS=128),
        prepare("quantize_v", 4, "0.23", CHANNELS=32),
        prepare("quantize_v", 16, "0.24", CHANNELS=128),
    ]


# Triton types of the parameters, by name; those of 8-bit queries and keys depend on the variant.
TYPES = (
    dict.fromkeys(("k_scale", "q_scale", "v_scale", "scales", "mean", "k_mean", "k_sum", "v_amax"), "*fp32")
    | dict.fromkeys(("x", "weight", "k_weight", "cos", "sin", "out"), "*bf16")
    | dict.fromkeys(("rows", "valid", "runs"), "i32")
    | {"counts": "*i32"}
)
PARAMETERS = {
    "sage": "q q_scale k k_scale v v_scale out counts rows valid",
    "dense": "q k v out counts rows valid",
    "statistics": "k v k_weight cos sin k_sum v_amax valid",
    "reduce": "k_sum v_amax k_mean v_scale runs valid",
    "quantize_q": "x weight cos sin values scales rows valid",
    "quantize_k": "x weight cos sin mean values scales rows valid",
    "quantize_v": "x scales values rows valid",
}


def spec_of(variant: Variant, heads: int) -> Spec:
    """The specification to compile for ``heads`` heads of a joint projection."""
    eight = "*i8" if variant.int8 else "*fp8e4nv"
    own = {
        "sage": {"q": eight, "k": eight, "v": "*fp8e4nv"},
        "dense": dict.fromkeys("qkv", "*bf16"),
        "statistics": dict.fromkeys("kv", "*bf16"),
    }.get(variant.kind, {"values": eight})
    types = tuple((name, {**TYPES, **own}[name]) for name in PARAMETERS[variant.kind].split())
    joint = 3 * heads * D
    sizes: dict[str, dict[str, Constant]] = {
        "sage": {"HEADS": heads},
        "dense": {"HEADS": heads, "Q_STRIDE": heads * D, "K_STRIDE": heads * D, "V_STRIDE": joint},
        "statistics": {"HEADS": heads, "K_STRIDE": joint, "V_STRIDE": joint, "TURNED": TURNED, "EPS": EPS},
        "reduce": {"HEADS": heads},
        "quantize_q": {"STRIDE": joint, "TURNED": TURNED, "EPS": EPS},
        "quantize_k": {"STRIDE": joint, "TURNED": TURNED, "EPS": EPS},
        "quantize_v": {"STRIDE": joint},
    }
    constants = (*sizes[variant.kind].items(), *variant.constants)
    return Spec(
        variant.kernel,
        types,
        constants,
        variant.warps,
        variant.stages,
        variant.registers,
        gluon=variant.kernel.startswith("attention_hopper"),
    )


@dataclass
class Report:
    """A line of the table."""

    name: str
    expected: str = ""
    failed: str = ""
    registers: int = 0
    stack: int = 0
    shared: int = 0
    ms: float = 0.0  # back to back, with the card hot
    cool: float = 0.0  # in turns, each after a pause
    rate: float = 0.0  # FLOP or bytes a second, in 10^12
    errors: dict[str, float] = field(default_factory=dict)  # relative, by input
    wrong: list[tuple[int, float, bool]] = field(default_factory=list)  # valid length, error, padding zero
    skipped: float | None = None

    def line(self) -> str:
        errors = " ".join(f"{kind} {error:.4f}" for kind, error in self.errors.items())
        skipped = "" if self.skipped is None else f" skipped {self.skipped:.3f}"
        return (
            f"{self.name:46} {self.ms:8.3f} {self.rate:7.1f} (cool {self.cool:7.3f}) {self.registers:3} regs {self.stack:3} stack"
            f" {self.shared:6} shared  {errors}{skipped}  | {self.expected}"
        )


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


class Device:
    """Launches variants, each compiled for the numbers of heads that are used."""

    def __init__(self, binaries: dict[str, Binary]) -> None:
        self.kernels = Kernels(binaries, torch.device("cuda", 0))
        self.spec = functools.cache(spec_of)

    def launch(
        self, variant: Variant, heads: int, grid: tuple[int, ...], *arguments: torch.Tensor | int
    ) -> None:
        whole = (*grid, 1, 1)
        self.kernels(Launch(self.spec(variant, heads), (whole[0], whole[1], whole[2]), arguments))


@dataclass
class Inputs:
    """A joint projection and what norms and turns it; rows from ``valid`` on are NaN."""

    qkv: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    rows: int
    valid: int
    heads: int

    def part(self, index: int) -> torch.Tensor:
        width = self.heads * D
        return self.qkv[:, index * width : (index + 1) * width]


def make_inputs(kind: str, rows: int, valid: int, heads: int, seed: int) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    qkv = torch.empty(rows, 3 * heads * D, dtype=torch.bfloat16, device="cuda")
    for start in range(0, rows, 4096):
        qkv[start : start + 4096] = normal(min(4096, rows - start), 3 * heads * D)
    weights = [1 + 0.1 * normal(D) for _ in range(2)]
    if kind == "outlier":
        # Four channels of K ten times as large, and a mean as large as the rest of K.
        k = qkv[:, heads * D : 2 * heads * D].view(rows, heads, D)
        k += normal(heads, D).bfloat16()
        k[:, :, 98:102] *= 10
        weights[1][98:102] *= 2
    angles = 6.28 * torch.rand(rows, TURNED, generator=generator, device="cuda")
    qkv[valid:] = float("nan")
    q_weight, k_weight, cos, sin = (t.bfloat16() for t in (*weights, angles.cos(), angles.sin()))
    return Inputs(qkv, q_weight, k_weight, cos, sin, rows, valid, heads)


def exact(inputs: Inputs, part: int, head: int) -> torch.Tensor:
    """Queries, keys or values of a head in float64, normed and turned."""
    x = inputs.part(part)[: inputs.valid, head * D : (head + 1) * D].double()
    if part == 2:
        return x
    weight = (inputs.q_weight, inputs.k_weight)[part].double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    half = TURNED // 2
    turned = torch.cat([-x[:, half:TURNED], x[:, :half]], -1)
    cos, sin = inputs.cos[: inputs.valid].double(), inputs.sin[: inputs.valid].double()
    return torch.cat([x[:, :TURNED] * cos + turned * sin, x[:, TURNED:]], -1)


def attended(inputs: Inputs, heads: Iterable[int], queries: torch.Tensor) -> torch.Tensor:
    """Float64 attention, [queries, heads, D]."""
    out = []
    for head in heads:
        q, k, v = (exact(inputs, part, head) for part in range(3))
        out.append(torch.softmax(q[queries] @ k.T * D**-0.5, -1) @ v)
    return torch.stack(out, 1)


class Prepared:
    """Quantized operands of some inputs, made by one variant of each kernel."""

    def __init__(self, device: Device, inputs: Inputs, by: dict[str, Variant]) -> None:
        self.device, self.inputs, self.by = device, inputs, by
        rows, heads = inputs.rows, inputs.heads
        eight = torch.int8 if by["quantize_k"].int8 else torch.float8_e4m3fn
        self.block = by["quantize_k"].number("BLOCK")

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="cuda")

        self.runs = ceil_div(inputs.valid, by["statistics"].number("ROWS"))
        self.k_sum, self.v_amax = empty(2, self.runs, heads, D), empty(self.runs, heads, D)
        self.k_mean, self.v_scale = empty(heads, D), empty(heads, D)
        self.q, self.k = (empty(heads, rows, D, dtype=eight) for _ in range(2))
        self.q_scale, self.k_scale = empty(heads, rows), empty(heads, ceil_div(rows, self.block))
        self.v = empty(heads, D, ceil_div(rows, 128) * 128, dtype=torch.float8_e4m3fn)

    def run(self, kind: str) -> None:
        """Launch the kernel of ``kind``."""
        x, variant = self.inputs, self.by[kind]
        tables, ends = (x.cos, x.sin), (x.rows, x.valid)
        launch = functools.partial(self.device.launch, variant, x.heads)
        if kind == "statistics":
            launch(
                (x.heads, self.runs),
                x.part(1),
                x.part(2),
                x.k_weight,
                *tables,
                self.k_sum,
                self.v_amax,
                x.valid,
            )
        elif kind == "reduce":
            launch((x.heads,), self.k_sum, self.v_amax, self.k_mean, self.v_scale, self.runs, x.valid)
        elif kind == "quantize_q":
            grid = (x.heads, ceil_div(x.rows, variant.number("ROWS")))
            launch(grid, x.part(0), x.q_weight, *tables, self.q, self.q_scale, *ends)
        elif kind == "quantize_k":
            grid = (x.heads, ceil_div(x.rows, self.block))
            launch(grid, x.part(1), x.k_weight, *tables, self.k_mean, self.k, self.k_scale, *ends)
        else:
            grid = (D // variant.number("CHANNELS"), ceil_div(x.rows, 128), x.heads)
            launch(grid, x.part(2), self.v_scale, self.v, *ends)

    def __call__(self) -> Prepared:
        for kind in ("statistics", "reduce", "quantize_q", "quantize_k", "quantize_v"):
            self.run(kind)
        return self


def run_sage(
    device: Device, variant: Variant, x: Inputs, o: Prepared, out: torch.Tensor, counts: torch.Tensor
) -> None:
    grid = (ceil_div(x.rows, variant.number("Q_TILE")), x.heads)
    operands = (o.q, o.q_scale, o.k, o.k_scale, o.v, o.v_scale)
    device.launch(variant, x.heads, grid, *operands, out, counts, x.rows, x.valid)


def run_dense(
    device: Device,
    variant: Variant,
    x: Inputs,
    qkv: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    grid = (ceil_div(x.rows, variant.number("Q_TILE")), x.heads)
    device.launch(variant, x.heads, grid, *qkv, out, counts, x.rows, x.valid)


def dense_operands(x: Inputs) -> tuple[torch.Tensor, ...]:
    """Normed and turned q, k in BF16, and v as it lies in the projection."""
    shape = (x.rows, x.heads * D)
    q, k = (torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for head in range(x.heads):
        columns = slice(head * D, (head + 1) * D)
        q[: x.valid, columns] = exact(x, 0, head).bfloat16()
        k[: x.valid, columns] = exact(x, 1, head).bfloat16()
    return q, k, x.part(2)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


def timed(runs: dict[str, Callable[[], None]], rounds: int, budget: float) -> dict[str, float]:
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
    runs: dict[str, Callable[[], None]], cool: dict[str, float], seconds: float
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


class Bench:
    """What is measured: variants with their reports."""

    def __init__(self, device: Device, ready: list[Variant], reports: dict[str, Report]) -> None:
        self.device, self.reports = device, reports
        self.attention = [v for v in ready if v.kind in ("sage", "dense")]
        self.preparing = [v for v in ready if v.kind not in ("sage", "dense")]

    def makers(self, int8: bool, block: int) -> dict[str, Variant]:
        """The first variant of each preparing kernel for such operands."""
        by: dict[str, Variant] = {}
        for variant in self.preparing:
            if variant.kind in ("quantize_q", "quantize_k") and variant.int8 != int8:
                continue
            if variant.get("BLOCK", block) == block:
                by.setdefault(variant.kind, variant)
        return by

    def runs(self, x: Inputs, out: torch.Tensor, counts: torch.Tensor) -> dict[str, Callable[[], None]]:
        """A launch of every attention variant on ``x``, by name."""
        made: dict[tuple[bool, int], Prepared] = {}
        operands = dense_operands(x)
        found: dict[str, Callable[[], None]] = {}
        for variant in self.attention:
            if variant.kind == "dense":
                run = functools.partial(run_dense, self.device, variant, x, operands, out, counts)
            else:
                key = (variant.int8, variant.number("K_BLOCK"))
                if key not in made:
                    made[key] = Prepared(self.device, x, self.makers(*key))()
                run = functools.partial(run_sage, self.device, variant, x, made[key], out, counts)
            found[variant.name] = run
        return found

    def check_short(self, heads: int) -> None:
        """Every row of every head at awkward lengths, rows after the valid ones poisoned."""
        for valid in LENGTHS:
            x = make_inputs("gaussian", valid + 200, valid, heads, valid)
            truth = attended(x, range(heads), torch.arange(valid, device="cuda"))
            out = torch.empty((x.rows, heads, D), dtype=torch.bfloat16, device="cuda")
            counts = torch.zeros(2, dtype=torch.int32, device="cuda")
            for variant in self.attention:
                if variant.get("THRESHOLD"):
                    continue
                out.fill_(float("nan"))
                self.runs_once(x, out, counts, variant)
                error = relative(out[:valid], truth) if bool(out.isfinite().all()) else float("nan")
                clean = bool((out[valid:] == 0).all())
                report = self.reports[variant.name]
                if not (error < (0.16 if variant.kind == "sage" else 0.006) and clean):
                    report.wrong.append((valid, round(error, 4), clean))
                report.errors["short"] = max(report.errors.get("short", 0.0), error)
        for report in self.reports.values():
            if report.wrong:
                print(f"  WRONG {report.name}: {report.wrong}", flush=True)

    def runs_once(self, x: Inputs, out: torch.Tensor, counts: torch.Tensor, variant: Variant) -> None:
        only = Bench(self.device, [variant, *self.preparing], self.reports)
        only.runs(x, out, counts)[variant.name]()

    def measure(self, rows: int, heads: int, rounds: int) -> None:
        """Errors and times at full length."""
        queries = torch.randint(0, rows, (192,), device="cuda")
        slices = [0, heads // 2]
        out = torch.empty(rows, heads, D, dtype=torch.bfloat16, device="cuda")
        counts = torch.zeros(2, dtype=torch.int32, device="cuda")
        runs: dict[str, Callable[[], None]] = {}
        for kind in ("outlier", "gaussian"):
            x = make_inputs(kind, rows, rows, heads, 7)
            truth = attended(x, slices, queries)
            runs = self.runs(x, out, counts)
            for name, run in runs.items():
                out.fill_(float("nan"))
                counts.zero_()
                run()
                report = self.reports[name]
                report.errors[kind] = relative(out[queries][:, slices], truth)
                skipped, considered = counts.tolist()
                if "threshold" in name:
                    report.skipped = skipped / considered
        for variant in self.preparing:
            by = self.makers(variant.int8, int(variant.get("BLOCK", 128) or 128)) | {variant.kind: variant}
            runs[variant.name] = functools.partial(Prepared(self.device, x, by)().run, variant.kind)
        for int8 in (False, True):
            by = self.makers(int8, 128)
            if len(by) == 5:
                runs[f"prepare {'int8' if int8 else 'fp8'} 128"] = Prepared(self.device, x, by)
        q, k, v = (t.reshape(1, rows, heads, D).transpose(1, 2) for t in dense_operands(x))
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        runs["cudnn bf16"] = lambda: cudnn(q, k, v, None, False)
        flop, part = 4 * rows * rows * heads * D, rows * heads * D
        moved = {"statistics": 4 * part, "reduce": part // 16, "prepare": 13 * part}
        cool = timed(runs, rounds, 60.0)
        for name, ms in timed_hot(runs, cool, 0.7).items():
            report = self.reports.setdefault(name, Report(name))
            word = name.split()[0]
            work = moved.get(word, 3 * part if word.startswith("quantize") else flop)
            report.cool, report.ms, report.rate = cool[name], ms, work / ms / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", default=".", help="regular expression over names of attention variants")
    parser.add_argument("--rows", type=int, default=37_760)
    parser.add_argument("--heads", type=int, default=56)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile-only", metavar="ARCH", help="such as sm_90a; needs no GPU")
    arguments = parser.parse_args()
    started = time.perf_counter()
    wanted = [
        variant
        for variant in variants(arguments.rows)
        if variant.kind not in ("sage", "dense") or re.search(arguments.variants, variant.name)
    ]
    reports = {variant.name: Report(variant.name, variant.expected) for variant in wanted}
    numbers = {number: name for name, number in ARCHES.items()}
    arch = arguments.compile_only
    if arch is None:
        major, minor = torch.cuda.get_device_capability()
        arch = numbers[10 * major + minor]
    folder = Path(tempfile.mkdtemp())
    specs = {spec_of(variant, heads): variant for variant in wanted for heads in sorted({3, arguments.heads})}
    binaries: dict[str, Binary] = {}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        work = functools.partial(compiled, arch=arch, folder=folder)
        for spec, binary, registers, stack in pool.map(work, specs):
            report = reports[specs[spec].name]
            if isinstance(binary, str):
                report.failed = binary
                continue
            binaries[spec.key] = binary
            report.registers, report.stack, report.shared = registers, stack, binary.shared
    print(f"{arch}: {len(specs)} kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)
    for report in reports.values():
        if report.failed:
            print(f"  {report.name}: {report.failed}", flush=True)
    if arguments.compile_only is None:
        bench = Bench(Device(binaries), [v for v in wanted if not reports[v.name].failed], reports)
        bench.check_short(3)
        bench.measure(arguments.rows, arguments.heads, arguments.rounds)
    for report in sorted(reports.values(), key=lambda report: report.ms):
        print(report.line(), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"attention_{arguments.rows}.json"
    device = arch if arguments.compile_only else torch.cuda.get_device_name()
    about = {"device": device, "rows": arguments.rows, "heads": arguments.heads, "torch": torch.__version__}
    target.write_text(
        json.dumps({**about, "variants": [asdict(report) for report in reports.values()]}, indent=1)
    )
    print(f"whole script {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
