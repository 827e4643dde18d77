from __future__ import annotations

import pytest
import torch

from h3compile.errors import Interrupted
from h3compile.runtime.executors import Executor
from h3compile.runtime.fold import ScheduleCall, fold
from h3compile.runtime.timesteps import to_bits

CPU = torch.device("cpu")
TIMES = (0.0, 0.1, 0.25, 0.5, 0.999, 1.0)


def test_exact_each_t_has_the_bits_of_being_evaluated_alone(kit) -> None:
    weights = kit.weights()
    together = dict(kit.fold(weights, to_bits(TIMES)))
    for index, t in enumerate(TIMES):
        alone = dict(kit.fold(weights, to_bits([t])))
        for call, values in alone.items():
            for name, value in values.items():
                assert torch.equal(together[call][name][index], value[0]), (call, name, t)


def test_it_yields_only_tables_with_the_timesteps_leading(kit) -> None:
    shapes = {
        call: {name: tuple(value.shape) for name, value in values.items()}
        for call, values in kit.fold(kit.weights(), to_bits(TIMES))
    }
    assert shapes == {
        "schedule.0": {"out": (6, 1, 8)},
        "mod.0": {"table_0": (6, 3, 16)},
        "mod.1": {"table_1": (6, 3, 16)},
    }


def test_one_call_is_loaded_at_a_time_and_only_when_it_is_its_turn(kit) -> None:
    asked: list[str] = []
    weights = kit.weights()

    def load(call: str) -> list[torch.Tensor]:
        asked.append(call)
        return list(weights[call].values())

    stream = fold(
        kit.schedule_calls(),
        to_bits(TIMES),
        timestep="timestep",
        dtype=torch.float32,
        tables=kit.tables,
        weights=load,
        device=CPU,
    )
    assert asked == []
    assert next(stream)[0] == "schedule.0" and asked == ["schedule.0"]
    assert next(stream)[0] == "mod.0" and asked == ["schedule.0", "mod.0"]


def test_a_stop_between_two_evaluations_ends_it(kit) -> None:
    def check() -> None:
        raise Interrupted("stop")

    stream = fold(
        kit.schedule_calls(),
        to_bits(TIMES),
        timestep="timestep",
        dtype=torch.float32,
        tables=kit.tables,
        weights=lambda call: list(kit.weights()[call].values()),
        device=CPU,
        check=check,
    )
    with pytest.raises(Interrupted):
        next(stream)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_exact_the_process_s_precision_settings_do_not_reach_a_table(precision: str) -> None:
    weight = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))

    def run(arguments):
        t, w = arguments
        return (torch.nn.functional.linear(t[:, None].expand(1, 256).sin(), w),)

    def evaluate() -> torch.Tensor:
        call = ScheduleCall("a.0", ("t",), ("v",), Executor("a", run))
        ((_, values),) = fold(
            [call],
            to_bits([0.3]),
            timestep="t",
            dtype=torch.float32,
            tables=["v"],
            weights=lambda _: [weight],
            device=CPU,
        )
        return values["v"]

    expected = evaluate()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(evaluate(), expected)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
