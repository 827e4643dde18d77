"""One real-width block under every set of passes, beside its peers: time, and distance to float64.

For each set of passes the block region of the released configuration is compiled, saved and loaded
again; then all of them take turns with the block that Diffusers ships, the same under torch.compile, and
the same with row-wise FP8 linears under torch.compile. Same weights, same random inputs, one run.

    python benchmarks/passes.py --out results
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from block_region import block_inputs, diffusers_block, distance, exact, medians

SETS = ("", "fp8", "sage", "fp8,sage", "fp8,sage,skip(until=1.0)", "-fuse")
Tensors = dict[str, torch.Tensor]


class _Weights:
    """The block's weights under the names of a checkpoint."""

    def __init__(self, block: torch.nn.Module) -> None:
        self._tensors = {
            f"transformer_blocks.0.{name}": value.cpu() for name, value in block.state_dict().items()
        }

    def read(self, key: str) -> torch.Tensor:
        return self._tensors[key]


class RowwiseLinear(torch.nn.Module):
    """A linear on FP8 operands as users write it: a scale a row and a channel, `torch._scaled_mm`."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True).float() / 448
        self.register_buffer("weight", (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn))
        self.register_buffer("scale", scale.t().contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scale = rows.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / 448
        values = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        out = torch._scaled_mm(
            values,
            self.weight.t(),
            scale_a=scale,
            scale_b=self.scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return out.reshape(*x.shape[:-1], -1)


def with_fp8_linears(block: torch.nn.Module) -> torch.nn.Module:
    """A copy of the block whose attention and feed-forward linears are `RowwiseLinear`."""
    block = copy.deepcopy(block)
    for name in ("attn", "ff"):
        root = getattr(block, name)
        for path, module in list(root.named_modules()):
            if isinstance(module, torch.nn.Linear):
                parent, _, leaf = path.rpartition(".")
                setattr(root.get_submodule(parent), leaf, RowwiseLinear(module))
    return block


def built(passes: str, traced, folder: Path):  # type: ignore[no-untyped-def]
    """The final program under ``passes``, and its block region lowered into ``folder``."""
    from h3compile.backends.select import select
    from h3compile.pipeline.manager import Manager
    from h3compile.pipeline.registry import Registry
    from h3compile.pipeline.spelling import resolve
    from h3compile.targets import detect

    chosen, _ = resolve(passes, Registry.default())
    program, _ = Manager(chosen).run(traced, detect())
    start = time.perf_counter()
    select("inductor").lower(program.regions["block"], program.dims, "cuda", folder, {})
    return program, time.perf_counter() - start


def arguments(program, inputs: Tensors, block: torch.nn.Module) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """Inputs of the block region in the order of its ports; the weights come from `weights`."""
    linear = block.adaln_proj.linear
    # Each t alone, as the tables are evaluated.
    rows = torch.nn.functional.silu(inputs["temb"]).bfloat16().split(1)
    modulation = torch.cat([torch.nn.functional.linear(row, linear.weight, linear.bias) for row in rows])
    given = {
        "modulation": modulation,
        "modulation_index": inputs["index"],
        "cos_bf16": inputs["cos"].bfloat16(),
        "sin_bf16": inputs["sin"].bfloat16(),
    }
    return [given.get(port.name, inputs["hidden"]) for port in program.regions["block"].inputs]


def weights(program, source: _Weights) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    call = program.calls_of("block")[0]
    return [program.weights[name].evaluate(source).cuda() for name in call.weights]


def kernels(run: Callable[[], object], repeat: int = 4) -> dict[str, float]:
    """Milliseconds a call by kernel, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(repeat):
            run()
        torch.cuda.synchronize()
    events = sorted(recorded.key_averages(), key=lambda event: -event.device_time_total)
    return {
        event.key[:90]: event.device_time_total / 1000 / repeat
        for event in events[:16]
        if event.device_time_total
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[191, 2001, 11_000, 37_760, 73_500])
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--profile", type=int, default=37_760, help="the number of rows to list kernels for")
    options = parser.parse_args()
    from h3compile.models.h3 import RELEASE_CONFIG
    from h3compile.models.trace import trace
    from h3compile.runtime.artifact import load_artifact

    torch.set_grad_enabled(False)
    options.out.mkdir(parents=True, exist_ok=True)
    traced = trace({**RELEASE_CONFIG, "num_layers": 2})
    block = diffusers_block()
    source = _Weights(block)
    result: dict = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "sets": {},
        "rows": {},
    }  # type: ignore[type-arg]
    runs: dict[str, Callable[..., object]] = {}
    programs, held = {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, passes in enumerate(options.sets):
            name = passes or "default"
            folder = Path(scratch) / str(number)
            programs[name], seconds = built(passes, traced, folder)
            held[name] = weights(programs[name], source)
            runs[name] = load_artifact(folder, torch.device("cuda", 0))
            record = json.loads((folder / "region.json").read_text())
            result["sets"][name] = {
                "compile_s": seconds,
                "operators": record["operators"],
                "variants": {key: (v["registers"], v["stack"]) for key, v in record["variants"].items()},
            }
            print(
                f"{name}: {seconds:.1f} s",
                [(o["name"], o["variant"], o["provider"], o["ms"]) for o in record["operators"]],
                flush=True,
            )
        plain, _ = _plain(traced)
        plain_weights = weights(plain, source)
        peers: Mapping[str, torch.nn.Module] = {}
        if not options.no_peers:
            peers = {
                "diffusers": block,
                "torch.compile": torch.compile(block),
                "torch.compile+fp8": torch.compile(with_fp8_linears(block)),
            }
        for rows in options.rows:
            inputs = block_inputs(rows, 2 if rows > 1 else 1)
            call = (inputs["hidden"], inputs["temb"], inputs["index"], (inputs["cos"], inputs["sin"]))
            bound: dict[str, Callable[[], object]] = {
                name: partial(_first, run, [*arguments(programs[name], inputs, block), *held[name]])
                for name, run in runs.items()
            }
            bound |= {name: partial(peer, *call) for name, peer in peers.items()}
            truth = exact(plain.regions["block"], [*arguments(plain, inputs, block), *plain_weights])
            errors = {name: distance(run(), truth) for name, run in bound.items()}  # type: ignore[arg-type]
            del truth
            torch.cuda.empty_cache()
            times = medians(bound, rounds=options.rounds, repeat=3) if rows >= 1024 else {}
            result["rows"][rows] = {"distance_to_float64": errors, "ms": times}
            for name in bound:
                time_of = f"{times[name]:8.2f} ms" if times else ""
                against = f"{times['torch.compile'] / times[name]:6.3f} x compile" if times and peers else ""
                print(f"{rows:7d} {name:28s} {errors[name]:.3e} {time_of} {against}", flush=True)
            if rows == options.profile:
                result["kernels"] = {name: kernels(run) for name, run in bound.items()}
                for name, found in result["kernels"].items():
                    print(name, *(f"{ms:9.3f} ms  {kernel}" for kernel, ms in found.items()), sep="\n")
            (options.out / "passes.json").write_text(json.dumps(result, indent=1))


def _first(run: Callable[..., tuple[torch.Tensor, ...]], given: list[torch.Tensor]) -> torch.Tensor:
    return run(given)[0]


def _plain(traced):  # type: ignore[no-untyped-def]
    from h3compile.pipeline.manager import Manager
    from h3compile.pipeline.registry import Registry
    from h3compile.pipeline.spelling import resolve
    from h3compile.targets import detect

    return Manager(resolve("-fuse", Registry.default())[0]).run(traced, detect())


if __name__ == "__main__":
    main()
