"""Times and checks the attention of this package on the GPU that is here, beside that of others.

    bash benchmarks/on_device.sh python3 benchmarks/attention.py --out DIR [--only REGEX] [--rows 37760]

Kernels are compiled in parallel first. Each provider is compared with float64 attention at awkward lengths
with poisoned padding, and at full length on a slice of heads and query rows (Gaussian inputs, and inputs with
strong key-channel outliers and a key mean), then timed back to back. FLOP are 4 * rows^2 * heads * 128; bytes
are the operands of a launch. Of other packages those are timed that are installed: sageattention, cudnn
(nvidia-cudnn-frontend), and with --flashinfer, whose kernels take a minute and a half to compile, flashinfer.
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

from h3compile.errors import BuildError
from h3compile.ops import OPERATORS
from h3compile.ops.cubin import Kernels
from h3compile.ops.kernels.compile import ARCHES, compile_spec, usage
from h3compile.ops.launch import Binary, Launch, Run, Spec
from h3compile.ops.operator import Operand, Outputs, Provider

D, EPS, TURNED = 128, 1e-5, 96
LENGTHS = (1, 15, 16, 17, 63, 127, 128, 129, 191, 255, 1000)
SHORT_HEADS = 3
QK_TYPES, BLOCKS = ("fp8_e4m3", "int8"), (128, 64, 16)
SHARES = (0.1, 0.5, 0.8)  # lambda of Skip-Softmax
# Relative errors on short documents beyond which something is wrong, not rounded.
BOUNDS = {"attention": 0.006, "sage_attention": 0.16}


@dataclass(frozen=True)
class Case:
    """An operator by one of its providers, with the options that its quantized operands have."""

    operator: str
    provider: str
    qk: str = ""
    block: int = 128
    share: float | None = None

    @property
    def name(self) -> str:
        words = [self.operator.removesuffix(".default"), self.provider, self.qk]
        words += [str(self.block)] if self.qk else []
        words += [f"lambda {self.share}"] if self.share is not None else []
        return " ".join(word for word in words if word)


@functools.cache
def provider(operator: str, name: str) -> Provider:
    known = next(one for one in OPERATORS if one.name == operator)
    return next(one for one in known.providers if one.name == name)


def cases() -> Iterator[Case]:
    """What is measured, wherever it is legal."""
    for operator in OPERATORS:
        for name in (one.name for one in operator.providers):
            if operator.name == "attention.default" and name != "sdpa":
                yield Case(operator.name, name)
            elif operator.name == "sage_attention.default":
                for qk, block in itertools.product(QK_TYPES, BLOCKS):
                    yield Case(operator.name, name, qk, block)
            elif operator.name == "attention.skip":
                yield Case(operator.name, name, share=SHARES[-1])
            elif operator.name == "sage_attention.skip":
                for share in SHARES:
                    yield Case(operator.name, name, QK_TYPES[0], 128, share)


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


@dataclass
class Inputs:
    """A joint projection and what norms and turns it; rows from ``valid`` on are NaN."""

    qkv: torch.Tensor  # [1, rows, 3 * heads * D]
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    valid: int
    heads: int
    quantized: dict[tuple[str, int], tuple[torch.Tensor, ...]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.qkv.shape[1]

    def part(self, index: int) -> torch.Tensor:
        return self.qkv.view(1, self.rows, 3, self.heads, D)[:, :, index]

    def prepared(self, run: Run, arch: str, qk: str, block: int) -> tuple[torch.Tensor, ...]:
        """The operands of SAGE."""
        options = (self.heads, EPS, qk, block, True, self.valid)
        weights = (self.q_weight, self.k_weight, self.cos, self.sin)
        made = provider("sage_prepare.default", "triton").launch(run, arch, self.qkv, *weights, *options)
        assert isinstance(made, tuple)
        return made

    @functools.cached_property
    def normed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normed and turned q, k in BF16, and v as it lies in the projection; [1, rows, heads, D]."""
        shape = (1, self.rows, self.heads, D)
        q, k = (self.qkv.new_full(shape, float("nan")) for _ in range(2))
        # There is nothing to compute without data.
        for head in range(0 if self.qkv.is_meta else self.heads):
            for part, target in enumerate((q, k)):
                target[0, : self.valid, head] = exact(self, part, head).bfloat16()
        return q, k, self.part(2)

    def operands(self, run: Run, arch: str, case: Case, rows: int) -> tuple[Operand, ...]:
        """The operands of ``case``, whose threshold is for a document of ``rows`` rows."""
        made: tuple[Operand, ...] = self.normed
        if case.qk:
            key = case.qk, case.block
            if key not in self.quantized:
                self.quantized[key] = self.prepared(run, arch, *key)
            made = (*self.quantized[key], case.block, torch.bfloat16)
        threshold = () if case.share is None else (case.share * rows,)
        return (*made, *threshold, self.valid)


def make_inputs(kind: str, rows: int, valid: int, heads: int, seed: int) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    qkv = torch.empty(1, rows, 3 * heads * D, dtype=torch.bfloat16, device="cuda")
    for start in range(0, rows, 4096):
        qkv[:, start : start + 4096] = normal(min(4096, rows - start), 3 * heads * D)
    weights = [1 + 0.1 * normal(D) for _ in range(2)]
    if kind == "outlier":
        # Four channels of K ten times as large, and a mean as large as the rest of K.
        k = qkv.view(rows, 3, heads, D)[:, 1]
        k += normal(heads, D).bfloat16()
        k[:, :, 98:102] *= 10
        weights[1][98:102] *= 2
    angles = 6.28 * torch.rand(rows, TURNED, generator=generator, device="cuda")
    qkv[:, valid:] = float("nan")
    q_weight, k_weight, cos, sin = (t.bfloat16() for t in (*weights, angles.cos(), angles.sin()))
    return Inputs(qkv, q_weight, k_weight, cos, sin, valid, heads)


def stand_in(heads: int) -> Inputs:
    """Inputs without data: what is launched on them is what is launched on others with as many heads."""
    bf16 = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")
    return Inputs(
        bf16(1, 128, 3 * heads * D), bf16(D), bf16(D), bf16(128, TURNED), bf16(128, TURNED), 128, heads
    )


def exact(inputs: Inputs, part: int, head: int) -> torch.Tensor:
    """Queries, keys or values of a head in float64, normed and turned."""
    x = inputs.part(part)[0, : inputs.valid, head].double()
    if part == 2:
        return x
    weight = (inputs.q_weight, inputs.k_weight)[part].double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    half = TURNED // 2
    turned = torch.cat([-x[:, half:TURNED], x[:, :half]], -1)
    cos, sin = inputs.cos[: inputs.valid].double(), inputs.sin[: inputs.valid].double()
    return torch.cat([x[:, :TURNED] * cos + turned * sin, x[:, TURNED:]], -1)


def attended(inputs: Inputs, heads: Iterable[int], queries: torch.Tensor) -> torch.Tensor:
    """Float64 attention of some heads and query rows, [queries, heads, D]."""
    out = []
    for head in heads:
        q, k, v = (exact(inputs, part, head) for part in range(3))
        out.append(torch.softmax(q[queries] @ k.T * D**-0.5, -1) @ v)
    return torch.stack(out, 1)


def sampled(truth: torch.Tensor, queries: torch.Tensor, heads: list[int], out: torch.Tensor) -> float:
    """The error of ``out`` [1, rows, heads, D] where the truth is known."""
    return relative(out[0, queries][:, heads], truth)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


# Other packages: from q, k, v [1, rows, heads, D] a function that computes attention of that shape, and the
# scale of its result. Only SageAttention quantizes within the time; the others are given 8-bit operands.
Peer = tuple[Callable[[], torch.Tensor], float]


def by_sageattention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Peer:
    sageattn = importlib.import_module("sageattention").sageattn
    parts = [part.transpose(1, 2).contiguous() for part in (q, k, v)]
    return lambda: sageattn(*parts, tensor_layout="HND", is_causal=False).transpose(1, 2), 1.0


def per_tensor(x: torch.Tensor) -> tuple[torch.Tensor, float]:
    scale = float(x.abs().max()) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def by_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Peer:
    cudnn = importlib.import_module("cudnn")
    fp8, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    made, scales = zip(*(per_tensor(part) for part in (q, k, v)), strict=True)
    parts = [part.transpose(1, 2) for part in made]
    out = torch.empty_like(q, dtype=torch.float8_e4m3fn).transpose(1, 2)
    # The result is no larger than the largest value.
    numbers = [*scales, 1 / 448, 448.0, 1 / scales[2]]
    scalars = [torch.full((1, 1, 1, 1), number, device="cuda") for number in numbers]
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    types = {"io_data_type": fp8, "intermediate_data_type": fp32, "compute_data_type": fp32}
    graph = cudnn.pygraph(handle=handle, **types)

    def tensor(data: torch.Tensor, kind: object) -> object:
        return graph.tensor(dim=list(data.shape), stride=list(data.stride()), data_type=kind)

    given = [tensor(part, fp8) for part in parts] + [tensor(scalar, fp32) for scalar in scalars]
    scaling = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    names = ("q", "k", "v", *scaling)
    result, _, *maxima = graph.sdpa_fp8(
        **dict(zip(names, given, strict=True)),
        generate_stats=False,
        attn_scale=D**-0.5,
        use_causal_mask=False,
    )
    result.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride())).set_data_type(fp8)
    largest = [torch.zeros(1, 1, 1, 1, device="cuda") for _ in maxima]
    for one in maxima:
        one.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(fp32)
    graph.build([cudnn.heur_mode.A])
    pack = dict(zip([*given, result, *maxima], [*parts, *scalars, out, *largest], strict=True))
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")

    def attention() -> torch.Tensor:
        graph.execute(pack, workspace, handle=handle)
        return out.transpose(1, 2)

    return attention, scales[2]


def by_flashinfer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Peer:
    attend = importlib.import_module("flashinfer").single_prefill_with_kv_cache
    parts, scales = zip(*(per_tensor(part[0]) for part in (q, k, v)), strict=True)
    heads = [torch.full((q.shape[2],), scale, device="cuda") for scale in scales]
    options = {"o_dtype": torch.bfloat16, "causal": False, "backend": "fa3"}
    return lambda: attend(*parts, *heads, **options)[None], 1.0


PEERS = {
    "SageAttention, with quantization": by_sageattention,
    "cuDNN FP8, one scale a tensor": by_cudnn,
    "FlashInfer FA3 FP8, one scale a head": by_flashinfer,
}


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


def alone(outputs: Outputs) -> torch.Tensor:
    """The result of an attention without the counts of tiles."""
    return outputs if isinstance(outputs, torch.Tensor) else outputs[0]


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

    def check_short(self) -> None:
        """Every row of every head at awkward lengths, rows after the valid ones poisoned."""
        for valid in LENGTHS:
            x = make_inputs("gaussian", valid + 200, valid, SHORT_HEADS, valid)
            truth = attended(x, range(x.heads), torch.arange(valid, device="cuda"))
            for case in self.cases:
                if case.share is not None:
                    continue
                out = alone(self.call(case, x, valid)())[0]
                error = relative(out[:valid], truth) if bool(out.isfinite().all()) else float("nan")
                clean = bool((out[valid:] == 0).all())
                report = self.reports[case.name]
                if not (error < BOUNDS[case.operator.partition(".")[0]] and clean):
                    report.wrong.append((valid, round(error, 4), clean))
                report.errors["short"] = max(report.errors.get("short", 0.0), error)

    def measure(self, rows: int, heads: int, rounds: int, flashinfer: bool) -> None:
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
                outputs = run()
                report = self.reports[case.name]
                report.errors[kind] = error(alone(outputs))
                if isinstance(outputs, tuple):
                    skipped, considered = outputs[1].tolist()
                    report.skipped = skipped / considered
                runs[case.name] = run
            self.add_peers(runs, x, kind, flashinfer, error)
        moved = self.add_preparation(runs, x)
        flop = 4 * rows * rows * heads * D
        cool = timed(runs, rounds, 60.0)
        for name, ms in timed_hot(runs, cool, 0.7).items():
            report = self.reports.setdefault(name, Report(name))
            report.unit = "TB/s" if name in moved else "TFLOP/s"
            report.cool, report.ms, report.rate = cool[name], ms, moved.get(name, flop) / ms / 1e9

    def add_peers(
        self,
        runs: dict[str, Callable[[], object]],
        x: Inputs,
        kind: str,
        flashinfer: bool,
        error: Callable[[torch.Tensor], float],
    ) -> None:
        """What other packages make of ``x``; a package that fails says why, and is left out."""
        for name, make in PEERS.items():
            report = self.reports.setdefault(name, Report(name))
            if make is by_flashinfer and not flashinfer:
                report.failed = "not asked for (--flashinfer)"
            if report.failed:
                continue
            try:
                run, scale = make(*x.normed)
                report.errors[kind] = error(run().double() * scale)
            except Exception as problem:  # whatever a package of others raises
                report.failed = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:150]}"
            else:
                runs[name] = run

    def add_preparation(self, runs: dict[str, Callable[[], object]], x: Inputs) -> dict[str, int]:
        """Preparing, in parts, whole and with the attention after it; the bytes that the former move."""
        moved: dict[str, int] = {}
        seen: set[Spec] = set()
        for qk, block in itertools.product(QK_TYPES, BLOCKS):
            launches: list[Launch] = []
            x.prepared(launches.append, self.arch, qk, block)
            for index, launch in enumerate(launches):
                if launch.spec in seen:
                    continue
                seen.add(launch.spec)
                name = f"  {index} {launch.spec.kernel.partition(':')[2]} {qk} {block}"
                moved[name] = sum(a.nbytes for a in launch.arguments if isinstance(a, torch.Tensor))
                runs[name] = functools.partial(self.run, launch)
            if block != BLOCKS[0]:
                continue
            whole = f"prepare {qk} {block}"
            moved[whole] = sum(moved_by(x.prepared(self.run, self.arch, qk, block), x.qkv))
            runs[whole] = functools.partial(x.prepared, self.run, self.arch, qk, block)
            for case in self.cases:
                if (case.operator, case.qk, case.block) == ("sage_attention.default", qk, block):
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
        for qk, block in itertools.product(QK_TYPES, BLOCKS):
            x.prepared(launches.append, arch, qk, block)
        found.update((launch.spec, "prepare") for launch in launches)
        for case in ready:
            if case.provider == "cudnn" or (case.share is not None and count != heads):
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
        major, minor = torch.cuda.get_device_capability()
        arch = next(name for name, number in ARCHES.items() if number == 10 * major + minor)
    x = stand_in(arguments.heads)
    wanted = [
        case
        for case in cases()
        if re.search(arguments.only, case.name)
        and provider(case.operator, case.provider).illegal(
            arch, *x.operands(lambda _: None, arch, case, arguments.rows)
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
            bench.measure(arguments.rows, arguments.heads, arguments.rounds, arguments.flashinfer)
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
