"""Measures: what the steps of one request left, and never more than that."""

from __future__ import annotations

import pytest
import torch

from h3compile.runtime.measures import Measures

CPU = torch.device("cpu")


def step(measures: Measures, sigma: float, first: int = 0, **variants: str) -> None:
    with measures.step(sigma, variants) as record:
        record("b", torch.tensor([first + 1, 8], dtype=torch.int32))
        record("a", torch.tensor([first, 4], dtype=torch.int32))


def sigmas(measures: Measures) -> list[float]:
    return [step.sigma for step in measures.steps]


def test_steps_are_kept_in_order_with_what_ran() -> None:
    measures = Measures(["a", "b"], CPU)
    step(measures, 1.0, block="block.dense")
    step(measures, 0.5, 3)
    first, last = measures.steps
    assert (first.sigma, first.variants, last.sigma, last.variants) == (
        1.0,
        {"block": "block.dense"},
        0.5,
        {},
    )
    assert {name: value.tolist() for name, value in last.values.items()} == {"a": [3, 4], "b": [4, 8]}
    assert list(last.values) == ["a", "b"]
    assert measures.nbytes == 2 * 2 * 2 * 4


def test_a_step_that_is_no_less_noisy_begins_a_request() -> None:
    measures = Measures(["a", "b"], CPU)
    for sigma in (1.0, 0.9, 0.2, 1.0, 0.9, 0.9, 0.1):
        step(measures, sigma)
    assert sigmas(measures) == [0.9, 0.1]


def test_any_number_of_requests_holds_what_one_does() -> None:
    measures = Measures(["a", "b"], CPU)
    for _ in range(3):
        for i in range(5):
            step(measures, 1.0 - i / 5)
    assert len(measures.steps) == 5


def test_a_restart_forgets() -> None:
    measures = Measures(["a", "b"], CPU)
    step(measures, 1.0)
    held = measures.steps
    measures.restart()
    step(measures, 0.5)
    assert sigmas(measures) == [0.5]
    assert len(held) == 1, "what was asked for stays as it was"


def test_a_step_that_fails_leaves_nothing_and_may_be_taken_again() -> None:
    measures = Measures(["a", "b"], CPU)
    step(measures, 1.0)
    with pytest.raises(KeyboardInterrupt), measures.step(0.5, {}) as record:
        record("a", torch.zeros(2, dtype=torch.int32))
        raise KeyboardInterrupt
    assert sigmas(measures) == [1.0]
    step(measures, 0.5)
    assert sigmas(measures) == [1.0, 0.5]


def test_a_value_is_copied_out_of_what_it_lies_in() -> None:
    workspace = torch.arange(1024, dtype=torch.int32)
    measures = Measures(["a"], CPU)
    with measures.step(1.0, {}) as record:
        record("a", workspace[:2])
    workspace.zero_()
    value = measures.steps[0].values["a"]
    assert value.tolist() == [0, 1]
    assert value.untyped_storage().nbytes() == 8


def test_without_names_nothing_is_kept() -> None:
    measures = Measures([], CPU)
    with measures.step(1.0, {"block": "block.dense"}):
        pass
    assert measures.steps == () and measures.nbytes == 0
