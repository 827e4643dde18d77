"""The row kernels and the FP8 linear on a GPU: bytes a second, operations a second, distance to float64.

Every kernel is timed in several launch shapes at the rows of a 124-frame clip, with inputs far larger than
the cache, and checked against its reference evaluated in float64; the FP8 linear beside torch's own.

    python benchmarks/elementwise.py --out results
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch

from h3compile.ops import OPERATORS
from h3compile.ops.cubin import Kernels
from h3compile.ops.kernels.compile import Cubin, Usage, compile_spec, usage
from h3compile.ops.launch import Binary, Launch, Spec, ceil_div
from h3compile.ops.numerics import FP8, quantized_rows
from h3compile.ops.operator import Operand, Operator

HIDDEN, INNER, HEADS, HEAD_DIM, TURNED = 5376, 14336, 56, 128, 96
ARCH = "sm_90a"
COPY = 4.17e12  # bytes a second of a copy on an H200
CHECKED = 384  # rows compared with float64, half from either end
EPS = 1e-5
LINEARS = {"qkv": (21504, 5376), "out": (5376, 7168), "up": (28672, 5376), "down": (5376, 14336)}
# Other launch shapes than the chosen one. Of rows: warps.
ROW_WARPS = (4, 8, 16)
# Of heads: warps, and tiles of heads a program.
HEAD_TILES = ((1, 7), (2, 4), (4, 7))
# Of the linear: rows and columns of a tile, stages, parts of the result, persistent.
LINEAR_TILES = (
    (128, 256, 3, 1, False),
    (128, 256, 4, 4, True),
    (256, 128, 4, 2, True),
    (128, 128, 6, 2, True),
)


@dataclass(frozen=True)
class Case:
    """A call to time: the operator's name, a label, and its operands by a function of device."""

    operator: str
    label: str
    operands: Callable[[str], tuple[Operand, ...]]


@dataclass(frozen=True)
class Variant:
    """A launch shape of a case."""

    label: str
    spec: Spec
    grid: tuple[int, int, int]


@dataclass
class Row:
    """A line of the result; milliseconds are medians."""

    case: str
    variant: str
    ms: float
    rate: float  # bytes or operations a second
    share: float  # of the copy ceiling, where bytes are what it takes
    error: float
    reference_error: float
    registers: int
    stack: int


def normal(device: str, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random numbers with the outlier channels that residual streams have; on meta only a shape."""
    values = torch.randn(shape, device=device) * scale
    values[..., ::617] *= 20
    return values.to(dtype)


def packed_index(device: str, rows: int, scattered: bool) -> torch.Tensor:
    """Which of six table rows every sequence row reads: text, audio, video, or any in any order."""
    if scattered:
        return torch.randint(0, 6, (rows,), device=device)
    index = torch.full((rows,), 3, device=device)
    index[:50] = 1
    index[50:464] = 5
    return index


def row_cases(rows: int) -> Iterator[Case]:
    """The row kernels as a block calls them."""

    def norm(device: str, scattered: bool = False) -> tuple[torch.Tensor, ...]:
        weight = normal(device, HIDDEN) * 0.1 + 1
        table = normal(device, 6, 6 * HIDDEN, scale=0.3)
        return normal(device, 1, rows, HIDDEN), weight, table, packed_index(device, rows, scattered)

    def gate_norm(device: str, scattered: bool = False) -> tuple[torch.Tensor, ...]:
        x, *others = norm(device, scattered)
        return x, normal(device, 1, rows, HIDDEN), *others

    def gate(device: str) -> tuple[Operand, ...]:
        x, _, table, index = norm(device)
        return x, normal(device, 1, rows, HIDDEN), table, index, 5

    def rope(device: str) -> tuple[Operand, ...]:
        angles = normal(device, rows, TURNED // 2, dtype=torch.float32) * 10
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        weights = [normal(device, HEAD_DIM) * 0.1 + 1 for _ in range(2)]
        return normal(device, 1, rows, 3 * HEADS * HEAD_DIM), *weights, cos, sin, HEADS, EPS

    for kind in ("default", "fp8"):
        for order, scattered in (("", False), (", scattered", True)):
            yield Case(f"norm_modulate.{kind}", order, lambda d, s=scattered: (*norm(d, s), 0, 1, EPS))
            yield Case(
                f"gate_norm_modulate.{kind}", order, lambda d, s=scattered: (*gate_norm(d, s), 2, 3, 4, EPS)
            )
    yield Case("gate_residual.default", "", gate)
    for kind in ("default", "fp8"):
        yield Case(f"swiglu.{kind}", "", lambda d: (normal(d, 1, rows, 2 * INNER, scale=2), False))
    yield Case("quantize_rows.default", " 7168", lambda d: (normal(d, 1, rows, HEADS * HEAD_DIM),))
    yield Case("quantize_rows.default", " 5376", lambda d: (normal(d, 1, rows, HIDDEN),))
    yield Case("qk_norm_rope.default", "", rope)


def linear_cases(rows: int) -> Iterator[Case]:
    """The FP8 linears of a block."""
    for name, (n, k) in LINEARS.items():

        def operands(device: str, n: int = n, k: int = k) -> tuple[Operand, ...]:
            x, x_scale = quantized_rows(normal(device, 1, rows, k), None)
            weight, weight_scale = quantized_rows(normal(device, n, k, scale=0.02), None)
            return x, x_scale, weight, weight_scale.flatten(), None, torch.bfloat16

        yield Case("linear_fp8.default", f" {name} {n}x{k}", operands)


def recorded(operator: Operator, operands: tuple[Operand, ...]) -> Launch:
    """The one launch that our provider makes of a call."""
    provider = next(provider for provider in operator.providers if provider.name == "triton")
    launches: list[Launch] = []
    provider.launch(launches.append, ARCH, *operands)
    (launch,) = launches
    return launch


def variants(launch: Launch, processors: int) -> Iterator[Variant]:
    """The launch as the provider makes it, and other shapes of it."""
    spec, constants = launch.spec, dict(launch.spec.constants)

    def changed(
        label: str, warps: int, grid: tuple[int, int, int], stages: int = 3, **values: int | bool
    ) -> Variant:
        merged = tuple({**constants, **values}.items())
        return Variant(label, replace(spec, constants=merged, warps=warps, stages=stages), grid)

    yield Variant("chosen", spec, launch.grid)
    if "BLOCK" in constants:
        if spec.registers is not None:
            yield Variant("all registers", replace(spec, registers=None), launch.grid)
        for warps in (warps for warps in ROW_WARPS if warps != spec.warps):
            yield changed(f"{warps} warps", warps, launch.grid, BLOCK=256 * warps)
    elif "TILES" in constants:
        for warps, tiles in HEAD_TILES:
            tile = 256 * warps // HEAD_DIM
            grid = (launch.grid[0], ceil_div(HEADS, tile * tiles), 1)
            yield changed(f"{warps} warps, {tile} x {tiles} heads", warps, grid, TILE=tile, TILES=tiles)
    else:
        rows, n = launch.arguments[-1], constants["N"]
        assert isinstance(rows, int) and isinstance(n, int)
        for m, columns, stages, split, persistent in LINEAR_TILES:
            count = ceil_div(rows, m) * ceil_div(n, columns)
            grid = (min(count, processors) if persistent else count, 1, 1)
            label = f"{m} x {columns}, {stages} stages, /{split}{', persistent' * persistent}"
            sizes = {"TILE_M": m, "TILE_N": columns, "PERSISTENT": persistent, "SPLIT": split}
            yield changed(label, spec.warps, grid, stages, STAGES=stages, **sizes)


def compiled(spec: Spec) -> tuple[Cubin, Usage]:
    cubin = compile_spec(spec, ARCH)
    return cubin, usage(cubin.code)


def milliseconds(call: Callable[[], object], repeat: int) -> float:
    for _ in range(3):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def sampled(value: Operand, rows: int) -> Operand:
    """The checked rows of an operand or output that has a dimension of ``rows``."""
    if not isinstance(value, torch.Tensor) or rows not in value.shape:
        return value
    dimension = value.shape.index(rows)
    half = CHECKED // 2
    return torch.cat(
        (value.narrow(dimension, 0, half), value.narrow(dimension, rows - half, half)), dimension
    )


def dequantized(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Outputs in float64, E4M3 values times the scales that follow them."""
    parts = list(outputs) if isinstance(outputs, tuple) else [outputs]
    if parts[-1].dtype == torch.float32 and parts[-2].dtype == FP8:
        scales = parts.pop().double()
        parts[-1] = parts[-1].double() * scales
    return [part.double() for part in parts]


def distance(outputs: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The largest relative error, by norm, of any output."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(outputs, exact, strict=True))


def exact_of(operator: Operator, operands: list[Operand]) -> list[torch.Tensor]:
    """The call without rounding: float64 throughout, no FP8."""
    linear = operator.name == "linear_fp8.default"
    plain = {"norm_modulate.fp8", "gate_norm_modulate.fp8", "swiglu.fp8"}
    if operator.name == "quantize_rows.default":
        assert isinstance(operands[0], torch.Tensor)
        return [operands[0].double()]
    if operator.name in plain:
        name = operator.name.replace(".fp8", ".default")
        operator = next(other for other in OPERATORS if other.name == name)
    doubled = [o.double() if isinstance(o, torch.Tensor) and o.is_floating_point() else o for o in operands]
    if linear:
        doubled[-1] = torch.float64
    return dequantized(operator.reference(*doubled))


def measured(
    case: Case, rows: int, built: dict[Spec, tuple[Cubin, Usage]], folder: Path, repeat: int
) -> Iterator[Row]:
    """Every variant of a case, timed and checked."""
    operator = next(operator for operator in OPERATORS if operator.name == case.operator)
    torch.manual_seed(0)
    operands = case.operands("cuda")
    part = [sampled(operand, rows) for operand in operands]
    exact = exact_of(operator, part)
    own = distance(dequantized(operator.reference(*part)), exact)
    cost = operator.cost(*operands)
    linear = case.operator.startswith("linear")
    work = cost.flop["float8_e4m3fn"] if linear else cost.bytes

    def row(label: str, call: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]], taken: Usage) -> Row:
        outputs = call()
        parts = outputs if isinstance(outputs, tuple) else (outputs,)
        got = dequantized(tuple(sampled(o, rows) for o in parts))  # type: ignore[misc]
        error = distance(got, exact)
        ms = milliseconds(call, repeat)
        rate = work / ms * 1e3
        share = 0.0 if linear else rate / COPY
        return Row(
            case.operator + case.label, label, ms, rate, share, error, own, taken.registers, taken.stack
        )

    provider = next(provider for provider in operator.providers if provider.name == "triton")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for variant in variants(recorded(operator, operands), processors):
        cubin, taken = built[variant.spec]
        file = folder / f"{variant.spec.key}.cubin"
        file.write_bytes(cubin.code)
        fields = {name: value for name, value in asdict(cubin).items() if name != "code"}
        kernels = Kernels({variant.spec.key: Binary(file=file, **fields)}, torch.device("cuda", 0))

        def run(launch: Launch, variant: Variant = variant, kernels: Kernels = kernels) -> None:
            kernels(replace(launch, spec=variant.spec, grid=variant.grid))

        yield row(variant.label, lambda run=run: provider.launch(run, ARCH, *operands), taken)
    for other in operator.providers:
        if other is not provider:
            yield row(other.name, lambda other=other: other.launch(None, ARCH, *operands), Usage(0, 0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for elementwise.json")
    parser.add_argument("--rows", type=int, default=37760)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--compile-only", action="store_true", help="no GPU: only build the variants")
    options = parser.parse_args()
    rows = options.rows
    cases = [
        case for case in (*row_cases(rows), *linear_cases(rows)) if options.only in case.operator + case.label
    ]
    by_name = {operator.name: operator for operator in OPERATORS}
    # Forked before CUDA is touched: the workers have everything imported.
    specs: dict[Spec, None] = {}
    for case in cases:
        launch = recorded(by_name[case.operator], case.operands("meta"))
        specs.update((variant.spec, None) for variant in variants(launch, 132))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        built = dict(zip(specs, pool.map(compiled, specs), strict=True))
    if options.compile_only:
        for spec, (cubin, taken) in built.items():
            print(f"{spec.key}: {spec.warps} warps, {taken}, {cubin.shared} bytes shared")
        return
    lines: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        source = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        target = torch.empty_like(source)
        ms = milliseconds(lambda: target.copy_(source), options.repeat)
        print(f"copy {2 * source.numel() * 2 / ms / 1e9:.2f} TB/s, {len(built)} variants compiled")
        for case in cases:
            print(f"{case.operator}{case.label}")
            for line in measured(case, rows, built, Path(folder), options.repeat):
                lines.append(line)
                share = f" {line.share:.3f}" if line.share else ""
                print(
                    f"  {line.variant:<44} {line.ms:7.3f} ms {line.rate / 1e12:8.2f} T/s{share}  "
                    f"{line.registers} regs {line.stack} stack  "
                    f"error {line.error:.3e} ({line.reference_error:.3e})"
                )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "elementwise.json").write_text(json.dumps([asdict(line) for line in lines], indent=1))


if __name__ == "__main__":
    main()
