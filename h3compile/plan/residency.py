"""Which blocks to keep on the device when not all are: `Residency` says where weights live."""

from __future__ import annotations

from collections.abc import Sequence

from h3compile.errors import BuildError
from h3compile.program.residency import Mode, Residency

__all__ = ["Mode", "Residency", "piece_bytes", "prefix", "spaced"]


def piece_bytes(block_bytes: int, ranks: int, pieces: int) -> int:
    """Bytes of one piece of one rank's shard, the last one filled up to the size of the others."""
    return -(-block_bytes // (ranks * pieces))


def prefix(blocks: Sequence[str], count: int) -> tuple[str, ...]:
    """The first ``count`` of ``blocks``; `BuildError` when there are not so many."""
    _check_count(blocks, count)
    return tuple(blocks[:count])


def spaced(blocks: Sequence[str], count: int) -> tuple[str, ...]:
    """``count`` of ``blocks``, evenly over the cycle that steps make of them.

    Any two stretches of equally many blocks hold equally many residents, give or take one, across the end
    of a step too: the copies of the streamed blocks between them have equal time. The first block is among
    them, because after a request it computes while the slots are filled anew. `BuildError` when there are
    not so many blocks.
    """
    _check_count(blocks, count)
    total = len(blocks)
    return tuple(name for index, name in enumerate(blocks) if index * count % total < count)


def _check_count(blocks: Sequence[str], count: int) -> None:
    if not 0 <= count <= len(blocks):
        raise BuildError(
            f"resident={count} does not fit the {len(blocks)} blocks there are",
            f"choose between 0 and {len(blocks)}",
        )
