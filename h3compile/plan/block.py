"""One block on one of several ranks: what its kernels do, and what is exchanged, over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from h3compile.plan import collectives
from h3compile.plan.cost import piece_seconds, ring_turn, waiting_seconds
from h3compile.plan.polynomial import Sizes
from h3compile.plan.work import Piece, ProgramWork
from h3compile.targets import Target

__all__ = ["BlockSpan", "Lane", "block_spans"]

Lane = Literal["kernels", "exchange"]


@dataclass(frozen=True)
class BlockSpan:
    """``what`` a lane does from ``start`` to ``end``, in seconds since the block began."""

    lane: Lane
    what: str
    start: float
    end: float


def block_spans(
    work: ProgramWork, target: Target, sizes: Sizes, shards: int, ring: int | None = None
) -> tuple[BlockSpan, ...]:
    """A block of ``shards`` ranks, of which those share heads that can, or but a ``ring`` of so many.

    The last span ends when `h3compile.plan.cost.call_seconds` says. Errors are its.
    """
    pieces = work.block.pieces
    ulysses, stretches = collectives.split(work.heads, shards, ring)
    spans = _Spans()

    def compute(what: str, some: tuple[Piece, ...]) -> None:
        spans.add("kernels", what, sum(piece_seconds(p, target, sizes, shards=shards) for p in some))

    waits = waiting_seconds(work, target, sizes, shards) if shards > 1 else 0.0

    def exchange(what: str, share: float) -> None:
        moved = collectives.ulysses_bytes(sizes["rows"], work.attended, shards, stretches)
        # Who is there first waits in it for the others.
        spans.add("exchange", what, collectives.seconds(target, share * moved) + waits / 2)

    def order(share: float) -> None:
        spans.add("kernels", "order", share * collectives.ordering_seconds(work, target, sizes, shards))

    # Rows become heads before the norms of queries and keys, or before what prepares them for SAGE.
    own = next(index for index, piece in enumerate(pieces) if piece.kind == "gemm") + 1
    (dense,) = (index for index, piece in enumerate(pieces) if piece.kind == "attention")
    compute("norm, qkv", pieces[:own])
    if ulysses > 1:
        order(3 / 4)
        exchange("q, k, v", 3 / 4)
    compute("q, k norm", pieces[own:dense])
    if stretches == 1:
        compute("attention", pieces[dense : dense + 1])
    else:
        turn = ring_turn(work, target, sizes, shards, stretches)
        for count in range(stretches):
            begun, last = spans.now, count + 1 == stretches
            # What travels beside a product holds it up.
            spans.add("kernels", "attention", turn.computes + (0.0 if last else turn.held_up))
            if not last:
                spans.beside("exchange", "k, v", begun, turn.travels)
            if count == 0 and ulysses == 1:
                spans.add("exchange", "waits", waits)
    if ulysses > 1:
        exchange("attention", 1 / 4)
        order(1 / 4)
    compute("out, feed-forward", pieces[dense + 1 :])
    return tuple(spans.found)


class _Spans:
    """Spans one after the other, and some beside them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.found: list[BlockSpan] = []

    def add(self, lane: Lane, what: str, seconds: float) -> None:
        if seconds:
            self.beside(lane, what, self.now, seconds)

    def beside(self, lane: Lane, what: str, start: float, seconds: float) -> None:
        """From ``start`` on; nothing begins before it has ended."""
        self.found.append(BlockSpan(lane, what, start, start + seconds))
        self.now = max(self.now, start + seconds)
