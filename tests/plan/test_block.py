"""One block of one rank over time: it is what the cost model adds up, and what overlaps is what may."""

from __future__ import annotations

import itertools

import pytest

from h3compile.plan import collectives
from h3compile.plan.block import BlockSpan, block_spans
from h3compile.plan.cost import call_seconds, waiting_seconds
from h3compile.plan.shapes import Clip
from h3compile.plan.work import released
from h3compile.targets import find_target

DIMS = Clip(frames=124).dims


def lane(spans: tuple[BlockSpan, ...], name: str) -> list[BlockSpan]:
    return [span for span in spans if span.lane == name]


@pytest.mark.parametrize(
    ("passes", "shards", "ring"),
    [
        ("", 1, None),
        ("", 8, None),
        ("", 8, 8),
        ("", 8, 2),
        ("", 6, None),
        ("fp8,sage", 4, None),
        ("fp8,skip", 2, None),
    ],
)
def test_it_ends_when_the_cost_model_says(passes: str, shards: int, ring: int | None) -> None:
    work, target = released(passes), find_target("h200")
    spans = block_spans(work, target, DIMS, shards, ring)
    expected = call_seconds(work, target, DIMS, shards=shards, ring=ring)["block.7"]
    assert max(span.end for span in spans) == pytest.approx(expected)
    for name in ("kernels", "exchange"):
        found = lane(spans, name)
        assert all(one.end <= other.start + 1e-12 for one, other in itertools.pairwise(found))


def test_heads_are_waited_for_and_a_ring_is_not() -> None:
    work, target = released(""), find_target("b300")

    def idle(ring: int) -> float:
        kernels = lane(block_spans(work, target, DIMS, 8, ring), "kernels")
        return kernels[-1].end - sum(span.end - span.start for span in kernels)

    # In a ring for the slowest rank alone.
    waits = waiting_seconds(work, target, DIMS, 8)
    assert waits > 0 and idle(8) == pytest.approx(waits)
    exchanged = lane(block_spans(work, target, DIMS, 8, 1), "exchange")
    assert idle(1) == pytest.approx(sum(span.end - span.start for span in exchanged))
    links = collectives.seconds(target, collectives.ulysses_bytes(DIMS["rows"], work.attended, 8), 2)
    assert idle(1) == pytest.approx(links + waits)
    assert len(lane(block_spans(work, target, DIMS, 8, 8), "exchange")) == 7 + 1
    assert not lane(block_spans(work, target, DIMS, 1), "exchange")
