from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from h3compile.errors import Interrupted
from h3compile.runtime.executors import Executor
from h3compile.runtime.runner import BoundCall, Runner, last_reads

CPU = torch.device("cpu")


def call(name: str, inputs: str, outputs: str, run=None) -> BoundCall:
    def add(arguments):
        return tuple(sum(arguments) + i for i in range(len(outputs.split())))

    executor = Executor(name, run or add)
    return BoundCall(name, name, tuple(inputs.split()), tuple(outputs.split()), executor, ())


def test_calls_run_in_order_and_outputs_come_back() -> None:
    runner = Runner([call("f", "x", "a b"), call("g", "a b", "c")], ["c", "a"], CPU)
    assert [float(v) for v in runner.run({"x": torch.tensor(1.0)}, {}, lambda: None)] == [3.0, 1.0]


def test_every_value_dies_with_its_last_reader() -> None:
    calls = [call("f", "x", "a"), call("g", "a x", "b"), call("h", "b", "c")]
    assert [set(names) for names in last_reads(calls, ["c"])] == [set(), {"a", "x"}, {"b"}]
    assert [set(names) for names in last_reads(calls, ["c", "a"])] == [set(), {"x"}, {"b"}]


def test_a_value_is_freed_before_the_next_call_begins() -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[list[bool]] = []

    def run(arguments):
        alive.append([ref() is not None for ref in made])
        result, unread = arguments[0] + 1, arguments[0] + 2
        made.extend((weakref.ref(result), weakref.ref(unread)))
        return result, unread

    calls = [call(str(i), f"v{i}", f"v{i + 1} u{i}", run) for i in range(3)]
    Runner(calls, ["v3"], CPU).run({"v0": torch.tensor(0.0)}, {}, lambda: None)
    assert alive == [[], [True, False], [False, False, True, False]]


def test_what_no_call_makes_is_asked_of_the_source_once() -> None:
    asked: list[str] = []

    class Source:
        def __getitem__(self, name: str) -> torch.Tensor:
            asked.append(name)
            return torch.tensor(10.0)

    runner = Runner([call("f", "x t", "a"), call("g", "a t", "b")], ["b"], CPU)
    assert runner.run({"x": torch.tensor(1.0)}, Source(), lambda: None)[0] == 21.0
    assert asked == ["t"]


def test_a_stop_is_obeyed_between_two_calls() -> None:
    ran: list[str] = []

    def run(arguments):
        ran.append("f")
        return (arguments[0],)

    def check() -> None:
        if len(ran) == 2:
            raise Interrupted("stop")

    runner = Runner([call(str(i), f"v{i}", f"v{i + 1}", run) for i in range(5)], ["v5"], CPU)
    with pytest.raises(Interrupted):
        runner.run({"v0": torch.tensor(0.0)}, {}, check)
    assert len(ran) == 2


def test_a_stand_in_serves_all_calls_of_its_region_in_one_run() -> None:
    def twice(arguments):
        return (arguments[0] * 2,)

    base = call("f", "x", "a")
    calls = [base, replace(base, name="f.1", inputs=("a",), outputs=("b",)), call("g", "b", "c")]
    runner = Runner(calls, ["c"], CPU, variants={"f.twice": Executor("f.twice", twice)})

    def run(**stand_ins: str) -> float:
        return float(runner.run({"x": torch.tensor(3.0)}, {}, lambda: None, stand_ins=stand_ins)[0])

    assert (run(), run(f="f.twice"), run()) == (3.0, 12.0, 3.0)


def test_measures_are_recorded_when_they_are_made_and_not_held() -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    recorded: list[tuple[str, float, int]] = []

    def run(arguments):
        assert all(ref() is None for ref in made)
        count = arguments[0] * 10
        made.append(weakref.ref(count))
        return arguments[0] + 1, count

    calls = [call(str(i), f"v{i}", f"v{i + 1} n{i}", run) for i in range(3)]
    Runner(calls, ["v3"], CPU, measures=["n0", "n2"]).run(
        {"v0": torch.tensor(1.0)},
        {},
        lambda: None,
        record=lambda name, value: recorded.append((name, float(value), len(made))),
    )
    assert recorded == [("n0", 10.0, 1), ("n2", 30.0, 3)]
