"""Values of a step in one piece of memory: placed by a rehearsal, equal bits, nothing left behind."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import pytest
import torch

from h3compile.engine.manifest import PortRecord
from h3compile.ops.memory import empty
from h3compile.runtime.arena import Arena, StepMemory
from h3compile.runtime.executors import Executor
from h3compile.runtime.runner import BoundCall, Runner
from h3compile.runtime.stats import Stats

CPU = torch.device("cpu")
WIDTHS = (64, 384, 128, 640)


def block(arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Several widths in turn, a view that outlives its base's name, and the last use of the input."""
    x, table, weight = arguments
    arguments.clear()
    values = x
    for width in WIDTHS:
        made = empty(values, (x.shape[0], width))
        if made.device.type != "meta":
            made.copy_(values.repeat(1, width)[:, :width] * weight)
        half = made[:, : width // 2]
        del made
        values = empty(half, (x.shape[0], width // 2))
        if values.device.type != "meta":
            values.copy_(half + 1)
        del half
    out = empty(values, x.shape)
    if out.device.type != "meta":
        out.copy_(values[:, : x.shape[1]] + x + table)
    return (out,)


def other(arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """A variant that takes memory otherwise."""
    x = arguments[0]
    out = empty(x, x.shape)
    if out.device.type != "meta":
        out.copy_(x * 2)
    return (out,)


def broken(arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    if arguments[0].device.type == "meta":
        raise NotImplementedError("no meta form")
    return block(arguments)


def runner(run=block, *, rehearsed: bool = False) -> Runner:
    weight = torch.full((1,), 0.5, device="meta" if rehearsed else "cpu")
    names = [f"x{i}" for i in range(7)]
    calls = [
        BoundCall(f"block.{i}", "block", (names[i], "t"), (names[i + 1],), Executor("block", run), (weight,))
        for i in range(6)
    ]
    return Runner(calls, ["x6"], CPU, variants={"block.other": Executor("block.other", other)})


TABLE = PortRecord(name="t", dtype="float32", shape=("m", 16))


def step_memory(run=block, stats: Stats | None = None) -> StepMemory:
    return StepMemory(runner(run, rehearsed=True), [TABLE], CPU, stats or Stats())


def forward(
    memory: StepMemory | None, rows: int, stand_ins: Mapping[str, str] | None = None, run=block
) -> torch.Tensor:
    given = {"x0": torch.arange(rows * 16, dtype=torch.float32).view(rows, 16)}
    source = {"t": torch.full((1, 16), 0.25)}
    options = {"stand_ins": stand_ins or {}}
    if memory is None:
        return runner(run).run(given, source, lambda: None, **options)[0]
    with memory.step(given, {"m": 1}, options["stand_ins"]):
        return runner(run).run(given, source, lambda: None, **options)[0]


@pytest.mark.parametrize("rows", [1, 7, 130])
def test_equal_bits_in_a_fraction_of_the_memory(rows: int) -> None:
    stats = Stats()
    memory = step_memory(stats=stats)
    expected = forward(None, rows)
    for _ in range(2):
        assert torch.equal(forward(memory, rows), expected)
    # The residual stream, the widest value with what it is made of and what is made of it; not one of each.
    most = rows * 4 * (2 * 16 + WIDTHS[-2] // 2 + WIDTHS[-1] + WIDTHS[-1] // 2)
    assert rows * 4 * WIDTHS[-1] < stats.bytes_activations <= most + 6 * 512


def test_what_is_freed_is_written_over_and_what_lives_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place is filled with NaN when it is given: a value still needed would show it."""
    take = Arena.empty

    def poisoned(self: Arena, *arguments: object) -> torch.Tensor:
        return take(self, *arguments).fill_(float("nan"))  # type: ignore[arg-type]

    expected = forward(None, 33)
    monkeypatch.setattr(Arena, "empty", poisoned)
    assert torch.equal(forward(step_memory(), 33), expected)


def test_outputs_outlive_the_step_and_hold_only_themselves() -> None:
    memory = step_memory()
    first = forward(memory, 9)
    kept = first.clone()
    forward(memory, 9)
    assert torch.equal(first, kept)
    assert first.untyped_storage().nbytes() == first.nbytes


def test_a_variant_and_other_lengths_are_rehearsed_for_themselves() -> None:
    memory = step_memory()
    for rows, stand_ins in [(5, None), (6, None), (5, {"block": "block.other"}), (5, None)]:
        assert torch.equal(forward(memory, rows, stand_ins), forward(None, rows, stand_ins))
    assert len(memory._found) == 3
    for rows in range(1, 30):
        forward(memory, rows)
    assert len(memory._found) == 8


def test_a_step_that_asks_otherwise_than_its_rehearsal_is_an_error() -> None:
    memory = step_memory()
    given = {"x0": torch.zeros(5, 16)}
    with (
        pytest.raises(RuntimeError, match="allocation 0 of a step has 96 bytes"),
        memory.step(given, {"m": 1}, {}),
    ):
        empty(given["x0"], (24,))


def test_what_cannot_be_rehearsed_runs_and_says_what_it_takes() -> None:
    memory = step_memory(broken)
    with pytest.warns(UserWarning, match=r"cannot be placed before it runs \(no meta form\).*half as much"):
        first = forward(memory, 5, run=broken)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once for these lengths
        assert torch.equal(forward(memory, 5, run=broken), first)
    assert torch.equal(first, forward(None, 5))


def test_a_step_that_fails_gives_its_memory_back() -> None:
    memory, given = step_memory(), {"x0": torch.zeros(5, 16)}
    with pytest.raises(KeyError), memory.step(given, {"m": 1}, {}):
        raise KeyError
    assert torch.equal(forward(memory, 5), forward(None, 5))
