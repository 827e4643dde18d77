"""Seconds of operators, steps and requests, against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from h3compile.errors import H3CompileError
from h3compile.ops.ring_attention import RING_ATTENTION
from h3compile.plan import collectives
from h3compile.plan.cost import (
    Parallel,
    build_seconds,
    call_seconds,
    operation_seconds,
    piece_seconds,
    rank_seconds,
    region_seconds,
    request_seconds,
    ring_turn,
    step_seconds,
    streamed_step_seconds,
)
from h3compile.plan.polynomial import Polynomial
from h3compile.plan.residency import Residency
from h3compile.plan.schedule import Compute, Copy, Gather
from h3compile.plan.work import Piece, ProgramWork, released
from h3compile.targets import Link, Rate, Target, find_target

CLIP = {"rows": 37_760, "video_rows": 37_296, "audio_rows": 414, "text_rows": 50, "timesteps": 2}
RATE = Rate(1e12, 0.5, "made up")
CARD = Target(
    name="card",
    title="A card",
    arch="sm_90a",
    memory=10**10,
    devices=(),
    bandwidth=Rate(1e10, 0.5, "made up"),
    flops={"gemm.bfloat16": RATE, "attention.bfloat16": RATE, "attention.float8_e4m3fn": RATE},
    host=Link("pcie", Rate(1e9, 1.0, "made up")),
    peer=Link("nvlink", Rate(1e10, 1.0, "made up")),
    launch_seconds=1e-6,
)
ROWS = Polynomial.parse("rows")


def piece(flop: float, moved: float, **changes: object) -> Piece:
    made = Piece("linear", "gemm", "bfloat16", ROWS * flop, ROWS * moved)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_an_operator_takes_the_longer_of_flop_and_bytes_and_a_launch() -> None:
    sizes = {"rows": 1000}
    assert piece_seconds(piece(5e8, 1.0), CARD, sizes) == pytest.approx(1.0 + 1e-6)
    assert piece_seconds(piece(1.0, 1e7), CARD, sizes) == pytest.approx(2.0 + 1e-6)
    assert piece_seconds(piece(0.0, 0.0, launches=6), CARD, sizes) == pytest.approx(6e-6)
    rows = replace(piece(0.0, 5e6), kind="rows")
    assert piece_seconds(rows, CARD, sizes) == pytest.approx(1.0 + 1e-6)


def test_the_last_wave_is_half_empty() -> None:
    sizes = {"rows": 1000}
    tiled = piece(5e8, 1.0, tile=Polynomial.constant(5e9))
    assert piece_seconds(tiled, CARD, sizes) == pytest.approx(1.0 + 66 * 5e9 / 5e11 + 1e-6)


def test_ranks_share_rows_and_heads() -> None:
    sizes = {"rows": 1000}
    weights = replace(piece(5e8, 0.0), bytes=Polynomial.constant(5e9))
    assert piece_seconds(piece(5e8, 1.0), CARD, sizes, shards=4) == pytest.approx(0.25 + 1e-6)
    assert piece_seconds(weights, CARD, sizes, shards=4) == pytest.approx(1.0 + 1e-6)  # all of the weights
    square = Piece("attention", "attention", "bfloat16", Polynomial.parse("500000*rows*rows"), ROWS)
    assert piece_seconds(square, CARD, sizes, shards=4) == pytest.approx(0.25 + 1e-6)  # of all pairs of rows


def test_skipping_pays_for_its_tests_first() -> None:
    sizes = {"rows": 1000}
    plain = replace(piece(5e8, 1.0), kind="attention", operator="sage_attention.default")
    tested = replace(plain, operator="sage_attention.skip")
    dense = piece_seconds(plain, CARD, sizes)
    assert piece_seconds(tested, CARD, sizes) > dense
    assert piece_seconds(tested, CARD, sizes, skipped=0.5) < dense


def test_sage_has_e4m3_keys_where_the_pass_takes_them() -> None:
    keys = replace(piece(5e8, 1.0), kind="attention", dtype="int8")
    with pytest.raises(H3CompileError, match=r"card has no rate for attention\.int8"):
        piece_seconds(keys, CARD, {"rows": 1000})
    blackwell = replace(CARD, arch="sm_103a")
    assert piece_seconds(keys, blackwell, {"rows": 1000}) == pytest.approx(1.0 + 1e-6)


def test_fp8_on_a_card_without_it_says_so() -> None:
    with pytest.raises(H3CompileError, match=r"a100 has no rate for gemm\.float8_e4m3fn"):
        step_seconds(released("fp8"), find_target("a100"), CLIP)


@pytest.mark.parametrize("name", ["h200", "b300", "rtx-5090", "l40s", "gb10"])
def test_faster_passes_are_faster_and_longer_clips_longer(name: str) -> None:
    target = find_target(name)
    exact, fused, fp8 = (step_seconds(released(p), target, CLIP) for p in ("exact", "fuse", "fp8"))
    assert exact > fused > fp8
    longer = {**CLIP, "rows": 73_500, "video_rows": 72_576}
    assert step_seconds(released("fuse"), target, longer) > 2 * fused


def test_a_step_is_its_calls_and_a_request_its_steps() -> None:
    work, target = released("fuse"), find_target("h200")
    calls = call_seconds(work, target, CLIP)
    step = step_seconds(work, target, CLIP)
    assert step == pytest.approx(calls["embed.0"] + 50 * calls["block.7"] + calls["head.0"])
    request = request_seconds(work, target, CLIP, forwards=49, others={"decode": 3.0})
    assert request.total == pytest.approx(request.request + 49 * step + 3.0)
    assert request.request == pytest.approx(sum(calls[name] for name in work.names("request")))
    assert request_seconds(work, target, CLIP, forwards=2, step=7.0).steps == 14.0


def test_several_devices_are_faster_by_less_than_their_number() -> None:
    work, target = released("fuse"), find_target("h200")
    alone = step_seconds(work, target, CLIP)
    shared = step_seconds(work, target, CLIP, shards=8)
    assert alone / 8 < shared < alone / 5


def test_a_ring_costs_its_merges_where_the_link_is_fast_and_its_transfers_where_it_is_not() -> None:
    work, target = released("fuse"), find_target("b300")
    heads, ring, both = (
        call_seconds(work, target, CLIP, shards=8, ring=ring)["block.3"] for ring in (1, 8, 2)
    )
    assert heads < both < ring < 1.5 * heads
    assert target.peer is not None
    slow = replace(target, peer=Link("pcie", Rate(1e9, 1.0, "made up")))
    waiting = call_seconds(work, slow, CLIP, shards=8, ring=8)["block.3"]
    # Nothing hides behind a product that short: seven stretches of keys and values, one after the other.
    # Seven stretches of keys and values, one after the other, and what they travel beside.
    travel = 4 * CLIP["rows"] / 8 * 7168 * 7 / 1.08e9
    assert travel < waiting < travel + ring


def test_ranks_that_cannot_share_heads_pass_keys_round_if_the_attention_can() -> None:
    target = find_target("b300")
    three = step_seconds(released("fuse"), target, CLIP, shards=3)
    assert three == step_seconds(released("fuse"), target, CLIP, shards=3, ring=3)
    assert step_seconds(released("fuse"), target, CLIP, shards=4) < three
    assert three < step_seconds(released("fuse"), target, CLIP, shards=2)
    for passes in ("sage", "fp8,skip"):
        with pytest.raises(H3CompileError, match=r"attention.* no keys in parts, and 3 GPUs for 56 heads"):
            step_seconds(released(passes), target, CLIP, shards=3)


@pytest.mark.parametrize(("name", "held_up"), [("h200", 0.3), ("b300", 1.0)])
def test_a_turn_of_a_ring_by_hand(name: str, held_up: float) -> None:
    """A quarter of the rows a turn: by a kernel of ours that merges, or cuDNN and PyTorch's own kernels."""
    work, target = released("fuse"), find_target(name)
    turn = ring_turn(work, target, CLIP, 4, 4)
    numbers = CLIP["rows"] / 4 * 7168
    (dense,) = (piece for piece in work.regions["block"].pieces if piece.kind == "attention")
    assert target.peer is not None and dense.tile is not None
    flop = dense.flop.at(CLIP) / 4 + 66 * dense.tile.at(CLIP)
    product = flop / target.rate("attention.bfloat16").reached
    # Three results that are kept for the next turn; or three merges, a result widened and one rounded.
    merged, launches = (3 * 8, 1) if name == "h200" else ((3 * 18 + 6 + 6) / 0.41, 7)
    beside = (8 + merged) * numbers / target.rate("bandwidth").reached
    assert turn.travels == pytest.approx(4 * numbers / (1.08 * target.peer.rate.reached) + 60e-6)
    assert turn.held_up == held_up * turn.travels
    assert turn.computes == pytest.approx(product / 4 + beside / 4 + launches * target.launch_seconds)
    # A stretch holds up the product that it travels beside.
    block, heads = (call_seconds(work, target, CLIP, shards=4, ring=ring)["block.3"] for ring in (4, 1))
    alone = piece_seconds(dense, target, CLIP, shards=4)
    exchanged = collectives.step_seconds(work, target, CLIP, 4)["block.3"]
    assert block - (heads - exchanged) == pytest.approx(4 * turn.computes + 3 * turn.held_up - alone)


@pytest.mark.parametrize(("shards", "ring"), [(1, None), (8, None), (4, 4), (8, 2)])
def test_a_rank_by_itself_has_all_but_links_and_waiting(shards: int, ring: int | None) -> None:
    work, target = released("fuse"), find_target("h200")
    block = call_seconds(work, target, CLIP, shards=shards, ring=ring)["block.3"]
    ulysses, stretches = collectives.split(work.heads, shards, ring)
    links = 0.0
    if ulysses > 1:
        links += collectives.seconds(
            target, collectives.ulysses_bytes(CLIP["rows"], work.attended, shards, stretches), 2
        )
    if stretches > 1:
        links += (stretches - 1) * ring_turn(work, target, CLIP, shards, stretches).held_up
    waiting = 0.025 * region_seconds(work.block, target, CLIP, shards=shards) if shards > 1 else 0.0
    assert rank_seconds(work, target, CLIP, shards, ring) == pytest.approx(block - links - waiting)


def test_the_operator_counts_the_same_bytes_of_what_is_kept() -> None:
    held = torch.empty(1, 128, 8, 128, dtype=torch.bfloat16, device="meta")
    whole = RING_ATTENTION.cost(held, held, held, 512, 4, "ring").bytes
    # Queries and results once, keys and values of four turns twice; kept three times, in FP32.
    assert (whole - 2 * held.nbytes - 4 * 2 * 2 * held.nbytes) / held.numel() == 3 * 8


def small(count: int = 4) -> ProgramWork:
    return released("exact").with_blocks(count)


def test_operations_of_a_local_schedule() -> None:
    work, target = small(), find_target("h200")
    residency = Residency(work.blocks, ("block.0",), 2)
    seconds = operation_seconds(work, target, CLIP, residency)
    moved = work.weights["block.1"] + 2 * work.call("block.1").table
    assert target.host is not None
    assert seconds(Copy("block.1", 0)) == pytest.approx(moved / target.host.rate.reached, rel=1e-6)
    block = region_seconds(work.regions["block"], target, CLIP)
    assert seconds(Compute("block.0")) == pytest.approx(block)


def test_operations_of_an_allgather() -> None:
    work, target = small(), find_target("h200")
    assert target.host is not None and target.peer is not None
    pieces = 3
    residency = Residency(work.blocks, (), 2, "allgather", pieces)
    parallel = Parallel(shards=2, group=8)
    seconds = operation_seconds(work, target, CLIP, residency, parallel)
    moved = work.weights["block.1"] + 2 * work.call("block.1").table
    copy = seconds(Copy("block.1", 0, 0, 0))
    gather = seconds(Gather("block.1", 0, 0, 0))
    assert copy == pytest.approx(moved / 8 / pieces / target.host.rate.reached, rel=1e-6)
    gathered = moved * 7 / 8 / pieces / (0.8 * target.peer.rate.reached)
    assert gather == pytest.approx(gathered + 60e-6, rel=1e-6)
    # Kernels beside a gather are slower, and nobody else's are.
    alone = call_seconds(work, target, CLIP, shards=2)
    step = work.names("step")
    slower = sum(seconds(Compute(name)) - alone[name] for name in step)
    assert slower == pytest.approx(0.4 * 4 * pieces * gather)
    assert seconds(Compute("refiner.0")) == alone["refiner.0"]


def test_copies_hide_behind_long_blocks_and_not_behind_short_ones() -> None:
    work, target = small(8), find_target("h200")
    residency = Residency(work.blocks, (), 2)
    assert streamed_step_seconds(work, target, CLIP, residency) == pytest.approx(
        step_seconds(work, target, CLIP), rel=1e-3
    )
    short = {**CLIP, "rows": 2_001, "video_rows": 1_537}
    seconds = operation_seconds(work, target, short, residency)
    copies = sum(seconds(Copy(name, 0)) for name in work.blocks)
    assert streamed_step_seconds(work, target, short, residency) == pytest.approx(copies, rel=0.02)


def test_a_target_without_links_says_what_to_do() -> None:
    work = small()
    residency = Residency(work.blocks, (), 2)
    with pytest.raises(H3CompileError, match="no link to host memory"):
        operation_seconds(work, replace(find_target("h200"), host=None), CLIP, residency)
    with pytest.raises(H3CompileError, match="no link to another device"):
        step_seconds(work, replace(find_target("h200"), peer=None), CLIP, shards=2)


def test_a_build_of_six_layers_is_the_one_that_was_measured() -> None:
    assert build_seconds(int(9.5e9)) == pytest.approx(70.0)
