"""Which rows a rank has."""

from __future__ import annotations

import pytest
import torch

from h3compile.errors import BuildError
from h3compile.program.facts import Dim
from h3compile.program.parallel import Kind, Parallel

VIDEO, TEXT = Kind("video_indices", "video_rows"), Kind("text_indices", "text_rows")
DIMS = (Dim("rows", 100), Dim("video_rows", 90), Dim("text_rows", 10), Dim("timesteps", 2))


def layout(rows: int, text: int) -> dict[str, torch.Tensor]:
    return {"text_indices": torch.arange(text), "video_indices": torch.arange(text, rows)}


@pytest.mark.parametrize("ranks", [2, 3, 7, 8])
@pytest.mark.parametrize(("rows", "text"), [(2, 1), (9, 2), (56, 5), (101, 60)])
def test_every_row_is_packed_once_where_it_belongs(ranks: int, rows: int, text: int) -> None:
    parallel, given = Parallel(ranks, kinds=(TEXT, VIDEO)), layout(rows, text)
    local = -(-rows // ranks)
    whole = torch.arange(1, rows + 1)
    gathered = []
    for rank in range(ranks):
        found = parallel.values(rows, given, rank)
        packed = torch.zeros(local + 1, dtype=torch.int64)
        for kind in parallel.kinds:
            assert len(found[kind.taken]) == len(found[kind.placed]) >= 1
            packed[found[kind.placed]] = whole[given[kind.index]][found[kind.taken]]
        gathered.append(packed[:local])
        own = whole[found[parallel.own]]
        assert len(own) == local and torch.equal(own[packed[:local] > 0], packed[:local][packed[:local] > 0])
    together = torch.cat(gathered)
    assert torch.equal(together[:rows], whole) and not together[rows:].any()


def test_rows_of_any_order() -> None:
    given = {"text_indices": torch.tensor([5, 1]), "video_indices": torch.tensor([4, 0, 3, 2])}
    found = Parallel(2, kinds=(TEXT, VIDEO)).values(6, given, 1)
    assert found["taken_text_indices"].tolist() == [0] and found["placed_text_indices"].tolist() == [2]
    assert found["taken_video_indices"].tolist() == [0, 2]
    assert found["placed_video_indices"].tolist() == [1, 0]


def test_a_rank_without_a_kind_takes_a_row_to_behind_its_stretch() -> None:
    found = Parallel(2, kinds=(TEXT, VIDEO)).values(6, layout(6, 2), 1)
    assert found["taken_text_indices"].tolist() == [0]
    assert found["placed_text_indices"].tolist() == [3]


def test_the_stretch_of_a_ring_is_that_of_neighbours() -> None:
    parallel = Parallel(2, 2, kinds=(VIDEO,))
    for rank, expected in enumerate(([0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 6], [4, 5, 6, 6])):
        assert parallel.values(7, layout(7, 1), rank)["stretch_row_indices"].tolist() == expected


def test_where_heads_are_not_shared_the_stretch_is_what_a_rank_has() -> None:
    parallel = Parallel(1, 4, kinds=(TEXT,))
    assert (parallel.stretch, parallel.stretch_rows) == (parallel.own, "local_rows")
    assert "stretch" not in " ".join([*map(str, parallel.ports), *map(str, parallel.dims(DIMS))])


def test_inputs_and_lengths() -> None:
    parallel = Parallel(4, 2, kinds=(TEXT,))
    assert [str(port) for port in parallel.ports] == [
        "own_row_indices: int64[local_rows]",
        "taken_text_indices: int64[local_text_rows]",
        "placed_text_indices: int64[local_text_rows]",
        "stretch_row_indices: int64[stretch_rows]",
    ]
    largest = DIMS[0].largest
    assert parallel.dims(DIMS) == (
        Dim("local_rows", 13, 1, largest // 8),
        Dim("local_text_rows", 2, 1, largest // 8),
        Dim("stretch_rows", 50, 1, largest // 2),
    )
    assert parallel.ranks == 8 and str(parallel) == "8 ranks, ulysses=4, ring=2"
    assert str(Parallel(2, exchange="fp8")) == "2 ranks, ulysses=2, exchange in FP8"


def test_refused() -> None:
    for degrees in ((1, 1), (0, 4), (4, 0)):
        with pytest.raises(BuildError, match="share nothing: take at least two ranks"):
            Parallel(*degrees)
    with pytest.raises(ValueError, match="rank 2 is none of 2"):
        Parallel(2).values(4, {}, 2)
