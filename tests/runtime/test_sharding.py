"""Shards of a range: every byte is some rank's, and what is gathered is the range."""

from __future__ import annotations

import pytest
import torch

from h3compile.runtime.sharding import WHOLE, Sharding


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.parametrize("nbytes", [1, 255, 256, 10_000, 65_537])
def test_what_all_ranks_gather_is_the_range(ranks: int, pieces: int, nbytes: int) -> None:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    shards = [Sharding(rank, ranks, pieces) for rank in range(ranks)]
    part = shards[0].part(nbytes)
    target = torch.full((shards[0].gathered(nbytes),), 77, dtype=torch.uint8)
    assert part % 256 == 0 and part * ranks * pieces == len(target) >= nbytes
    assert shards[0].held(nbytes) == part * pieces
    for piece in range(pieces):
        parts = []
        for shard in shards:
            start, end = shard.spans(nbytes)[piece]
            parts.append(torch.nn.functional.pad(data[start:end], (0, part - (end - start))))
        shards[0].round(target, nbytes, piece).copy_(torch.cat(parts))
    assert torch.equal(target[:nbytes], data)
    assert len({shard.name for shard in shards}) == ranks


def test_one_rank_holds_the_range_as_it_is() -> None:
    assert (WHOLE.part(1001), WHOLE.held(1001), WHOLE.gathered(1001)) == (1001, 1001, 1001)
    assert WHOLE.spans(1001) == [(0, 1001)] and WHOLE.name == ""
