"""One real-width block region on a GPU: right, as fast as torch.compile, loaded without compiling.

Builds the regions of the released configuration, saves them, loads them in a new process with empty
caches and without a compiler, checks them against a float64 evaluation, and times them beside the
block that Diffusers ships, eager and under torch.compile: same weights, same inputs, one run.

    python benchmarks/block_region.py --out results
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

HEADS, HEAD_DIM, HIDDEN = 56, 128, 5376
Tensors = dict[str, torch.Tensor]


def program():  # type: ignore[no-untyped-def]
    """The final program of the release, with two layers: the block region is the same for fifty."""
    from h3compile.models.h3 import RELEASE_CONFIG
    from h3compile.models.trace import trace
    from h3compile.pipeline.manager import Manager
    from h3compile.pipeline.registry import Registry
    from h3compile.pipeline.spelling import resolve
    from h3compile.targets import detect

    passes, _ = resolve("", Registry.default())
    return Manager(passes).run(trace({**RELEASE_CONFIG, "num_layers": 2}), detect())[0]


def diffusers_block(seed: int = 0) -> torch.nn.Module:
    """Diffusers' block at full width with random BF16 weights on the GPU."""
    from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3TransformerBlock

    torch.manual_seed(seed)
    with torch.device("cuda"):
        block = MiniMaxH3TransformerBlock(HIDDEN, HEADS, HEAD_DIM, 14336, 2688, 1e-5, 1e-5)
    return block.to(torch.bfloat16).eval().requires_grad_(False)


def block_inputs(rows: int, timesteps: int, seed: int = 1) -> Tensors:
    """Random inputs of one block, with the outlier channels that real residual streams have."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    hidden = normal(1, rows, HIDDEN)
    hidden[..., ::617] *= 20
    angles = normal(rows, 48) * 10
    angles = torch.cat((angles, angles), -1)
    index = torch.randint(0, 3 * timesteps, (rows,), device="cuda", generator=generator)
    return {
        "hidden": hidden.bfloat16(),
        "temb": normal(timesteps, 2688),
        "index": index,
        "cos": angles.cos(),
        "sin": angles.sin(),
    }


def region_arguments(region, block: torch.nn.Module, inputs: Tensors) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """Inputs and weights in the order of the region's ports."""
    # Each t alone, as the tables are evaluated.
    linear = block.adaln_proj.linear
    rows = torch.nn.functional.silu(inputs["temb"]).bfloat16().split(1)
    modulation = torch.cat([torch.nn.functional.linear(row, linear.weight, linear.bias) for row in rows])
    given = {
        "modulation": modulation,
        "modulation_index": inputs["index"],
        "cos_bf16": inputs["cos"].bfloat16(),
        "sin_bf16": inputs["sin"].bfloat16(),
    }
    weights = block.state_dict()
    return [
        *(given.get(port.name, inputs["hidden"]) for port in region.inputs),
        *(weights[port.name] for port in region.weights),
    ]


def attention_in_float64(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention in float64, a head and 2048 queries at a time: the scores of all would not fit."""
    out = torch.empty_like(query)
    for head in range(query.shape[1]):
        for start in range(0, query.shape[2], 2048):
            part = slice(start, start + 2048)
            scores = query[:, head, part] @ key[:, head].mT * query.shape[-1] ** -0.5
            out[:, head, part] = scores.softmax(-1) @ value[:, head]
    return out


def exact(region, arguments: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """The region evaluated in float64 on the GPU."""
    from h3compile.program.interpreter import retype
    from h3compile.program.retarget import retarget

    graph = retarget(region.graph, "cuda")
    retype(graph, torch.float64)
    for node in graph.nodes:
        if node.target is torch.ops.aten.scaled_dot_product_attention.default:
            node.target = attention_in_float64
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    wide = [a.double() if a.is_floating_point() else a for a in arguments]
    return module(*wide)[0]


def distance(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value.double() - reference).norm() / reference.norm())


def medians(runs: Mapping[str, Callable[[], object]], rounds: int, repeat: int) -> dict[str, float]:
    """Milliseconds a call, by name: the runs take turns, so that the card is as warm for each."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            for _ in range(repeat):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                run()
                end.record()
                torch.cuda.synchronize()
                samples[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in samples.items()}


@contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """An environment without compilers and with caches that are empty."""
    with tempfile.TemporaryDirectory() as folder:
        yield {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "CXX": "/nonexistent",
            "CC": "/nonexistent",
            "TRITON_PTXAS_PATH": "/nonexistent",
        }


def child(regions: list[str]) -> None:
    """In a new process: load every region, run the first, and count what was compiled."""
    from h3compile.runtime.artifact import load_artifact

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    device = torch.device("cuda", 0)
    seconds, loaded = {}, {}
    for path in regions:
        start = time.perf_counter()
        loaded[path] = load_artifact(Path(path), device)
        torch.cuda.synchronize()
        seconds[Path(path).name] = time.perf_counter() - start
    saved = torch.load(os.environ["ARGUMENTS"], weights_only=True)
    output = loaded[regions[0]](saved["arguments"])[0]
    equal = torch.equal(output, saved["output"])
    written = [
        str(path)
        for cache in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        for path in Path(os.environ[cache]).rglob("*")
        if path.is_file()
    ]
    counters = {}
    if "torch._dynamo.utils" in sys.modules:
        from torch._dynamo.utils import counters as found

        counters = {key: dict(value) for key, value in found.items() if value}
    compiler = sorted(
        m for m in sys.modules if m.startswith(("torch._inductor.compile_fx", "triton.compiler"))
    )
    print(json.dumps({"seconds": seconds, "equal": equal, "written": written, "counters": counters,
                      "compiler_modules": compiler}))  # fmt: skip


def freed() -> dict[str, float]:
    """GiB on the device: the model as Diffusers loads it, and the resident weights of an engine."""
    from diffusers import MiniMaxH3Transformer3DModel

    from h3compile.engine.records import range_of, stage_of
    from h3compile.models.h3 import RELEASE_CONFIG
    from h3compile.models.trace import trace
    from h3compile.pipeline.manager import Manager
    from h3compile.pipeline.registry import Registry
    from h3compile.pipeline.spelling import resolve
    from h3compile.program.stages import Stage
    from h3compile.targets import detect

    gib = 2**30
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = MiniMaxH3Transformer3DModel(**RELEASE_CONFIG)
    torch.set_default_dtype(torch.float32)
    for name in ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out"):
        getattr(model, name).float()
    before = torch.cuda.memory_allocated() - base
    del model
    torch.cuda.empty_cache()
    passes, _ = resolve("", Registry.default())
    final, _ = Manager(passes).run(trace(RELEASE_CONFIG), detect())
    stages = stage_of(final)
    base = torch.cuda.memory_allocated()
    resident = [
        torch.empty(range_of(final, call).nbytes, dtype=torch.uint8, device="cuda")
        for call in final.calls
        if call.weights and stages[call.name] is not Stage.SCHEDULE
    ]
    after = torch.cuda.memory_allocated() - base
    cold = sum(range_of(final, call).nbytes for call in final.calls if stages[call.name] is Stage.SCHEDULE)
    del resident
    return {"diffusers_gib": before / gib, "resident_gib": after / gib, "freed_gib": (before - after) / gib,
            "cold_gib": cold / gib}  # fmt: skip


def stage_times(final, folders: Mapping[str, Path]) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """Milliseconds that `hoist` and `fold-schedule` take out of every step at 37,760 rows, 50 of text."""
    from h3compile.program.dims import evaluate_dim
    from h3compile.runtime.artifact import load_artifact

    sizes = {dim.name: dim.hint for dim in final.facts.dims}

    def random(port) -> torch.Tensor:  # type: ignore[no-untyped-def]
        shape = [evaluate_dim(dim, sizes) for dim in port.shape]
        scale = 0.02 if len(shape) == 2 else 1.0
        return (torch.randn(shape, device="cuda") * scale).to(port.dtype)

    def timed(name: str) -> float:
        run = load_artifact(folders[name], torch.device("cuda", 0))
        arguments = [random(port) for port in final.regions[name].placeholders]
        return medians({name: lambda: run(arguments)}, rounds=5, repeat=4)[name]

    found = {name: timed(name) for name in ("request", "refiner", "request_2")}
    found["hoist"] = found["request"] + 2 * found["refiner"] + found["request_2"]
    linear = torch.nn.Linear(2688, 18 * HIDDEN, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(2, 2688, device="cuda").bfloat16()
    found["adaln"] = medians({"adaln": lambda: linear(rows)}, rounds=5, repeat=4)["adaln"]
    found["fold_schedule"] = 50 * found["adaln"]
    return found


def compare(region, folder: Path, block: torch.nn.Module, rows: list[int], result: dict) -> None:  # type: ignore[no-untyped-def, type-arg]
    """Distances to float64 and times, ours and the peers', at each number of rows."""
    from h3compile.runtime.artifact import load_artifact

    ours = load_artifact(folder, torch.device("cuda", 0))
    peer = torch.compile(block)
    for count in rows:
        inputs = block_inputs(count, 2 if count > 1 else 1)
        arguments = region_arguments(region, block, inputs)
        call = (inputs["hidden"], inputs["temb"], inputs["index"], (inputs["cos"], inputs["sin"]))
        truth = exact(region, arguments)
        errors = {
            "ours": distance(ours(arguments)[0], truth),
            "diffusers": distance(block(*call), truth),
            "torch_compile": distance(peer(*call), truth),
        }
        del truth
        times = {}
        if count >= 1024:
            runs = {
                "ours": lambda a=arguments: ours(a),
                "diffusers": lambda c=call: block(*c),
                "torch_compile": lambda c=call: peer(*c),
            }
            times = medians(runs, rounds=6, repeat=4)
        result["rows"][count] = {"distance_to_float64": errors, "ms": times}
        print(
            count,
            {k: f"{v:.3e}" for k, v in errors.items()},
            {k: f"{v:.2f}" for k, v in times.items()},
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 191, 2001, 11_000, 37_760, 73_500])
    parser.add_argument("--child", nargs="+")
    parser.add_argument("--no-memory", action="store_true")
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    from h3compile.backends.select import select
    from h3compile.engine.records import stage_of
    from h3compile.program.stages import Stage

    torch.set_grad_enabled(False)
    options.out.mkdir(parents=True, exist_ok=True)
    final = program()
    stages = stage_of(final)
    names = dict.fromkeys(c.region for c in final.calls if stages[c.name] is not Stage.SCHEDULE)
    result: dict = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "regions": {},
        "rows": {},
    }  # type: ignore[type-arg]
    with tempfile.TemporaryDirectory() as scratch:
        folders = {}
        for name in sorted(names, key=lambda n: n != "block"):
            start = time.perf_counter()
            folders[name] = Path(scratch) / name
            select("inductor").lower(final.regions[name], final.facts.dims, "cuda", folders[name])
            size = sum(file.stat().st_size for file in folders[name].iterdir())
            result["regions"][name] = {"compile_s": time.perf_counter() - start, "bytes": size}
            print(name, result["regions"][name], flush=True)
        block = diffusers_block()
        region = final.regions["block"]
        arguments = region_arguments(region, block, block_inputs(2001, 2))
        from h3compile.runtime.artifact import load_artifact

        output = load_artifact(folders["block"], torch.device("cuda", 0))(arguments)[0]
        torch.save({"arguments": arguments, "output": output}, f"{scratch}/arguments.pt")
        with empty_caches() as environment:
            environment["ARGUMENTS"] = f"{scratch}/arguments.pt"
            command = [
                sys.executable,
                __file__,
                "--out",
                str(options.out),
                "--child",
                *map(str, folders.values()),
            ]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        print(done.stderr[-3000:], flush=True)
        result["load"] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr
        print(result["load"], flush=True)
        result["stage_ms"] = stage_times(final, folders)
        print(result["stage_ms"], flush=True)
        compare(region, folders["block"], block, options.rows, result)
        for file in folders["block"].glob("region.*"):
            (options.out / file.name).write_bytes(file.read_bytes())
    del block, arguments, output
    if not options.no_memory:
        result["memory"] = freed()
        print(result["memory"], flush=True)
    (options.out / "block_region.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
