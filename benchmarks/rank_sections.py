"""The sections of benchmarks/ranks.py as a rank runs them: blocks and their peers, whole depth, streaming."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from dlo import TINY
from rank_links import links
from rank_rings import rings
from rank_work import Inputs, Rank, Run, profiled

import h3compile
from h3compile.models.h3 import RELEASE_CONFIG
from h3compile.models.trace import trace
from h3compile.pipeline.testing import ROUNDING_BOUND, distance, weight_source
from h3compile.plan.cost import Parallel, step_seconds, streamed_step_seconds
from h3compile.plan.memory import kept_timesteps, memory_plan
from h3compile.plan.residency import Residency, spaced
from h3compile.plan.work import ProgramWork, released
from h3compile.program.interpreter import Interpreter
from h3compile.runtime.agreement import digest
from h3compile.runtime.module import CompiledTransformer
from h3compile.runtime.pool import Pool

PATIENCE = 120.0
SHARES = (0.0, 0.25, 0.5, 1.0)

# What the streamed weights of a rank may take: a virtual machine may have more memory than it shows.
HOST_BYTES = 56 << 30


def passes_of(ranks: int, degrees: list[int]) -> dict[str, str]:
    """The engines of BF16 by name, and the passes that make them; all of two layers."""
    found = {"one": ""} | {f"ulysses={degree}": f"sp(ulysses={degree})" for degree in degrees}
    found[f"ring={ranks}"] = f"sp(ring={ranks})"
    if ranks >= 4:
        found[f"ulysses=2,ring={ranks // 2}"] = f"sp(ulysses=2,ring={ranks // 2})"
    found[f"ulysses={ranks},exchange=fp8"] = f"sp(ulysses={ranks},exchange=fp8)"
    return found


def deep_passes_of(ranks: int) -> dict[str, str]:
    """The engines of FP8."""
    ways = (f"ulysses={ranks}", f"ring={ranks}")
    return {"fp8 one": "fp8"} | {f"fp8 {way}": f"fp8,sp({way})" for way in ways}


def sage_passes_of(ranks: int) -> dict[str, str]:
    """The engines of FP8 with quantized attention."""
    way = f"ulysses={ranks}"
    return {"sage one": "fp8,sage", f"sage {way}": f"fp8,sage,sp({way})"}


def degree_of(name: str, ranks: int) -> int:
    if name.endswith("one"):
        return 1
    return int(name.rpartition("ulysses=")[2]) if name.rpartition("ulysses=")[2].isdigit() else ranks


def loaded(rank: Rank, name: str, layers: int) -> CompiledTransformer | None:
    """The engine on the ranks that run it; every rank must ask."""
    degree = degree_of(name, rank.options.ranks)
    group = rank.group(degree) if degree > 1 else None
    if rank.number >= degree:
        return None
    path = rank.options.engine(name, layers)
    device = str(rank.device)
    if degree == 1:
        return h3compile.load(path, device, verify=False)
    return h3compile.load(path, device, verify=False, group=group, patience=PATIENCE)


def run_of(rank: Rank, name: str, module: CompiledTransformer | None, inputs: Inputs) -> Run:
    degree = degree_of(name, rank.options.ranks)
    return Run(degree, None if module is None else partial(module, **inputs, return_dict=False))


@contextmanager
def emptied(rank: Rank) -> Iterator[None]:
    """Whatever the block held is given back at its end."""
    yield
    gc.collect()
    if rank.options.gpu:
        torch.cuda.empty_cache()


# --- predictions ---


def predicted_ms(rank: Rank, name: str, passes: str, layers: int, canvas: str) -> float | None:
    """Of `h3compile.plan`, which knows of no exchange in FP8."""
    if "exchange=fp8" in name:
        return None
    sizes, degree = rank.sizes(canvas), degree_of(name, rank.options.ranks)
    work = released(passes).with_blocks(layers)
    around = name.rpartition("ring=")[2]
    ring = int(around) if around.isdigit() else None
    return step_seconds(work, rank.target, sizes, shards=degree, ring=ring) * 1e3


# --- correctness ---


def bits(outputs: tuple[torch.Tensor, ...]) -> str:
    return " ".join(map(digest, outputs))


def equal_bits(rank: Rank, runs: Mapping[str, Run]) -> dict[str, tuple[torch.Tensor, ...] | None]:
    """The outputs of every run, which all its ranks must agree on; finite ones. Raises SystemExit."""
    found = {name: None if run.call is None else run.call() for name, run in runs.items()}
    words = {name: None if made is None else bits(made) for name, made in found.items()}
    said = rank.everybody(words)
    for name, run in runs.items():
        if len({one[name] for one in said[: run.degree]}) != 1:  # type: ignore[index]
            raise SystemExit(f"{name}: ranks give different bits")
        made = found[name]
        if made is not None and not all(bool(output.isfinite().all()) for output in made):
            raise SystemExit(f"{name}: outputs are not finite")
    return found


def check(rank: Rank, modules: Mapping[str, CompiledTransformer | None], model: torch.nn.Module) -> None:
    """Before anything is timed, on an odd number of rows, M from 1 to 2: all ranks alike, and a lossless
    engine no further from float64 than that of one rank. Raises SystemExit."""
    referee = None if rank.number else exact(rank, model)
    for times in ([0.0], None):
        inputs = rank.inputs("odd", times)
        runs = {name: run_of(rank, name, module, inputs) for name, module in modules.items()}
        found = equal_bits(rank, runs)
        failed = ""
        if referee is not None:
            truth = tuple(referee(inputs).values())
            off = {name: total(made, truth) for name, made in found.items() if made is not None}
            rank.note(f"distance_to_float64_M{1 if times else 2}", off)
            allowed = ROUNDING_BOUND * off["one"]
            wrong = [name for name in off if "fp8" not in name and off[name] > allowed]
            failed = f"{', '.join(wrong)} further from float64 than {allowed:.2e}" if wrong else ""
        (failed, *_) = map(str, rank.everybody(failed))
        if failed:
            raise SystemExit(failed)


def total(found: tuple[torch.Tensor, ...], truth: tuple[torch.Tensor, ...]) -> float:
    return sum(distance(a, b) ** 2 for a, b in zip(found, truth, strict=True)) ** 0.5


def exact(rank: Rank, model: torch.nn.Module) -> Interpreter:
    """The float64 evaluation of Diffusers' model."""
    config = {**RELEASE_CONFIG, **(TINY if rank.options.tiny else {}), "num_layers": rank.options.layers}
    state = model.state_dict()
    program = trace(config, {name: value.dtype for name, value in state.items()})
    return Interpreter(program, weight_source(state), device=rank.device.type, dtype=torch.float64)


# --- Diffusers ---


def diffusers_model(rank: Rank) -> torch.nn.Module:
    """Diffusers' model of the checkpoint, its last block repeated as the engines' is."""
    from diffusers import MiniMaxH3Transformer3DModel

    path = rank.options.scratch / "model" / "transformer"
    model = MiniMaxH3Transformer3DModel.from_pretrained(path, torch_dtype=torch.bfloat16).to(rank.device)
    blocks = model.transformer_blocks
    while len(blocks) < rank.options.layers:
        blocks.append(copy.deepcopy(blocks[-1]))
    return model.eval().requires_grad_(False)


def context_parallel(
    rank: Rank, way: str, whole: bool, alone: tuple[torch.Tensor, ...]
) -> torch.nn.Module | None:
    """Diffusers' own, or None: why not is noted. ``whole``: ranks divide the rows of every canvas.

    ``alone`` is what one rank gives for the first of them.
    """
    from diffusers import ContextParallelConfig

    options = {f"{way}_degree": rank.options.ranks}
    if not whole:
        options[f"{way}_anything"] = True
    reason = ""
    model = diffusers_model(rank)
    try:
        # The default, `native`, gives no sums of exponentials.
        model.set_attention_backend("native" if way == "ulysses" else "_native_cudnn")
        model.enable_parallelism(config=ContextParallelConfig(**options))
        made = model(**rank.inputs(rank.options.canvases[0]), return_dict=False)
        rank.note(f"diffusers_{way}_distance_to_one_rank", total(made, alone))
    except Exception as error:  # whatever it is that a peer cannot do
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    reasons = [str(said) for said in rank.everybody(reason) if said]
    if reasons:
        rank.note(f"diffusers_{way}_failed", reasons[0])
        return None
    return model


# --- sections ---


def blocks(rank: Rank) -> None:
    """A few blocks at every degree: distance to float64, step times, collectives and their overlap."""
    options = rank.options
    names = passes_of(options.ranks, options.degrees)
    modules = {name: loaded(rank, name, options.layers) for name in names}
    model = diffusers_model(rank)
    check(rank, modules, model)
    for canvas in options.canvases:
        inputs = rank.inputs(canvas)
        runs = {name: run_of(rank, name, module, inputs) for name, module in modules.items()}
        found = equal_bits(rank, runs)
        if rank.number == 0:
            one = found["one"]
            assert one is not None
            apart = {name: total(made, one) for name, made in found.items() if made is not None}
            rank.note(f"{canvas}_distance_to_one_rank", apart)
        del found
        report(rank, canvas, runs, rank.milliseconds(runs), "", options.layers)
        for name, run in runs.items():
            rank.note(f"{canvas}_profile {name}", profiled(rank, run))
    whole = all(len(rank.inputs(canvas)["token_tags"]) % options.ranks == 0 for canvas in options.canvases)
    rank.note("diffusers_takes_any_length", not whole)
    alone = model(**rank.inputs(options.canvases[0]), return_dict=False)
    peers = {f"diffusers {way}": context_parallel(rank, way, whole, alone) for way in ("ulysses", "ring")}
    del alone
    model.set_attention_backend("native")  # as shipped; what the others were given became everybody's default
    for canvas in options.canvases:
        inputs = rank.inputs(canvas)
        runs = {name: run_of(rank, name, module, inputs) for name, module in modules.items()}
        first = partial(model, **inputs, return_dict=False)
        runs["diffusers one"] = Run(1, None if rank.number else first)
        for name, peer in peers.items():
            if peer is not None:
                runs[name] = Run(options.ranks, partial(peer, **inputs, return_dict=False))
        rank.note(f"{canvas}_ms_beside_diffusers", rank.milliseconds(runs, 3))
        for name in (name for name in runs if name.startswith("diffusers")):
            rank.note(f"{canvas}_profile {name}", profiled(rank, runs[name]))


def report(
    rank: Rank, canvas: str, runs: Mapping[str, Run], times: Mapping[str, float], passes: str, layers: int
) -> None:
    """Times, what of the ranks they keep, and what was predicted."""
    one = next(time for name, time in times.items() if name.endswith("one"))
    rank.note(f"{canvas}_ms", dict(times))
    rank.note(f"{canvas}_efficiency", {name: one / time / runs[name].degree for name, time in times.items()})
    predicted = {name: predicted_ms(rank, name, passes, layers, canvas) for name in times}
    rank.note(f"{canvas}_predicted_ms", predicted)
    rank.note(
        f"{canvas}_over_predicted",
        {name: times[name] / ms for name, ms in predicted.items() if ms is not None},
    )


def deep(rank: Rank, names: Iterable[str], passes: str) -> None:
    """The whole depth with FP8 weights, on one rank and on all."""
    options = rank.options
    modules = {name: loaded(rank, name, options.deep) for name in names}
    for canvas in options.canvases:
        inputs = rank.inputs(canvas)
        runs = {name: run_of(rank, name, module, inputs) for name, module in modules.items()}
        one, *shared = equal_bits(rank, runs).values()
        if one is not None:
            apart = [total(made, one) for made in shared if made is not None]
            rank.note(f"{canvas}_distance_to_one_rank", dict(zip([*runs][1:], apart, strict=True)))
        del one, shared
        report(rank, canvas, runs, rank.milliseconds(runs, 2, warm=True), passes, options.deep)
        for name in [*runs][1:]:
            rank.note(f"{canvas}_profile {name}", profiled(rank, runs[name]))


def dlo(rank: Rank) -> None:
    """Blocks that stay and blocks that are streamed: steps and device memory beside the plan's."""
    options = rank.options
    work = released("").with_blocks(options.deep)
    inputs = {canvas: rank.inputs(canvas) for canvas in ("37760", "11000")}
    expected: dict[str, str] = {}
    for mode, key in (("local", "ulysses"), ("allgather", "allgather ulysses")):
        pool, read = Pool(), []
        for share in SHARES:
            if share == 1.0 and mode == "allgather":
                continue  # nothing is streamed: the same as local
            with emptied(rank):
                kept = round(share * options.deep)
                path = options.engine(f"{key}={options.ranks}", options.deep)
                module = h3compile.load(
                    path,
                    str(rank.device),
                    resident=kept,
                    share=pool,
                    verify=False,
                    patience=PATIENCE,
                    host_bytes=HOST_BYTES,
                )
                one_plan(rank, module, work, inputs, expected, f"{mode} {share:.0%}")
                if share == 0.0 and module._parts.streamer is not None:
                    # Alive as long as it is referred to: later loads read nothing again.
                    read.append(module._parts.streamer.reader)
                del module
        del read
        gc.collect()


def one_plan(
    rank: Rank,
    module: CompiledTransformer,
    work: ProgramWork,
    inputs: Mapping[str, Inputs],
    expected: dict[str, str],
    name: str,
) -> None:
    """One residency: its bits are those of the others, its times, its memory."""
    options = rank.options
    residency = module.residency
    assert residency is not None
    planned = Residency(
        work.blocks, spaced(work.blocks, len(residency.resident)), residency.slots, residency.mode
    )
    for canvas, given in inputs.items():
        run = {name: Run(options.ranks, partial(module, **given, return_dict=False))}
        (made,) = equal_bits(rank, run).values()
        assert made is not None
        if expected.setdefault(canvas, bits(made)) != bits(made):
            raise SystemExit(f"{name}: other bits than with other residents")
        del made
        if options.gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        ms = rank.milliseconds(run, 2)[name]
        parallel, sizes = Parallel(options.ranks), rank.sizes(canvas)
        seconds = streamed_step_seconds(work, rank.target, sizes, planned, parallel)
        memory = memory_plan(work, sizes, planned, parallel, timesteps=kept_timesteps(49), arch="sm_90a")
        parts = memory.device["denoise"]
        # Outside of torch's allocator: the context, and NCCL's buffers, which are there in every phase.
        outside = parts["context"] + min(phase.get("collectives", 0) for phase in memory.device.values())
        found = {
            "resident": len(residency.resident),
            "ms": ms,
            "predicted_ms": seconds * 1e3,
            "over_predicted": ms / seconds / 1e3,
            "planned_bytes": sum(parts.values()),
            "planned_allocated": sum(parts.values()) - outside,
            "host_bytes": module.stats.bytes_host,
        }
        if options.gpu:
            free, whole = torch.cuda.mem_get_info()
            found |= {"allocated": torch.cuda.max_memory_allocated(), "used_bytes": whole - free}
            found["used_over_planned"] = found["used_bytes"] / found["planned_bytes"]
            found["allocated_over_planned"] = found["allocated"] / found["planned_allocated"]
        rank.note(f"{canvas} {name}", found)


def fp8(rank: Rank) -> None:
    deep(rank, deep_passes_of(rank.options.ranks), "fp8")


def sage(rank: Rank) -> None:
    deep(rank, sage_passes_of(rank.options.ranks), "fp8,sage")


SECTIONS = {"links": links, "rings": rings, "blocks": blocks, "deep": fp8, "dlo": dlo, "sage": sage}
