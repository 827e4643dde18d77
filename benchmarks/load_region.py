"""Compile one real-width region, load it in a new process that cannot compile, and judge what it does there.

    python benchmarks/load_region.py --device cuda --region block

prints one JSON object: seconds and bytes of the build; in the new process the seconds to load, every
program it started, what it imported of a compiler, its distance from float64 beside eager's at small
lengths, from eager at large ones, and milliseconds a call (median of `--repeats`, CUDA events) beside eager
and, in a third process, beside `torch.compile` of the same graph.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, fx

from h3compile.program.dims import evaluate_dim
from h3compile.program.region import Port, Region
from h3compile.program.serialize import region_from_json, region_to_json

EXACT_LENGTHS = (1, 2, 257, 2048)  # float64 attention over more rows does not fit
TIMESTEPS = 2
COMPILERS = ("torch._inductor", "torch._dynamo", "triton")
LAUNCHES = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system")


def program_region(name: str) -> tuple[Region, tuple[object, ...]]:
    """A region of the release's program, with two blocks in place of fifty: the regions are the same."""
    from h3compile.models.h3 import RELEASE_CONFIG
    from h3compile.models.trace import trace
    from h3compile.passes.canonicalize import Canonicalize
    from h3compile.passes.fold_schedule import FoldSchedule
    from h3compile.passes.hoist import Hoist
    from h3compile.passes.outline import Outline
    from h3compile.pipeline.manager import Manager
    from h3compile.targets import find_target

    program = trace({**RELEASE_CONFIG, "num_layers": 2})
    passes = [Canonicalize(), Outline(), Hoist(), FoldSchedule()]
    program, _ = Manager(passes).run(program, find_target("cpu"))
    return program.regions[name], program.facts.dims


def make_inputs(region: Region, rows: int, device: str) -> list[Tensor]:
    """Seeded inputs of plausible size; every row count of the region is ``rows``."""
    generator = torch.Generator(device).manual_seed(rows)

    def one(port: Port, is_weight: bool) -> Tensor:
        sizes = {name: TIMESTEPS if name == "timesteps" else rows for name in _lengths(region)}
        shape = [int(evaluate_dim(dim, sizes)) for dim in port.shape]
        if not port.dtype.is_floating_point:
            top = (
                3 * TIMESTEPS if "modulation" in port.name else TIMESTEPS if "timestep" in port.name else rows
            )
            return torch.randint(0, top, shape, generator=generator, device=device, dtype=port.dtype)
        value = torch.randn(shape, generator=generator, device=device)
        if is_weight and len(shape) == 1:
            value = 1 + 0.1 * value
        elif is_weight:
            value = value / shape[-1] ** 0.5
        elif port.name.startswith(("cos", "sin")):
            value = torch.cos(3 * value)
        return value.to(port.dtype)

    return [one(port, False) for port in region.inputs] + [one(port, True) for port in region.weights]


def _lengths(region: Region) -> set[str]:
    words = " ".join(dim for port in region.placeholders for dim in port.shape if isinstance(dim, str))
    return set("".join(letter if letter.isidentifier() else " " for letter in words).split())


def eager_of(region: Region, device: str) -> fx.GraphModule:
    """The region's graph, operator by operator, on ``device``."""
    from h3compile.program.propagate import retarget

    return fx.GraphModule(torch.nn.Module(), retarget(region.graph, device))


def in_float64(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The graph over doubles: casts to narrower types are dropped."""

    def widened(value: object) -> object:
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    double = fx.Graph()
    double.output(double.graph_copy(graph.graph, {}))
    for node in double.nodes:
        if node.op == "call_function":
            node.args = fx.node.map_aggregate(node.args, widened)
            node.kwargs = fx.node.map_aggregate(node.kwargs, widened)
    module = fx.GraphModule(torch.nn.Module(), double)
    return tuple(module(*(x.double() if x.is_floating_point() else x for x in inputs)))


def milliseconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Median time of a call; by CUDA events on a GPU."""
    run()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - begin))
    return round(statistics.median(times), 3)


def _rms(values: Sequence[Tensor]) -> float:
    return float(torch.cat([value.double().flatten() for value in values]).square().mean().sqrt())


def _distance(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return _rms([a.double() - b.double() for a, b in zip(left, right, strict=True)])


def judge(folder: Path, region: Region, device: str, rows: Sequence[int], repeats: int) -> dict[str, object]:
    """What the artifact does in this process, which must not be able to compile."""
    started: list[str] = []
    sys.addaudithook(
        lambda event, arguments: started.append(f"{event} {arguments[0]}") if event in LAUNCHES else None
    )
    torch.zeros(1, device=device)  # the CUDA context is not part of loading
    from h3compile.runtime.artifact import load_artifact

    begin = time.perf_counter()
    run = load_artifact(folder, device)
    report: dict[str, object] = {"load_seconds": round(time.perf_counter() - begin, 4)}
    inputs = make_inputs(region, rows[0], device)
    begin = time.perf_counter()
    outputs = run(inputs)
    if device == "cuda":
        torch.cuda.synchronize()
    report["first_call_seconds"] = round(time.perf_counter() - begin, 4)
    del outputs
    # Judged before eager runs: its operators may import what they like.
    report["compilers_imported"] = sorted(
        name
        for name in sys.modules
        if name in COMPILERS or name.startswith(tuple(f"{c}." for c in COMPILERS))
    )
    report["programs_started"] = list(started)
    eager = eager_of(region, device)
    exact = {}
    for length in EXACT_LENGTHS:
        small = make_inputs(region, length, device)
        truth = in_float64(eager, small)
        exact[length] = {"compiled": _distance(run(small), truth), "eager": _distance(eager(*small), truth)}
    report["rms_from_float64"] = exact
    large: dict[int, object] = {}
    for length in rows:
        inputs = make_inputs(region, length, device)
        expected, outputs = eager(*inputs), run(inputs)
        entry = {"relative_rms_from_eager": _distance(outputs, expected) / _rms(expected)}
        del expected, outputs
        entry["compiled_ms"] = milliseconds(lambda x=inputs: run(x), device, repeats)
        entry["eager_ms"] = milliseconds(lambda x=inputs: eager(*x), device, repeats)
        large[length] = entry
    report["lengths"] = large
    caches = [Path(os.environ[name]) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    report["cache_files"] = sum(1 for cache in caches for file in cache.rglob("*") if file.is_file())
    return report


def by_torch_compile(region: Region, device: str, rows: Sequence[int], repeats: int) -> dict[int, float]:
    """The same graph under `torch.compile` with dynamic shapes, for comparison."""
    compiled = torch.compile(eager_of(region, device), dynamic=True)
    times = {}
    with torch.no_grad():
        for length in rows:
            inputs = make_inputs(region, length, device)
            times[length] = milliseconds(lambda x=inputs: compiled(*x), device, repeats)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--region", default="block")
    parser.add_argument("--rows", type=int, nargs="+", default=[37_760, 4096, 20_001, 75_000])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--attention", default="", help="SDPBackend names in order, comma-separated")
    parser.add_argument("--tune", choices=("", "max_autotune", "coordinate_descent"), default="")
    parser.add_argument("--child", choices=("judge", "compile"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        region = region_from_json((options.folder / "graph.json").read_text())
        if options.child == "compile":
            print(json.dumps(by_torch_compile(region, options.device, options.rows, options.repeats)))
        else:
            with torch.no_grad():
                report = judge(
                    options.folder / "region", region, options.device, options.rows, options.repeats
                )
            print(json.dumps(report))
        return

    from h3compile.backends.inductor import InductorOptions, compile_region
    from h3compile.program.propagate import propagate

    region, dims = program_region(options.region)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ |= {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/build-cache",
            "TRITON_CACHE_DIR": f"{folder}/build-triton",
        }
        built = compile_region(
            propagate(region, dims, options.device).module(),
            device=options.device,
            output=folder / "region",
            largest={"timesteps": 4096},
            options=InductorOptions(
                max_autotune=options.tune == "max_autotune",
                coordinate_descent=options.tune == "coordinate_descent",
                attention=tuple(filter(None, options.attention.split(","))),
            ),
        )
        (folder / "graph.json").write_text(region_to_json(region))
        result: dict[str, object] = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
            "region": options.region,
            "build_seconds": round(built.seconds, 2),
            "bytes": built.size,
            "kernels": len(built.info.kernels),
            "assumptions": built.info.assumptions,
        }
        blind = {
            "PATH": "/nonexistent",
            "CXX": "/nonexistent",
            "CC": "/nonexistent",
            "TRITON_PTXAS_PATH": "/nonexistent",
        }
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/empty", "TRITON_CACHE_DIR": f"{folder}/empty-triton"}
        for child, environment in (("judge", blind | caches), ("compile", {})):
            command = [sys.executable, __file__, *sys.argv[1:], "--child", child, "--folder", str(folder)]
            done = subprocess.run(
                command, env=os.environ | environment, capture_output=True, text=True, check=False
            )
            result[child] = (
                json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-3000:]
            )
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
