"""What `h3compile.plan` predicts of an H200, beside every figure in `results/` and the peers' before them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from canvases import sizes_of
from figure import GIB, Figure

from h3compile.plan.cost import (
    Parallel,
    operation_seconds,
    piece_seconds,
    rank_seconds,
    region_seconds,
    request_seconds,
    ring_turn,
    step_seconds,
    streamed_step_seconds,
)
from h3compile.plan.memory import activation_bytes, kept_timesteps, memory_plan
from h3compile.plan.residency import Residency, prefix, spaced
from h3compile.plan.schedule import Compute, Copy, Gather
from h3compile.plan.simulate import steady_step_seconds
from h3compile.plan.work import ProgramWork, released
from h3compile.targets import find_target

RESULTS = Path(__file__).parent / "results"
H200_BAR = 0.10


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


def h200_figures() -> Iterator[Figure]:
    """All of them."""
    yield from _blocks()
    yield from _operators()
    yield from _forwards()
    yield from _memory()
    yield from _streaming()
    yield from _alone()
    yield from _ranks()
    yield from _rank_streaming()


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
    run, stages = _load("h200_whole_model_held.json"), _load("h200_block_region.json")["memory"]
    six = released("exact").with_blocks(6)
    sizes = _sizes(37_760)
    held = _held(six, timesteps=kept_timesteps(49))
    process = run["new_process"]
    weights = process["weights_and_tables_gib"]
    yield _h200("memory", "6 layers: weights and tables", "GiB", held, weights)
    grown = process["forward_peak_gib"] - weights
    beside = six.regions["block"].by_library("sm_90a").at(sizes)
    yield _h200(
        "memory",
        "what a forward at 37,760 rows adds",
        "GiB",
        (activation_bytes(six, sizes, "step") + beside) / GIB,
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


# A plan of `dlo.py` -> which blocks it keeps, and which share of them.
_PLANS = {
    "none": (spaced, 0.0),
    "25% spaced": (spaced, 0.25),
    "25% prefix": (prefix, 0.25),
    "50% spaced": (spaced, 0.5),
    "50% prefix": (prefix, 0.5),
}


# What was built, as the script and as the cost model call it, and the run.
_STREAMED = (
    ("bf16", "fuse", "h200_dlo_bf16.json"),
    ("fp8", "fp8", "h200_dlo_fp8.json"),
    ("sage", "fp8,sage", "h200_dlo_fp8_sage.json"),
)


def _streaming() -> Iterator[Figure]:
    """50 layers with some or all blocks streamed, seconds and bytes, as `dlo.py` timed them."""
    target = find_target("h200")
    for kind, table, file in _STREAMED:
        work, run = released(table), _load(file)

        def step(rows: int, kept: tuple[str, ...], work: ProgramWork = work) -> float:
            residency = Residency(work.blocks, kept, 0 if kept == work.blocks else 2)
            return 1e3 * streamed_step_seconds(work, target, _sizes(rows), residency)

        for rows in (37_760, 11_000):
            samples = run[f"{kind}_{rows}_samples_ms"]
            for name, kept in (("resident", work.blocks), ("streamed", ())):
                ms = statistics.median(samples[name])
                yield _h200("streaming", f"{table}, {rows:,} rows, all {name}", "ms", step(rows, kept), ms)
            planned = memory_plan(
                work, _sizes(rows), Residency(work.blocks, (), 2), timesteps=kept_timesteps(49), arch="sm_90a"
            )
            used = run[f"{kind}_{rows}_device"]["used"] / GIB
            denoise = planned.total("denoise") / GIB
            yield _h200("streaming", f"{table}, {rows:,} rows, all streamed: used", "GiB", denoise, used)
        for plan, ms in run[f"{kind}_which_residents_5792_rows_ms"].items():
            place, share = _PLANS[plan]
            kept = place(work.blocks, round(share * len(work.blocks)))
            yield _h200("streaming", f"{table}, 5,792 rows, {plan}", "ms", step(5_792, kept), ms)


# Streaming was run before `ops/runs.py`: how much longer a block of two ranks took then to put in order what
# it exchanges, in ms at 37,760 rows, by the difference that h200_rank_alone.json measured.
_EARLIER_MS = 0.77


def _alone() -> Iterator[Figure]:
    """One rank's block with all but the links, as `rank_alone.py` timed it; a ring's attention by `ranks.py`.

    Not that of `exchange=fp8`, which the model does not know, nor of rings before they had a kernel of ours.
    """
    target, run = find_target("h200"), _load("h200_rank_alone.json")
    for spelled, found in run.items():
        if not isinstance(found, dict) or "kernels" not in found:
            continue
        if "exchange" in spelled or "ring" in spelled:
            continue
        passes, shared, way = spelled.removesuffix(")").rpartition("sp(")
        if not shared:
            passes, way = "" if spelled == "default" else spelled, ""
        work, ranks = released(passes.strip(",")), int(way.partition("=")[2] or 1)
        for rows in (37_760, 73_500, 11_000):
            seconds = rank_seconds(work, target, sizes_of(str(rows)), ranks)
            name = f"{spelled}, {rows:,} rows"
            yield _h200("a rank alone", name, "ms", 1e3 * seconds, found[str(rows)]["ms"])
    rings = _load("h200_x2_ranks.json")["rings"]
    for rows in (37_760, 73_500):
        turn = ring_turn(released("fuse"), target, sizes_of(str(rows)), 2, 2)
        name = f"attention of ring=2, {rows:,} rows"
        ms = rings[f"{rows}_ms, nothing exchanged"]["gluon"]
        yield _h200("a rank alone", name, "ms", 2e3 * turn.computes, ms)


def _ranks() -> Iterator[Figure]:
    """Two ranks: four blocks, and the whole depth in FP8, as `ranks.py` timed them.

    Not those of `exchange=fp8`, which the model does not know.
    """
    target, run = find_target("h200"), _load("h200_x2_ranks.json")
    depths = (("blocks", "fuse", run["layers"], ""), ("deep", "fp8", run["deep_layers"], "fp8 "))
    for section, table, layers, prefix_ in depths:
        work = released(table).with_blocks(layers)
        for rows in (37_760, 73_500):
            measured = run[section].get(f"{rows}_ms", {})
            for way, shards, ring in (("one", 1, None), ("ulysses=2", 2, None), ("ring=2", 2, 2)):
                if (ms := measured.get(f"{prefix_}{way}")) is not None:
                    ours = 1e3 * step_seconds(work, target, sizes_of(str(rows)), shards=shards, ring=ring)
                    name = f"{table}, {layers} layers, {rows:,} rows, {way}"
                    yield Figure("2x H200, steps", name, "ms", ours, ms, H200_BAR)


def _rank_streaming() -> Iterator[Figure]:
    """Blocks that two ranks stream, from own memory and gathered, as an earlier `ranks.py` timed them."""
    target, run = find_target("h200"), _load("h200_x2_ranks_earlier.json")
    work = released("fuse")
    for name, point in run["dlo"].items():
        if not isinstance(point, dict):
            continue
        rows, mode, _ = name.split()
        sizes = sizes_of(rows)
        kept = spaced(work.blocks, point["resident"])
        residency = Residency(work.blocks, kept, 0 if kept == work.blocks else 2, mode)
        known = operation_seconds(work, target, sizes, residency, Parallel(2))
        longer = _EARLIER_MS * int(rows) / 37_760 / 1e3

        def seconds(
            one: Compute | Copy | Gather,
            known: Callable[[Compute | Copy | Gather], float] = known,
            longer: float = longer,
        ) -> float:
            return known(one) + (longer if isinstance(one, Compute) and one.call in work.blocks else 0.0)

        ours = 1e3 * steady_step_seconds(work.names("step"), residency, seconds)
        plan = memory_plan(
            work, sizes, residency, Parallel(2), timesteps=kept_timesteps(49), arch="sm_90a"
        ).total("denoise")
        label = f"{int(rows):,} rows, {mode}, {point['resident']} of 50 resident"
        yield Figure("2x H200, streaming", label, "ms", ours, point["ms"], H200_BAR)
        used = point["used_bytes"] / GIB
        yield Figure("2x H200, streaming", f"{label}: used", "GiB", plan / GIB, used, H200_BAR)
