"""What follows from the beats of several ranks, and from what they say before a forward."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from h3compile.errors import Interrupted
from h3compile.runtime.agreement import Word, difference, digest, shape_digest
from h3compile.runtime.verdict import Beat, judge

PATIENCE = 10.0


def beat(
    still: float = 0.0, *, forward: int = 3, inside: bool = True, sent: int = 5, waits: bool = False
) -> Beat:
    return Beat(1, forward, inside, still, sent, waits)


def verdict(
    beats: Sequence[Beat], unheard: dict[int, float] | None = None, ended: Sequence[int] = ()
) -> tuple[int | None, str] | None:
    found = judge(0, beats, unheard or {}, ended, PATIENCE)
    return None if found is None else (found.rank, found.cause)


def test_a_beat_is_told_whole() -> None:
    told = Beat(7, 3, True, 1.5, 99, True)
    assert Beat.decode(told.encode()) == told


def test_nothing_is_wrong_while_a_rank_comes_further() -> None:
    assert verdict([beat(), beat()]) is None
    assert verdict([beat(11, waits=True), beat(9)]) is None, "it waits for a slow one"


def test_a_rank_that_ended_is_named_at_once() -> None:
    assert verdict([beat(), beat(), beat()], ended=[2]) == (
        2,
        "rank 2 has ended while the others are in forward 3",
    )


def test_a_rank_that_says_nothing_is_named() -> None:
    assert verdict([beat(), beat()], {1: 9.0}) is None
    assert verdict([beat(), beat()], {1: 11.0}) == (1, "rank 1 has given no sign of life for 11 s")


def test_a_rank_that_does_not_come_is_named() -> None:
    late = beat(0, forward=2, inside=False)
    assert verdict([beat(9), late, beat(9)]) is None
    assert verdict([beat(11), late, beat(11)]) == (1, "rank 1 did not come to forward 3 within 10 s")
    assert verdict([beat(11), late, late]) == (1, "ranks 1, 2 did not come to forward 3 within 10 s")


@pytest.mark.parametrize(
    ("behind", "others"),
    [
        (beat(12, sent=4), beat(11, sent=5)),  # who launched less is behind, on a GPU
        (beat(12), beat(11, waits=True)),  # who is in no exchange keeps those in one waiting, on a CPU
    ],
)
def test_of_ranks_that_stand_still_the_one_behind_is_named(behind: Beat, others: Beat) -> None:
    assert verdict([others, others, behind]) == (2, "rank 2 came no further in forward 3 for 10 s")


def test_where_none_is_behind_all_are_named() -> None:
    assert verdict([beat(11), beat(12)]) == (0, "ranks 0, 1 came no further in forward 3 for 10 s")
    through = beat(0, inside=False)
    assert verdict([beat(11), through]) == (0, "rank 0 came no further in forward 3 for 10 s")


def test_equal_words_let_a_forward_run() -> None:
    words = [Word({"a": "1"}, ("x",)), Word({"a": "1"})]
    assert difference([Word.decode(word.encode()) for word in words]) is None


def test_a_difference_is_named_alike_on_all_ranks() -> None:
    one, two = Word({"a": "1", "b": "2"}), Word({"a": "1", "b": "3"})
    assert difference([one, one, two]).cause == "ranks 0 and 2 were given different b"  # type: ignore[union-attr]
    refuses = Word(refusal="no text")
    found = difference([one, refuses])
    assert found is not None and found.cause == "rank 1 refuses its inputs: no text"
    assert isinstance(difference([one, Word({"a": "1", "b": "2"}, stop=True)]), Interrupted)


def test_a_digest_tells_dtype_shape_and_bits() -> None:
    one = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert digest(one) == digest(one.clone())
    others = [one.reshape(3, 2), one.double(), one + 1e-6, one.view(torch.int32)]
    assert len({digest(one), *map(digest, others)}) == 5
    assert shape_digest(one) == shape_digest(one + 1) != shape_digest(one.double())
    assert digest(torch.zeros(0)) != digest(torch.zeros(0, 3))
