"""What `h3compile.plan` predicts of published figures, most of them of vLLM-Omni on B300 nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from figure import GIB, MIB, Figure

from h3compile.plan.components import AUDIO_VAE, TEXT_ENCODER, VIDEO_VAE, Placement, other_seconds
from h3compile.plan.cost import Parallel, request_seconds, step_seconds, streamed_step_seconds
from h3compile.plan.memory import MemoryPlan, memory_plan
from h3compile.plan.residency import Mode, Residency, prefix
from h3compile.plan.shapes import Clip
from h3compile.plan.work import ProgramWork, released
from h3compile.targets import find_target

B300_BAR = 0.15

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


def published_figures() -> Iterator[Figure]:
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
