"""What ranks tell each other while they run, and what follows from it: pure functions of their beats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from h3compile.errors import RankFailure

__all__ = ["Beat", "judge"]


@dataclass(frozen=True)
class Beat:
    """A rank's word about itself.

    ``forward`` counts the forwards it has begun, ``inside`` says whether it is in the last of them, and
    ``still`` for how many seconds that came no further. ``sent`` counts the bytes it sent to other ranks,
    ``waits`` says whether it is in an exchange now. ``number`` grows with every beat.
    """

    number: int
    forward: int = 0
    inside: bool = False
    still: float = 0.0
    sent: int = 0
    waits: bool = False

    def encode(self) -> str:
        """As text, for the store."""
        return json.dumps(list(asdict(self).values()))

    @classmethod
    def decode(cls, text: str) -> Beat:
        """The beat that was encoded."""
        return cls(*json.loads(text))


def judge(
    own: int, beats: Sequence[Beat], unheard: Mapping[int, float], ended: Sequence[int], patience: float
) -> RankFailure | None:
    """Why the ranks cannot go on, as rank ``own`` sees it, which is in a forward; None: nothing is known.

    ``beats`` are the last ones, rank by rank, ``unheard`` says for how many seconds there was no new one,
    and ``ended`` are ranks whose process is gone. What takes more than ``patience`` seconds is given up.
    Ranks that wait for a slow one stand still too, so nothing is wrong while any of them comes further.
    """
    mine = beats[own]
    if ended:
        rank = ended[0]
        return RankFailure(
            f"rank {rank} has ended while the others are in forward {mine.forward}",
            "look at its own output; a kill without a word is often the kernel's for lack of memory",
            rank=rank,
            mine=True,
        )
    for rank, seconds in sorted(unheard.items()):
        if seconds > patience:
            return RankFailure(
                f"rank {rank} has given no sign of life for {seconds:.0f} s",
                "look whether its process is stopped or its machine is gone",
                rank=rank,
                mine=True,
            )
    if mine.still <= patience:
        return None
    late = [rank for rank, beat in enumerate(beats) if beat.forward < mine.forward]
    if late:
        return RankFailure(
            f"{_ranks(late)} did not come to forward {mine.forward} within {patience:g} s",
            "call the module on every rank, as often and in the same order",
            rank=late[0],
            mine=True,
        )
    here = [rank for rank, beat in enumerate(beats) if beat.inside and beat.forward == mine.forward]
    if any(beats[rank].still <= patience for rank in here):
        return None
    # Who sent least is behind; of those, who waits in an exchange waits for the others.
    least = min(beats[rank].sent for rank in here)
    behind = [rank for rank in here if beats[rank].sent == least]
    behind = [rank for rank in behind if not beats[rank].waits] or behind
    return RankFailure(
        f"{_ranks(behind)} came no further in forward {mine.forward} for {patience:g} s",
        "look at what its process does; a longer wait is allowed with patience=SECONDS",
        rank=behind[0],
        mine=True,
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
