from __future__ import annotations

import pytest
import torch

from h3compile.errors import Interrupted
from h3compile.runtime.executors import Executor
from h3compile.runtime.request import RequestMemo
from h3compile.runtime.runner import BoundCall
from h3compile.runtime.stats import Stats


class Chain:
    """text -> a -> b -> refined; positions -> cos. Records what ran."""

    def __init__(self, kept: tuple[str, ...] = ("refined", "cos")) -> None:
        self.ran: list[str] = []
        self.stats = Stats()
        edges = (("text", "a"), ("a", "b"), ("positions", "cos"), ("b", "refined"))
        self.memo = RequestMemo([self._call(*edge) for edge in edges], kept, self.stats)
        self.inputs = {"text": torch.tensor(1.0), "positions": torch.tensor(10.0)}
        self.stop_after_two = False

    def _call(self, source: str, target: str) -> BoundCall:
        def run(arguments):
            self.ran.append(target)
            return (arguments[0] + 1,)

        return BoundCall(target, target, (source,), (target,), Executor(target, run), ())

    def values(self) -> dict[str, float]:
        def check() -> None:
            if self.stop_after_two and len(self.ran) == 2:
                self.stop_after_two = False
                raise Interrupted("stop")

        return {name: value.item() for name, value in self.memo.values(self.inputs, check).items()}


def test_values_are_computed_once() -> None:
    chain = Chain()
    assert chain.values() == chain.values() == {"refined": 4.0, "cos": 11.0}
    assert chain.ran == ["a", "b", "cos", "refined"]
    assert (chain.stats.request_misses, chain.stats.request_hits) == (1, 1)


def test_only_what_depends_on_the_change_is_recomputed() -> None:
    chain = Chain()
    chain.values()
    chain.ran.clear()
    chain.inputs["text"] = torch.tensor(2.0)
    chain.memo.invalidate({"text"})
    assert chain.values() == {"refined": 5.0, "cos": 11.0}
    assert chain.ran == ["a", "b", "refined"]


def test_a_change_of_something_else_recomputes_nothing() -> None:
    chain = Chain()
    chain.values()
    chain.memo.invalidate({"timestep"})
    chain.values()
    assert len(chain.ran) == 4 and chain.stats.request_hits == 1


def test_after_a_stop_no_stale_value_is_used() -> None:
    chain = Chain()
    chain.stop_after_two = True
    with pytest.raises(Interrupted):
        chain.values()
    chain.inputs["text"] = torch.tensor(2.0)
    chain.memo.invalidate({"text"})
    assert chain.values() == {"refined": 5.0, "cos": 11.0}


def test_after_a_stop_what_is_complete_is_not_computed_again() -> None:
    chain = Chain(kept=("b", "refined", "cos"))
    chain.stop_after_two = True
    with pytest.raises(Interrupted):
        chain.values()
    chain.ran.clear()
    assert chain.values() == {"b": 3.0, "refined": 4.0, "cos": 11.0}
    assert chain.ran == ["cos", "refined"]


def test_release_frees_and_only_kept_values_are_held() -> None:
    chain = Chain()
    chain.values()
    assert chain.memo.nbytes == 2 * 4
    chain.memo.release()
    assert chain.memo.nbytes == 0
    chain.values()
    assert chain.stats.request_misses == 2


def test_without_request_calls_nothing_is_counted() -> None:
    stats = Stats()
    assert RequestMemo((), (), stats).values({}, lambda: None) == {}
    assert stats == Stats()
