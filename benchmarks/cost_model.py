"""The cost model beside what was measured: every figure we have of an H200, and published ones of B300 nodes.

Prints a table, and draws it where asked. No GPU and no torch: predictions are arithmetic over the shipped
work tables. What does not fit is in `OUTLIERS`, by name and with the reason; nothing is tuned to hide it.

    python benchmarks/cost_model.py [--svg docs/cost-model.svg] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from h3compile.plan.components import AUDIO_VAE, TEXT_ENCODER, VIDEO_VAE, Placement, other_seconds
from h3compile.plan.cost import (
    Parallel,
    piece_seconds,
    region_seconds,
    request_seconds,
    step_seconds,
    streamed_step_seconds,
)
from h3compile.plan.memory import MemoryPlan, activation_bytes, kept_timesteps, memory_plan
from h3compile.plan.residency import Mode, Residency, prefix
from h3compile.plan.shapes import Clip
from h3compile.plan.work import ProgramWork, released
from h3compile.targets import find_target

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
MIB = 2**20

H200_BAR = 0.10
B300_BAR = 0.15

# Beyond its bar, and why.
_COOL = "so short a run leaves the card below its power limit, where BF16 products are faster"
_HOST = "probably the host: launched from Python, a short kernel ends before the next one is there"
OUTLIERS: Mapping[str, str] = {
    "published, others: 1x GB10, FP8, 8 s at 960x576, a step": (
        "no rate of this target is measured, and the peer's FP8 runs eager: on one B300 it gained 7 %, not 20"
    ),
    "H200, one block: exact, 2,001 rows": _COOL,
    "H200, one block: exact, 2,001 rows, first run": _COOL,
    "H200, one block: fp8,sage, 2,001 rows": _HOST,
    "H200, one block: fp8,sage,skip, 2,001 rows": _HOST,
    "H200, operators: BF16 GEMM out": "one rate for all shapes; this one reaches 787 TFLOP/s, all 716",
    "H200, operators: INT8 GEMM out": "one rate for all shapes; this one reaches 735 TFLOP/s, all 845",
    "H200, forwards: hoist: once a request": f"{_HOST}: 32 of them on 50 rows, once a request",
    "H200, forwards: fold-schedule: AdaLN of 50 blocks": (
        "each call was timed from the host, 0.197 ms; the kernel itself takes 0.131 (next line)"
    ),
    "H200, memory: diffusers, 10 layers, 37,760 rows: group offload, two blocks": (
        "Python's variables keep two tensors of the width of a row that nothing reads again: 0.8 GiB"
    ),
    "8x B300, DLO: 10 resident, memory": (
        "all points with residents are 4.3 GiB above, whatever their number, here a fifth: probably what "
        "the allocator keeps of the encoder's stage, for reserved memory is what was published"
    ),
    "8x B300, topologies: DP1xSP8 AllGather, request": (
        "the other publication has 29.09 s for the same plan (0 resident, above); this older one has 13 ms "
        "a block, and devices have 9 ms of work: probably the host's launching"
    ),
}


@dataclass(frozen=True)
class Figure:
    """One prediction beside one measurement, in ``unit``; ``bar`` is how far they may be apart."""

    group: str
    name: str
    unit: str
    predicted: float
    measured: float
    bar: float

    @property
    def off(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1

    @property
    def fits(self) -> bool:
        """Whether both are as near as the bar asks for."""
        return abs(self.off) <= self.bar

    @property
    def key(self) -> str:
        """Its name among all."""
        return f"{self.group}: {self.name}"


def figures() -> list[Figure]:
    """All of them, H200 first."""
    return [*_blocks(), *_operators(), *_forwards(), *_memory(), *_b300()]


def _sizes(rows: int) -> dict[str, int]:
    """A request of 50 text and 414 audio rows, two timesteps."""
    return {
        "rows": rows,
        "video_rows": rows - 464,
        "audio_rows": 414,
        "text_rows": 50,
        "timesteps": 2,
    }


def _h200(group: str, name: str, unit: str, predicted: float, measured: float) -> Figure:
    return Figure(f"H200, {group}", name, unit, predicted, measured, H200_BAR)


def _load(name: str) -> dict:  # type: ignore[type-arg]
    found: dict = json.loads((RESULTS / name).read_text())  # type: ignore[type-arg]
    return found


# In h200_passes.json -> the table that was read off the same program.
_SETS = {
    "-fuse": "exact",
    "default": "fuse",
    "fp8": "fp8",
    "sage": "sage",
    "fp8,sage": "fp8,sage",
    "fp8,sage,skip(until=1.0)": "fp8,sage,skip",
    "torch.compile": "diffusers-compiled",
    "diffusers": "diffusers",
}


# Runs before the first of this repository, of Diffusers alone, the middle where there were several.
_EARLIER = {
    "diffusers": {11_000: 21.7, 37_760: 124.9, 73_500: 388.0},
    "diffusers-compiled": {11_000: 19.5, 37_760: 113.3, 73_500: 364.0},
}


def _blocks() -> Iterator[Figure]:
    """One block alone, under every set of passes, and the older runs of the exact one."""
    target = find_target("h200")

    def block(table: str, rows: int) -> float:
        return 1e3 * region_seconds(released(table).regions["block"], target, _sizes(rows))

    for rows, entry in _load("h200_passes.json")["rows"].items():
        for key, table in _SETS.items():
            if key in entry["ms"]:
                name = f"{table}, {int(rows):,} rows"
                yield _h200("one block", name, "ms", block(table, int(rows)), entry["ms"][key])
    first = {"ours": "exact", "torch_compile": "diffusers-compiled", "diffusers": "diffusers"}
    for rows, entry in _load("h200_block_region.json")["rows"].items():
        for key, table in first.items():
            if key in entry["ms"]:
                name = f"{table}, {int(rows):,} rows, first run"
                yield _h200("one block", name, "ms", block(table, int(rows)), entry["ms"][key])
    for table, times in _EARLIER.items():
        for rows, ms in times.items():
            yield _h200("one block", f"{table}, {rows:,} rows, earlier runs", "ms", block(table, rows), ms)


def _operators() -> Iterator[Figure]:
    """Products, attention and row kernels alone, at 37,760 rows."""
    target, sizes = find_target("h200"), _sizes(37_760)

    def pieces(table: str, operator: str) -> list[float]:
        block = released(table).regions["block"]
        return [
            1e3 * piece_seconds(piece, target, sizes) for piece in block.pieces if piece.operator == operator
        ]

    def product(dtype: str) -> list[float]:
        block = released("fuse").regions["block"]
        found = [replace(piece, dtype=dtype) for piece in block.pieces if piece.kind == "gemm"]
        return [1e3 * piece_seconds(piece, target, sizes) for piece in found]

    measured = {
        "BF16": ("bfloat16", (11.6, 3.7, 16.9, 8.4)),
        "FP8": ("float8_e4m3fn", (5.8, 2.0, 8.6, 4.4)),
        "INT8": ("int8", (9.7, 4.0, 13.6, 7.1)),
    }
    for title, (dtype, times) in measured.items():
        for name, ours, ms in zip(("qkv", "out", "up", "down"), product(dtype), times, strict=True):
            yield _h200("operators", f"{title} GEMM {name}", "ms", ours, ms)
    lines = {line["name"]: line["ms"] for line in _load("h200_attention.json")["lines"]}
    (dense,), (cudnn,) = (
        pieces("fuse", "attention.default"),
        pieces("exact", "aten.scaled_dot_product_attention"),
    )
    yield _h200("operators", "dense attention, ours", "ms", dense, lines["attention gluon"])
    yield _h200("operators", "dense attention, cuDNN", "ms", cudnn, lines["attention cudnn"])
    (sage,) = (p for p in released("sage").regions["block"].pieces if p.kind == "attention")
    for dtype, kind in (("int8", "int8"), ("float8_e4m3fn", "fp8_e4m3")):
        ours = 1e3 * piece_seconds(replace(sage, dtype=dtype), target, sizes)
        name = f"SAGE, {kind}, with its preparation"
        whole = ours + sum(pieces("sage", "sage_prepare.default"))
        yield _h200("operators", name, "ms", whole, lines[f"prepare + sage_attention gluon {kind} 128"])
    (tested,) = (p for p in released("sage,skip").regions["block"].pieces if p.kind == "attention")
    for threshold, skipped in (("0.1", 0.0), ("0.8", 0.3186)):
        ours = 1e3 * piece_seconds(replace(tested, dtype="float8_e4m3fn"), target, sizes, skipped=skipped)
        name = f"SAGE with skip, {skipped:.0%} of the tiles skipped"
        key = f"sage_attention.skip gluon fp8_e4m3 128 lambda {threshold}"
        yield _h200("operators", name, "ms", ours, lines[key])
    yield _h200(
        "operators",
        "sage_prepare",
        "ms",
        pieces("sage", "sage_prepare.default")[0],
        lines["prepare int8 128"],
    )
    # The norm that quantizes is launched with fewer registers since; its own run has both.
    limited = [case for case in _load_list("h200_elementwise_norms.json") if _limited(case)]
    cases = [case for case in _load_list("h200_elementwise.json") if case["case"] != _LIMITED]
    for case in (*cases, *(dict(case, variant="chosen") for case in limited)):
        operator = case["case"]
        table = "fp8" if operator.endswith(".fp8") or operator.startswith("quantize") else "fuse"
        if case["variant"] != "chosen" or "," in operator or operator.startswith("linear"):
            continue
        if operator == "quantize_rows.default 5376":  # of no block: every norm quantizes as it goes
            continue
        ours = pieces(table, operator.split()[0])[0]
        yield _h200("operators", operator, "ms", ours, case["ms"])


_LIMITED = "norm_modulate.fp8"


def _limited(case: Mapping[str, str]) -> bool:
    return case["case"] == _LIMITED and case["variant"] == "72 registers"


def _load_list(name: str) -> list[dict]:  # type: ignore[type-arg]
    found: list[dict] = json.loads((RESULTS / name).read_text())  # type: ignore[type-arg]
    return found


def _forwards() -> Iterator[Figure]:
    """Whole forwards of six layers, of ten in Diffusers, and what staging takes out of a step."""
    target = find_target("h200")
    run = _load("h200_whole_model.json")

    def forward(table: str, layers: int, rows: int) -> float:
        return 1e3 * step_seconds(released(table).with_blocks(layers), target, _sizes(rows))

    for peers, key, table in (
        ("ms_beside_diffusers", "ours", "exact"),
        ("ms_beside_compiled_blocks", "ours", "exact"),
        ("ms_beside_diffusers", "diffusers", "diffusers"),
        ("ms_beside_compiled_blocks", "compiled", "diffusers-compiled"),
    ):
        for rows in (9_788, 37_760):
            beside = peers.removeprefix("ms_")
            name = f"{table}, 6 layers, {rows:,} rows, {beside.replace('_', ' ')}"
            yield _h200("forwards", name, "ms", forward(table, 6, rows), run[peers][f"{rows}_rows"][key])
    for rows, ms in ((37_760, 1246.0), (11_000, 231.0)):
        name = f"diffusers, 10 layers, {rows:,} rows"
        yield _h200("forwards", name, "ms", forward("diffusers", 10, rows), ms)
    stage = _load("h200_block_region.json")["stage_ms"]
    exact = released("exact")
    sizes = _sizes(37_760)
    hoisted = request_seconds(exact, target, sizes, forwards=0).request
    yield _h200("forwards", "hoist: once a request", "ms", 1e3 * hoisted, stage["hoist"])
    tables = 50 * region_seconds(exact.regions["block.schedule"], target, sizes)
    yield _h200("forwards", "fold-schedule: AdaLN of 50 blocks", "ms", 1e3 * tables, stage["fold_schedule"])
    kernels = _load("h200_passes.json")["kernels"]["diffusers"]
    (kernel,) = (ms for name, ms in kernels.items() if name.startswith("nvjet_sm90_tst_128x8"))
    yield _h200("forwards", "AdaLN of one block, its kernel", "ms", 1e3 * tables / 50, kernel)


def _memory() -> Iterator[Figure]:
    run, stages = _load("h200_whole_model.json"), _load("h200_block_region.json")["memory"]
    six = released("exact").with_blocks(6)
    sizes = _sizes(37_760)
    held = _held(six, timesteps=kept_timesteps(49))
    process = run["new_process"]
    weights = process["weights_and_tables_gib"]
    yield _h200("memory", "6 layers: weights and tables", "GiB", held, weights)
    grown = process["forward_peak_gib"] - weights
    yield _h200(
        "memory",
        "what a forward at 37,760 rows adds",
        "GiB",
        activation_bytes(six, sizes, "step") / GIB,
        grown,
    )
    yield _h200(
        "memory", "50 layers, exact: weights", "GiB", _held(released("exact")), stages["resident_gib"]
    )
    whole = _held(released("diffusers"))
    yield _h200("memory", "50 layers, diffusers: weights", "GiB", whole, stages["diffusers_gib"])
    # The blocks of ten layers stay, or two of them are there at a time (group offload, block level).
    ten = released("diffusers").with_blocks(10)
    block = ten.regions["block"].weights / GIB
    for rows, resident, offloaded in ((37_760, 19.6, 10.0), (11_000, 15.4, 5.8)):
        alive = activation_bytes(ten, _sizes(rows), "step") / GIB
        name = f"diffusers, 10 layers, {rows:,} rows"
        yield _h200("memory", f"{name}: resident", "GiB", _held(ten) + alive, resident)
        offload = _held(ten) - 8 * block + alive
        yield _h200("memory", f"{name}: group offload, two blocks", "GiB", offload, offloaded)


def _held(work: ProgramWork, timesteps: int = 0) -> float:
    """GiB of weights that stay with everything resident, tables included."""
    parts = memory_plan(
        work, {**_sizes(64), "timesteps": 0}, Residency(work.blocks, work.blocks, 0), timesteps=timesteps
    )
    denoise = parts.device["denoise"]
    return (denoise["resident weights"] + denoise.get("tables", 0)) / GIB


# The published plot: residents, seconds of a complete request, GiB a rank; None: no offload at all.
DLO_POINTS = (
    (None, 25.88, 82.2),
    (50, 26.73, 68.3),
    (40, 27.56, 57.4),
    (35, 27.20, 51.6),
    (30, 27.67, 45.1),
    (20, 29.15, 33.4),
    (10, 29.27, 21.4),
    (0, 29.09, 15.6),
)
# Ranks that share a request, ranks that share the weights, seconds, GiB.
TOPOLOGIES: tuple[tuple[str, Parallel, Mode, float, float], ...] = (
    ("DP1xSP8 AllGather", Parallel(8), "allgather", 34.55, 26.37),
    ("DP4xSP2 AllGather", Parallel(2, 8), "allgather", 94.73, 25.11),
    ("DP8xSP1 rank-local", Parallel(1), "local", 156.74, 20.05),
)


def _b300() -> Iterator[Figure]:
    """vLLM-Omni on B300 nodes: AdaLN in every block, residents the first blocks, two slots.

    Taken as eager, every operator a kernel: what the publications say of the topologies, and what fits the
    other DLO points. The encoder's shard is moved away under offload; the clip's pixels are on one rank.
    """
    work = released("diffusers")
    clip = Clip(frames=124, task="fl2va")
    for residents, seconds, memory in DLO_POINTS:
        count = len(work.blocks) if residents is None else residents
        residency = Residency(
            work.blocks,
            prefix(work.blocks, count),
            2 if count < len(work.blocks) else 0,
            "allgather" if residents is not None else "local",
        )
        name = "no offload" if residents is None else f"{residents} resident"
        predicted = _b300_seconds(work, clip, residency, Parallel(8))
        yield Figure("8x B300, DLO", f"{name}, request", "s", predicted, seconds, B300_BAR)
        encoder = TEXT_ENCODER.placed("resident" if residents is None else "elsewhere", shards=8)
        stays: Placement = "resident" if residents is None else "moved"
        tenants = (encoder, VIDEO_VAE_UNCACHED.placed(stays), AUDIO_VAE.placed(stays))
        plan = memory_plan(work, clip.dims, residency, Parallel(8), tenants=tenants, keep=residents is None)
        yield Figure("8x B300, DLO", f"{name}, memory", "GiB", plan.peak / GIB, memory, B300_BAR)
    clip = Clip(frames=124)
    for name, parallel, mode, seconds, memory in TOPOLOGIES:
        residency = Residency(work.blocks, (), 2, mode)
        predicted = _b300_seconds(work, clip, residency, parallel)
        yield Figure("8x B300, topologies", f"{name}, request", "s", predicted, seconds, B300_BAR)
        plan = _topology_memory(work, clip, residency, parallel)
        yield Figure("8x B300, topologies", f"{name}, memory", "GiB", plan.peak / GIB, memory, B300_BAR)
    yield from _published(work)


# vLLM-Omni's VAE keeps no FP16 copies once its stages are tidied up (vllm-omni #6526): only the tiles'
# activations.
VIDEO_VAE_UNCACHED = replace(VIDEO_VAE, peak=370_000_000)


def _topology_memory(work: ProgramWork, clip: Clip, residency: Residency, parallel: Parallel) -> MemoryPlan:
    """The older publication: the encoder's shard of eight stays, and so do copies of the VAE's weights."""
    shards = 8 if parallel.ranks > 1 else 1
    encoder = TEXT_ENCODER.placed("resident" if shards > 1 else "streamed", shards=shards)
    tenants = (encoder, VIDEO_VAE, AUDIO_VAE)
    return memory_plan(work, clip.dims, residency, parallel, tenants=tenants, keep=False)


def _b300_seconds(work: ProgramWork, clip: Clip, residency: Residency, parallel: Parallel) -> float:
    """A complete request; residents are brought once for it, one after the other."""
    target = find_target("b300")
    step = streamed_step_seconds(work, target, clip.dims, residency, parallel)
    others = other_seconds(
        target, frames=clip.frames, width=clip.width, height=clip.height, shards=parallel.shards
    )
    whole = request_seconds(
        work, target, clip.dims, forwards=clip.forwards, step=step, shards=parallel.shards, others=others
    )
    assert target.host is not None
    brought = len(residency.resident) * work.regions["block"].weights
    share = parallel.ranks if residency.mode == "allgather" else None
    return whole.total + (brought / share / target.host.rate.reached if share else 0.0)


def _published(work: ProgramWork) -> Iterator[Figure]:
    """Published figures that are no DLO, of other cards too; what a target's rate was fitted to says so."""
    target = find_target("b300")
    compiled = released("diffusers-compiled")

    def steps(table: ProgramWork, clip: Clip, shards: int) -> float:
        return clip.forwards * step_seconds(table, target, clip.dims, shards=shards)

    group = "published, others"
    dense = steps(compiled, Clip(frames=243), 8)
    yield Figure(group, "8x B300, 10 s, dense, model execution (fitted)", "s", dense, 54.246, B300_BAR)
    four = steps(compiled, Clip(width=1248, frames=209, task="fl2va"), 4)
    yield Figure(group, "4x B300, 8.7 s at 1248x768, denoising", "s", four, 78.438, B300_BAR)
    clip = Clip(frames=124)
    residency = Residency(work.blocks, work.blocks, 0)
    one = _b300_seconds(work, clip, residency, Parallel(1))
    yield Figure(group, "1x B300, 5 s, request", "s", one, 162.30, B300_BAR)
    tenants = tuple(one.placed("resident") for one in (TEXT_ENCODER, VIDEO_VAE, AUDIO_VAE))
    plan = memory_plan(work, clip.dims, residency, tenants=tenants)
    yield Figure(group, "1x B300, 5 s, memory", "GiB", plan.peak / GIB, 133_110 * MIB / GIB, B300_BAR)
    # Denoising of one step: eager on an H200 (vllm-omni #5691), FP8 on a GB10 (#5972).
    clip = Clip(width=1248, frames=209)
    step = step_seconds(work, find_target("h200"), clip.dims)
    yield Figure(group, "1x H200, 8.7 s at 1248x768, a step", "s", step, 14.19, B300_BAR)
    clip = Clip(width=960, height=576, frames=192)
    step = step_seconds(released("fp8"), find_target("gb10"), clip.dims)
    yield Figure(group, "1x GB10, FP8, 8 s at 960x576, a step", "s", step, 42.61, B300_BAR)
    # The two cards share tensors, not rows: taken as rows, and their copies as hidden.
    for count, name, seconds in ((8, "h20", 166.97), (2, "rtx-5090", 518.0)):
        whole = _resident_request(work, name, Clip(frames=124), count)
        yield Figure(group, f"{count}x {name}, 5 s, request", "s", whole, seconds, B300_BAR)


def _resident_request(work: ProgramWork, name: str, clip: Clip, shards: int) -> float:
    """A complete request with every block on the devices."""
    target = find_target(name)
    size = {"frames": clip.frames, "width": clip.width, "height": clip.height}
    others = other_seconds(target, **size, shards=shards)
    return request_seconds(
        work, target, clip.dims, forwards=clip.forwards, shards=shards, others=others
    ).total


def table(found: list[Figure]) -> str:
    """The figures as a Markdown table, a group after the other; what does not fit is marked."""
    lines, group = [], ""
    for figure in found:
        if figure.group != group:
            group = figure.group
            lines += ["", f"| {group} | predicted | measured | off |", "|---|---|---|---|"]
        mark = "" if figure.fits else " **"
        values = f"{figure.predicted:.4g} {figure.unit} | {figure.measured:.4g} {figure.unit}"
        lines.append(f"| {figure.name} | {values} | {figure.off:+.1%}{mark} |")
    return "\n".join(lines[1:])


def draw(found: list[Figure], path: Path) -> None:
    """Every figure as a dot: measured along, predicted over measured up, with the bars."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "h3compile"
    groups = list(dict.fromkeys(figure.group for figure in found))
    figure, axes = plt.subplots(1, len(groups), figsize=(12, 4.2), sharey=True)
    for axis, group in zip(axes, groups, strict=True):
        dots = [one for one in found if one.group == group]
        bar = 100 * dots[0].bar
        axis.axhspan(-bar, bar, color="#dbe7ec", linewidth=0)
        axis.axhline(0, color="#5a6b75", linewidth=0.8)
        for place, one in enumerate(dots):
            color = "#2f6f8f" if one.fits else "#b04a3a"
            axis.plot(place, 100 * one.off, "o", color=color, markersize=4)
        outside = sum(not one.fits for one in dots)
        axis.set_title(f"{group}\n{len(dots)} figures, {outside} outside", fontsize=8.5)
        axis.set_xticks([])
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    axes[0].set_ylabel("predicted over measured, %", fontsize=9)
    axes[0].set_ylim(-40, 40)
    caption = "A dot a figure, in the order of the table. Shaded: the bar. Red: outside, reason listed."
    figure.text(0.5, 0.01, caption, ha="center", fontsize=8.5, color="#5a6b75")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print the table; draw and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = figures()
    print(table(found))
    outside = [figure for figure in found if not figure.fits]
    print(f"\n{len(found)} figures, {len(outside)} outside of their bars:")
    for figure in outside:
        print(f"- {figure.key} ({figure.off:+.0%}): {OUTLIERS.get(figure.key, 'NOT EXPLAINED')}")
    if options.svg:
        draw(found, options.svg)
    if options.json:
        options.json.write_text(
            json.dumps([asdict(figure) | {"off": figure.off} for figure in found], indent=1)
        )


if __name__ == "__main__":
    main()
