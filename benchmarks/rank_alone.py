"""One block as a rank computes it, on one GPU that stands for all ranks: everything but the links.

    python benchmarks/rank_alone.py --out results

The block region of every set of passes is lowered as a build does it, and timed with its share of rows and
heads; exchanges put in order what they would send, and take it for what would come. Beside them what that
costs by PyTorch's own copies and by ours. Predictions are of `h3compile.plan`, links and waiting left out
(of an exchange in FP8, which it does not know, those of one in BF16).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from block_region import medians
from canvases import sizes_of

from h3compile.models.h3 import RELEASE_CONFIG
from h3compile.models.trace import trace
from h3compile.ops.exchange_groups import standing_in
from h3compile.ops.ring_attention import _attended, _merged
from h3compile.ops.runs import ordered
from h3compile.plan.cost import rank_seconds
from h3compile.plan.work import released
from h3compile.program.dims import evaluate_dim
from h3compile.program.program import Program
from h3compile.program.region import Port
from h3compile.runtime.artifact import load_artifact
from h3compile.targets import detect
from passes import built, kernels

# The passes without `sp`, and how ranks share.
SETS = (
    ("", "ulysses=2"),
    ("", ""),
    ("", "ring=2"),
    ("", "ulysses=8"),
    ("fp8,sage", "ulysses=2"),
    ("fp8,sage", ""),
    ("fp8,sage", "ulysses=8"),
    ("", "ulysses=2,exchange=fp8"),
    ("", "ulysses=4"),
    ("", "ring=4"),
)
HEADS, WIDTH = 56, 128


def ranks_of(way: str) -> int:
    """How many ranks share by ``way``; 1 for none."""
    return int(way.partition("=")[2].partition(",")[0] or 1)


def shared_sizes(canvas: str, ranks: int) -> dict[str, int]:
    """The lengths of a program for ``ranks``, those that a rank has among them."""
    whole = sizes_of(canvas)
    return whole | {f"local_{name}": -(-size // ranks) for name, size in whole.items() if "rows" in name}


def operand(port: Port, sizes: Mapping[str, int]) -> torch.Tensor:
    """Random values of a port, as large as those of a model; rows of the table for integers."""
    shape = [evaluate_dim(dim, sizes) for dim in port.shape]
    if not port.dtype.is_floating_point:
        return torch.randint(0, 3 * sizes["timesteps"], shape, device="cuda", dtype=port.dtype)
    drawn = torch.randn(shape, device="cuda")
    if port.name.endswith("weight_scale"):
        return drawn.fill_(2e-4)
    if port.dtype == torch.float8_e4m3fn:
        drawn *= 100
    elif port.name.endswith("weight"):
        # Of linears, and of norms.
        drawn = drawn * 0.02 if len(shape) == 2 else 1 + 0.1 * drawn
    return drawn.to(port.dtype)


def block(program: Program, folder: Path, canvas: str, ranks: int) -> partial[object]:
    """A call of the lowered block with a rank's share of ``canvas``."""
    region = program.regions["block"]
    sizes = shared_sizes(canvas, ranks)
    return partial(
        load_artifact(folder, torch.device("cuda", 0)), [operand(p, sizes) for p in region.placeholders]
    )


def predicted_ms(passes: str, way: str, canvas: str) -> float:
    """Of `h3compile.plan`, without links and waiting: what a rank computes, and puts in order or merges."""
    ranks = ranks_of(way)
    ring = ranks if way.startswith("ring") else None
    return 1e3 * rank_seconds(released(passes), detect(), sizes_of(canvas), ranks, ring)


def orders(rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of putting in order what is exchanged at 37,760 rows, in BF16: PyTorch's copy and ours."""
    found = {}
    for ranks in (2, 8):
        local = 37_760 // ranks
        there = (
            torch.randn(local, 3, ranks, HEADS * WIDTH // ranks, device="cuda").bfloat16().permute(2, 0, 1, 3)
        )
        back = torch.randn(ranks, local, HEADS * WIDTH // ranks, device="cuda").bfloat16().transpose(0, 1)
        for name, tensor in (("to heads", there), ("to rows", back)):
            assert torch.equal(ordered(tensor), tensor)
            runs = {
                "pytorch": partial(tensor.clone, memory_format=torch.contiguous_format),
                "ours": partial(ordered, tensor),
            }
            times = medians(runs, rounds, 3)
            found[f"{name}, {ranks} ranks"] = times | {
                f"{run}_gb_s": 2 * tensor.nbytes / ms / 1e6 for run, ms in times.items()
            }
    return found


def ring_parts(rounds: int) -> dict[str, float]:
    """Milliseconds of a turn of a ring of two at 37,760 rows: the product, and the merge."""
    local = 37_760 // 2
    query, key, value = (
        torch.randn(1, local, HEADS, WIDTH, device="cuda").bfloat16().transpose(1, 2) for _ in range(3)
    )
    first, second = _attended(query, key, value), _attended(query, value, key)
    runs = {
        "attended": partial(_attended, query, key, value),
        "merged": partial(_merged, *first, *second),
    }
    return medians(runs, rounds, 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--canvases", default="37760,73500,11000")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=240, help="no other set is begun after that")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    result: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def note(name: str, value: object) -> None:
        result[name] = value
        print(name, json.dumps(value), flush=True)
        (options.out / "rank_alone.json").write_text(json.dumps(result, indent=1))

    note("orders", orders(options.rounds))
    note("ring", ring_parts(options.rounds))
    traced = trace({**RELEASE_CONFIG, "num_layers": 2})
    for passes, way in SETS:
        if time.monotonic() - begun > options.seconds:
            note("left_out", [" ".join(one) for one in SETS[SETS.index((passes, way)) :]])
            break
        ranks = ranks_of(way)
        spelled = ",".join(part for part in (passes, f"sp({way})" if way else "") if part)
        with tempfile.TemporaryDirectory() as scratch, standing_in():
            program, seconds = built(spelled, traced, Path(scratch) / "block")
            found: dict[str, object] = {"lowered_s": round(seconds, 1)}
            for canvas in options.canvases.split(","):
                run = block(program, Path(scratch) / "block", canvas, ranks)
                ms = medians({"block": run}, options.rounds, 3)["block"]
                predicted = predicted_ms(passes, way, canvas)
                found[canvas] = {"ms": ms, "predicted_ms": predicted, "over_predicted": ms / predicted}
                if canvas == "37760":
                    found["kernels"] = kernels(run)
                del run
                torch.cuda.empty_cache()
        note(spelled or "default", found)


if __name__ == "__main__":
    main()
