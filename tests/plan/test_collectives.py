"""Bytes that ranks exchange, against the formulas of sequence parallelism."""

from __future__ import annotations

import pytest

from h3compile.errors import H3CompileError
from h3compile.plan import collectives
from h3compile.plan.work import released
from h3compile.targets import find_target

CLIP = {"rows": 58_816, "video_rows": 58_000, "audio_rows": 696, "text_rows": 30, "timesteps": 2}


def test_degrees_divide_the_heads() -> None:
    assert collectives.degrees(56) == (1, 2, 4, 7, 8, 14, 28, 56)


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_bytes_of_a_block(shards: int) -> None:
    """8 (S/P) 7168 (P-1)/P for Ulysses, 4 (S/P) 7168 (P-1) for Ring: equal at two ranks only."""
    rows = CLIP["rows"]
    ulysses = collectives.ulysses_bytes(rows, 7168, shards)
    ring = collectives.ring_bytes(rows, 7168, shards)
    assert ulysses == 8 * (rows / shards) * 7168 * (shards - 1) / shards
    assert ring == 4 * (rows / shards) * 7168 * (shards - 1)
    assert ring == ulysses * shards / 2


def test_one_rank_exchanges_nothing() -> None:
    for count in (collectives.ulysses_bytes, collectives.ring_bytes):
        assert count(1000, 7168, 1) == 0
    assert collectives.gather_weights_bytes(1e9, 1) == 0
    assert collectives.step_seconds(released("fuse"), find_target("h200"), CLIP, 1) == {}


def test_all_but_the_own_shard_is_gathered() -> None:
    assert collectives.gather_weights_bytes(8e9, 8) == 7e9


def test_only_512_bytes_of_a_row_leave() -> None:
    assert collectives.output_bytes(1000, 2) == 512 * 500


def test_a_step_exchanges_in_blocks_and_gathers_at_its_end() -> None:
    work, target = released("fuse").with_blocks(3), find_target("b300")
    added = collectives.step_seconds(work, target, CLIP, 8)
    assert set(added) == {"block.0", "block.1", "block.2", "head.0"}
    assert target.peer is not None
    moved = collectives.ulysses_bytes(CLIP["rows"], 7168, 8)
    # Queries, keys, values and the result of a rank are each read and written once to be put in order.
    ordered = 2 * 4 * 2 * CLIP["rows"] / 8 * 7168 / target.rate("bandwidth").reached
    assert added["block.1"] == pytest.approx(moved / target.peer.rate.reached + 2 * 60e-6 + ordered)
    gathered = collectives.output_bytes(CLIP["rows"], 8) / (0.8 * target.peer.rate.reached)
    assert added["head.0"] == pytest.approx(gathered + 60e-6)


@pytest.mark.parametrize(
    ("shards", "ring", "both"),
    [
        (8, None, (8, 1)),
        (3, None, (1, 3)),
        (6, None, (2, 3)),
        (16, None, (8, 2)),
        (8, 4, (2, 4)),
        (8, 8, (1, 8)),
    ],
)
def test_who_cannot_share_heads_is_a_ring(shards: int, ring: int | None, both: tuple[int, int]) -> None:
    assert collectives.split(56, shards, ring) == both


@pytest.mark.parametrize(("shards", "ring"), [(8, 3), (8, 16), (12, 2)])
def test_degrees_that_divide_neither_are_refused(shards: int, ring: int) -> None:
    with pytest.raises(H3CompileError, match=f"{shards} ranks with 56 heads are no ring of {ring}"):
        collectives.split(56, shards, ring)


def test_a_mixed_exchange_is_the_sum_of_its_formulas() -> None:
    """4 (S/P) 7168 (R-1) go round in R stretches, 8 (S/P) 7168 (U-1)/U are exchanged by U ranks."""
    rows = CLIP["rows"]
    assert collectives.ring_bytes(rows, 7168, 8, 4) == 4 * (rows / 8) * 7168 * 3
    assert collectives.ulysses_bytes(rows, 7168, 8, 4) == 8 * (rows / 8) * 7168 / 2
    alone = collectives.step_seconds(released("fuse"), find_target("b300"), CLIP, 3)
    assert alone["block.0"] == 0  # a ring exchanges no heads


@pytest.mark.parametrize(("kind", "moved", "us"), [
    ("exchange", 405_999_616, 1257), ("exchange", 135_499_776, 496),
    ("gather", 405_999_616, 1559), ("gather", 135_499_776, 562),
    ("turn", 812_000_000, 2272), ("turn", 271_000_000, 799),
    ("exchange", 67_108_864, 270), ("gather", 67_108_864, 293), ("turn", 134_217_728, 485),
])  # fmt: skip
def test_a_collective_takes_what_it_took_between_two_h200(
    kind: collectives.Kind, moved: int, us: float
) -> None:
    off = 0.13 if us == 485 else 0.08
    assert collectives.seconds(find_target("h200"), moved, kind=kind) == pytest.approx(us * 1e-6, rel=off)


def test_a_target_alone_has_nobody_to_talk_to() -> None:
    assert find_target("gb10").peer is None
    with pytest.raises(H3CompileError, match="gb10 has no link to another device"):
        collectives.seconds(find_target("gb10"), 1.0)
