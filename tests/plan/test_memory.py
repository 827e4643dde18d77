"""Bytes by kind and phase, on the device and on the host, and the other tenants of the card."""

from __future__ import annotations

import pytest
import torch

from h3compile.ops.attention import ATTENTION
from h3compile.plan.components import (
    AUDIO_VAE,
    COMPONENTS,
    TEXT_ENCODER,
    VIDEO_VAE,
    VIDEO_VAE_FP16,
    Phase,
    other_seconds,
)
from h3compile.plan.cost import Parallel
from h3compile.plan.memory import (
    KINDS,
    activation_bytes,
    kept_timesteps,
    memory_plan,
    slot_bytes,
    usable,
)
from h3compile.plan.residency import Mode, Residency, spaced
from h3compile.plan.work import OWN_DENSE, ProgramWork, released
from h3compile.targets import Target, find_target, targets

CLIP = {"rows": 37_760, "video_rows": 37_296, "audio_rows": 414, "text_rows": 50, "timesteps": 2}
PIXELS = 124 * 1344 * 768


def residency(
    work: ProgramWork, count: int, slots: int = 2, mode: Mode = "local", pieces: int = 1
) -> Residency:
    return Residency(
        work.blocks, spaced(work.blocks, count), slots if count < len(work.blocks) else 0, mode, pieces
    )


def test_distinct_timesteps_of_a_request() -> None:
    assert kept_timesteps(49, 2) == 97  # video and sound share the first
    assert kept_timesteps(49) == 99  # what an engine of 50 grid points holds


def test_each_resident_block_takes_its_weights_and_tables() -> None:
    work = released("exact")
    plans = [memory_plan(work, CLIP, residency(work, n), timesteps=97) for n in (0, 10, 20)]
    totals = [plan.peak for plan in plans]
    block = work.regions["block"].weights + 99 * work.call("block.0").table
    assert totals[1] - totals[0] == totals[2] - totals[1] == 10 * block


def test_streaming_everything_takes_slots_instead() -> None:
    work = released("fp8")
    whole = memory_plan(work, CLIP, residency(work, 50)).device["denoise"]
    none = memory_plan(work, CLIP, residency(work, 0, slots=3)).device["denoise"]
    assert "slots" not in whole
    # Blocks, and the refiner, which comes through the slots too.
    assert none["slots"] == 3 * slot_bytes(work, residency(work, 0, slots=3), CLIP)
    assert none["resident weights"] == sum(work.weights[name] for name in ("embed.0", "head.0"))
    assert whole["resident weights"] == sum(work.weights[name] for name in work.names("request", "step"))
    assert whole["activations"] == none["activations"]


def test_a_slot_holds_the_tables_of_its_step_too() -> None:
    work = released("fp8")
    chosen = residency(work, 0)
    assert slot_bytes(work, chosen, CLIP) == work.regions["block"].weights + 2 * work.call("block.0").table
    assert slot_bytes(work, residency(work, 50), CLIP) == 0


def test_activations_grow_with_rows_and_shrink_with_ranks() -> None:
    work = released("fuse")
    alone = memory_plan(work, CLIP, residency(work, 50))
    eight = memory_plan(work, CLIP, residency(work, 50), Parallel(8))
    assert alone.device["denoise"]["activations"] == activation_bytes(work, CLIP, "step")
    assert eight.device["denoise"]["activations"] < alone.device["denoise"]["activations"] / 7
    assert "collectives" in eight.device["denoise"] and "collectives" not in alone.device["denoise"]
    longer = {**CLIP, "rows": 73_500, "video_rows": 72_000}
    assert activation_bytes(work, longer, "step") > 1.9 * activation_bytes(work, CLIP, "step")


def test_timesteps_that_no_table_holds_bring_cold_weights() -> None:
    """They come before a step's activations, so only what exceeds those counts; on the host all of it."""
    work = released("fuse")
    small = {**CLIP, "rows": 1000, "video_rows": 536}
    folded, unseen = (
        memory_plan(work, small, residency(work, 50), folded=folded) for folded in (True, False)
    )
    cold = work.regions["block.schedule"].weights
    assert "staging" not in folded.device["denoise"]
    assert unseen.device["denoise"]["staging"] == cold - activation_bytes(work, small, "step")
    assert "staging" not in memory_plan(work, CLIP, residency(work, 50), folded=False).device["denoise"]
    assert unseen.pinned["staging"] == max(cold, work.regions["block"].weights)


def test_shards_are_spread_over_ranks_and_pieces() -> None:
    work = released("exact")
    chosen = residency(work, 0, 2, "allgather", 2)
    gathered = memory_plan(work, CLIP, chosen, Parallel(8))
    local = memory_plan(work, CLIP, residency(work, 0), Parallel(8))
    slot = slot_bytes(work, chosen, CLIP)
    assert gathered.device["denoise"]["shards"] == pytest.approx(2 * slot / 16, rel=1e-6)
    assert gathered.pinned["streamed weights"] * 8 == pytest.approx(
        local.pinned["streamed weights"], rel=1e-6
    )


def test_host_memory_is_that_of_what_streams() -> None:
    work = released("fp8")
    plan = memory_plan(work, CLIP, residency(work, 20), timesteps=97, tenants=(TEXT_ENCODER,))
    moving = 30 * work.regions["block"].weights + sum(work.weights[name] for name in work.names("request"))
    assert plan.pinned["streamed weights"] == moving
    assert plan.pinned["streamed tables"] == 97 * 30 * work.call("block.0").table
    assert plan.pageable["tenants"] == TEXT_ENCODER.weights
    assert plan.host == sum(plan.pinned.values()) + sum(plan.pageable.values())


def test_tenants_are_there_when_they_work() -> None:
    work = released("fp8,sage")
    plan = memory_plan(work, CLIP, residency(work, 25), tenants=tuple(COMPONENTS.values()), pixels=PIXELS)
    assert plan.phase == "encode"
    assert plan.device["encode"]["tenants"] == TEXT_ENCODER.weights + TEXT_ENCODER.peak
    decode = VIDEO_VAE.weights + AUDIO_VAE.weights + VIDEO_VAE.work_bytes(PIXELS)
    assert plan.device["decode"]["tenants"] == decode
    assert "tenants" not in plan.device["denoise"]
    assert plan.peak == plan.total("encode")
    assert plan.missing(plan.peak - 5) == 5 and plan.missing(plan.peak) == 0


def test_where_tenants_live_decides_what_they_take() -> None:
    phases: tuple[Phase, ...] = ("encode", "denoise", "decode")
    weights = TEXT_ENCODER.weights
    assert [TEXT_ENCODER.placed("resident").on_device(p) for p in phases] == [weights] * 3
    assert [TEXT_ENCODER.placed("moved").on_device(p) for p in phases] == [weights, 0, 0]
    assert [TEXT_ENCODER.placed("elsewhere").on_device(p) for p in phases] == [0, 0, 0]
    streamed = TEXT_ENCODER.placed("streamed").on_device("encode")
    assert 0 < streamed < weights / 10
    assert TEXT_ENCODER.placed("moved", shards=8).weights == -(-weights // 8)
    assert VIDEO_VAE_FP16.weights * 2 == pytest.approx(VIDEO_VAE.weights, rel=0.01)
    plan = memory_plan(
        released("fp8"), CLIP, residency(released("fp8"), 0), tenants=(TEXT_ENCODER.placed("elsewhere"),)
    )
    assert "tenants" not in plan.device["encode"] and plan.pageable["tenants"] == 0


def test_residents_may_leave_for_the_tenants() -> None:
    work = released("fp8")
    kept = memory_plan(work, CLIP, residency(work, 25), tenants=(VIDEO_VAE,))
    left = memory_plan(work, CLIP, residency(work, 25), tenants=(VIDEO_VAE,), keep=False)
    assert kept.total("decode") - left.total("decode") == 25 * work.regions["block"].weights
    assert kept.total("denoise") == left.total("denoise")


def test_kinds_come_in_one_order() -> None:
    work = released("fp8")
    plan = memory_plan(
        work, CLIP, residency(work, 5, 2, "allgather"), Parallel(8), timesteps=97, tenants=(VIDEO_VAE,)
    )
    for kinds in plan.device.values():
        assert list(kinds) == [kind for kind in KINDS if kind in kinds]


def test_usable_memory_is_the_targets() -> None:
    assert usable(find_target("rtx-4090")) == find_target("rtx-4090").memory
    assert usable(find_target("cpu")) is None


def test_decoding_is_slower_on_slower_cards_and_shared_by_ranks() -> None:
    clip = {"frames": 124, "width": 1344, "height": 768}
    fast, slow = (other_seconds(find_target(name), **clip) for name in ("b300", "gb10"))
    assert slow["decode"] > 5 * fast["decode"]
    assert other_seconds(find_target("b300"), **clip, shards=8)["decode"] == fast["decode"] / 8


@pytest.mark.parametrize(
    ("name", "shards", "frames", "width", "height", "published"),
    [
        ("b300", 1, 124, 1344, 768, 8.2),  # vllm-omni #6014, eager
        ("h200", 1, 209, 1248, 768, 12.8),  # vllm-omni #5691
        ("b300", 4, 209, 1248, 768, 1.76),  # vllm-omni #5750
        ("gb10", 1, 192, 960, 576, 70.0),  # vllm-omni #5972
    ],
)
def test_decoding_is_an_estimate_within_a_factor_of_two(
    name: str, shards: int, frames: int, width: int, height: int, published: float
) -> None:
    seconds = other_seconds(find_target(name), frames=frames, width=width, height=height, shards=shards)[
        "decode"
    ]
    assert published / 2 < seconds < published * 2


def test_what_a_library_returns_lies_beside_what_is_placed() -> None:
    """cuDNN's dense attention; on Hopper a kernel of ours takes the step's memory, SAGE's do everywhere."""
    work = released("fuse")
    result = 2 * work.attended * CLIP["rows"]

    def workspace(work: ProgramWork, arch: str) -> int:
        return memory_plan(work, CLIP, residency(work, 0), arch=arch).device["denoise"]["workspace"]

    assert workspace(work, "sm_103a") - workspace(work, "sm_90a") == result
    assert workspace(work, "") == workspace(work, "sm_103a")
    assert workspace(released("exact"), "sm_90a") == workspace(released("exact"), "sm_103a")
    sage = released("fp8,sage")
    assert workspace(sage, "sm_103a") == workspace(sage, "sm_90a") < result


@pytest.mark.parametrize(
    "target", [one for one in targets().values() if one.kind == "cuda"], ids=lambda one: one.name
)
def test_who_computes_dense_attention_is_who_is_chosen(target: Target) -> None:
    operands = [torch.empty(1, 128, 8, 128, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    chosen = next(one for one in ATTENTION.providers if not one.refused(target.arch, operands, named=False))
    assert chosen.library == ("attention.default" not in OWN_DENSE.get(target.arch, ()))


def test_what_exchanges_hold() -> None:
    """Of a number of a rank's queries: 12 bytes of heads, sent and received; 24 of a ring; or both."""
    work = released("fuse")

    def held(shards: int) -> float:
        plan = memory_plan(work, CLIP, residency(work, 50), Parallel(shards))
        numbers = CLIP["rows"] / shards * work.attended
        return (plan.device["denoise"]["collectives"] - plan.device["encode"]["collectives"]) / numbers

    assert (held(8), held(3), held(6)) == pytest.approx((12, 24, 36))
