"""What ranks send to each other: bytes of sequence parallelism and of gathered weights, and their seconds.

The bytes are a rank's own: what it receives, and sends. Links carry both directions at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from h3compile.errors import H3CompileError
from h3compile.plan.polynomial import Sizes
from h3compile.plan.work import ProgramWork
from h3compile.targets import Target

__all__ = [
    "LATENCY",
    "RING_HOLDS",
    "Kind",
    "degrees",
    "gather_weights_bytes",
    "ordered_bytes",
    "ordering_seconds",
    "output_bytes",
    "ring_bytes",
    "seconds",
    "split",
    "ulysses_bytes",
]

Kind = Literal["exchange", "gather", "turn"]

# Seconds before a collective has its rate, and rates of gathers and of a ring's turns over that of exchanges,
# which a target's link has: fitted to NCCL 2.28 between two H200 at 134 to 812 MB, where exchanges and
# gathers are off by up to 8 % and turns by 12 (h200_x2_ranks_earlier.json, links).
LATENCY = 60e-6
_RATE: Mapping[Kind, float] = {"exchange": 1.0, "gather": 0.8, "turn": 1.08}

_BF16 = 2
# What a ring holds for a number of its queries, over their own two bytes: two stretches of keys and values
# and a result in FP32, 12 bytes; and where libraries compute it 12 more, results that are merged and the one
# that is returned (ops/ring_attention.py).
RING_HOLDS = 6
RING_MERGES = 6
# Exchanges of a block: queries, keys and values together, then the attention's result.
ULYSSES_EXCHANGES = 2
# What leaves the model a row: 96 video channels in FP32, with 32 of audio; the whole row would be 10,752
# bytes.
_OUTPUT_BYTES = 4 * (96 + 32)


def degrees(heads: int) -> tuple[int, ...]:
    """The degrees of Ulysses: each rank gets whole heads, so they divide their number."""
    return tuple(degree for degree in range(1, heads + 1) if heads % degree == 0)


def split(heads: int, shards: int, ring: int | None = None) -> tuple[int, int]:
    """How many of ``shards`` share heads, and how many stretches go round: ``ring``, or as `sp` does."""
    if ring is None:
        ulysses = math.gcd(heads, shards)
        return ulysses, shards // ulysses
    ulysses, rest = divmod(shards, ring)
    if rest or heads % ulysses:
        raise H3CompileError(
            f"{shards} ranks with {heads} heads are no ring of {ring}", "use degrees that divide both"
        )
    return ulysses, ring


def ulysses_bytes(rows: float, attended: int, shards: int, ring: int = 1) -> float:
    """Bytes a rank exchanges in one block: 8 (S/P) W (P-1)/P for W channels of heads.

    Queries, keys, values and the result, two bytes a channel; all but the share that stays. Where ``ring``
    stretches have ``shards`` / ``ring`` ranks each, S is what one of these has.
    """
    together = shards // ring
    return 4 * _BF16 * (rows / shards) * attended * (together - 1) / together


def ring_bytes(rows: float, attended: int, shards: int, ring: int | None = None) -> float:
    """Bytes a rank receives in one block when keys and values go round, or are gathered: 4 (S/P) W (R-1).

    Of ``shards`` P ranks in a ``ring`` of R stretches, which is P unless some of them share heads.
    """
    return 2 * _BF16 * (rows / shards) * attended * ((shards if ring is None else ring) - 1)


def ordered_bytes(rows: float, attended: int, shards: int) -> float:
    """Bytes a rank reads and writes in one block to put in order what is exchanged for heads: 16 (S/P) W.

    Queries, keys and values before they go, and the result once it has come.
    """
    return 2 * 4 * _BF16 * (rows / shards) * attended


def gather_weights_bytes(block: float, shards: int) -> float:
    """Bytes a rank receives when a block is put together from one shard of every rank."""
    return block * (shards - 1) / shards


def output_bytes(rows: float, shards: int) -> float:
    """Bytes a rank receives when every rank is to have all rows that leave the model."""
    return _OUTPUT_BYTES * rows * (shards - 1) / shards


def seconds(target: Target, moved: float, exchanges: int = 1, kind: Kind = "exchange") -> float:
    """Seconds of ``exchanges`` collectives that move ``moved`` bytes a rank together.

    `H3CompileError` where the target has no link to another device.
    """
    if target.peer is None:
        raise H3CompileError(f"{target.name} has no link to another device", "plan for one device")
    return moved / (target.peer.rate.reached * _RATE[kind]) + exchanges * LATENCY


def ordering_seconds(work: ProgramWork, target: Target, sizes: Sizes, shards: int) -> float:
    """Seconds a block that one of ``shards`` devices puts in order what it exchanges for heads."""
    return ordered_bytes(sizes["rows"], work.attended, shards) / target.rate("bandwidth").reached


def step_seconds(
    work: ProgramWork, target: Target, sizes: Sizes, shards: int, ring: int | None = None
) -> dict[str, float]:
    """What each call of a step adds when ``shards`` devices share its rows, by call name; without rings.

    Blocks exchange heads, which are put in order for it; the last call gathers the rows that leave.
    """
    if shards == 1:
        return {}
    rows = sizes["rows"]
    ulysses, ring = split(work.heads, shards, ring)
    block = 0.0
    if ulysses > 1:
        block = seconds(target, ulysses_bytes(rows, work.attended, shards, ring), ULYSSES_EXCHANGES)
        block += ordering_seconds(work, target, sizes, shards)
    last = work.names("step")[-1]
    return dict.fromkeys(work.blocks, block) | {
        last: seconds(target, output_bytes(rows, shards), kind="gather")
    }
