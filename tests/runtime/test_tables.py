from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from h3compile.engine.manifest import PortRecord
from h3compile.errors import EngineError, H3CompileError, Interrupted
from h3compile.runtime.groups import group_tables
from h3compile.runtime.pinned import HostMemory
from h3compile.runtime.stats import Stats
from h3compile.runtime.tables import MANY_TIMESTEPS, ModulationTables, RowStream
from h3compile.runtime.timesteps import to_bits

CPU = torch.device("cpu")
TIMESTEP = PortRecord(name="timestep", dtype="float32", shape=("timesteps",))
PORTS = (
    PortRecord(name="out", dtype="float32", shape=("timesteps", 8)),
    PortRecord(name="table_0", dtype="float32", shape=("3*timesteps", 16)),
    PortRecord(name="table_1", dtype="float32", shape=("3*timesteps", 16)),
)
ENTRY = (8 + 2 * 3 * 16) * 4  # bytes of one timestep


class Cold:
    """Counts how often the cold weights are read."""

    def __init__(self, weights) -> None:
        self.weights = weights
        self.read: list[str] = []

    @contextmanager
    def __call__(self) -> Iterator[Callable[[str], Sequence[torch.Tensor]]]:
        def load(call: str) -> list[torch.Tensor]:
            self.read.append(call)
            return list(self.weights[call].values())

        yield load


@pytest.fixture
def make(kit):
    def make(folded: Sequence[float] = (), budget: int = 10**6, tables=None, on_host: Sequence[str] = ()):
        cold, stats = Cold(kit.weights()), Stats()
        keys = to_bits(folded)
        return (
            ModulationTables(
                kit.schedule_calls(),
                TIMESTEP,
                group_tables(PORTS, "timesteps", on_host),
                cold=cold,
                device=CPU,
                stats=stats,
                folded=(keys, kit.fold(kit.weights(), keys) if tables is None else tables),
                budget=budget,
                host=HostMemory(CPU, limit=10**6),
            ),
            cold,
            stats,
        )

    return make


def expected(kit, timesteps: Sequence[float]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for _, values in kit.fold(kit.weights(), to_bits(timesteps)):
        found |= {name: value.flatten(0, 1) for name, value in values.items()}
    return found


def assert_equal(left, right) -> None:
    assert set(left) == set(right)
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("timesteps", [(0.3,), (0.0, 0.25), (0.5, 0.25, 0.1, 1.0), (0.2, 0.2)])
@pytest.mark.parametrize("folded", [(), (0.0, 0.25, 0.5)])
def test_exact_rows_are_those_of_each_t_alone_folded_or_not(kit, make, timesteps, folded) -> None:
    rows = make(folded)[0].rows(timesteps)
    assert_equal(rows, expected(kit, timesteps))
    assert all(value.is_contiguous() for value in rows.values())


def test_values_of_one_shape_share_one_buffer(make) -> None:
    rows = make()[0].rows((0.1, 0.2))
    first, second = rows["table_0"], rows["table_1"]
    assert second.data_ptr() - first.data_ptr() == first.nbytes
    assert rows["out"].untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


def test_a_timestep_is_evaluated_once_and_all_new_ones_in_one_pass(make) -> None:
    tables, cold, stats = make(folded=(0.0,))
    tables.rows((0.0, 0.5, 0.7))
    assert cold.read == ["schedule.0", "mod.0", "mod.1"]
    tables.rows((0.5, 0.7))
    tables.rows((0.0, 0.7))
    assert len(cold.read) == 3
    assert (stats.table_misses, stats.table_hits) == (2, 5)


def test_minus_zero_is_the_row_of_zero(kit, make) -> None:
    tables, cold, _ = make(folded=(0.0,))
    assert_equal(tables.rows((-0.0,)), expected(kit, (0.0,)))
    assert cold.read == []


def test_the_budget_bounds_what_is_kept_and_folded_rows_stay(make) -> None:
    tables, cold, _ = make(folded=(0.0, 1.0), budget=2 * ENTRY)
    for t in (0.1, 0.2, 0.3):
        tables.rows((t,))
    assert tables.nbytes == (2 + 2) * ENTRY
    reads = len(cold.read)
    tables.rows((0.0, 1.0, 0.2, 0.3))
    assert len(cold.read) == reads
    tables.rows((0.1,))  # the least recently used had to leave
    assert len(cold.read) == reads + 3


def test_the_least_recently_used_leaves_first(make) -> None:
    tables, cold, _ = make(budget=2 * ENTRY)
    for t in (0.1, 0.2, 0.1, 0.3):
        tables.rows((t,))
    reads = len(cold.read)
    tables.rows((0.1,))
    assert len(cold.read) == reads


def test_the_tables_of_two_steps_never_exist_together(make) -> None:
    tables, _, _ = make()
    tables.rows((0.1, 0.2))
    held: list[int] = []
    tables.rows((0.3, 0.4), lambda: held.append(tables.nbytes))
    assert set(held) == {2 * ENTRY}


def test_a_step_larger_than_the_budget_still_runs(kit, make) -> None:
    tables, _, _ = make(budget=0)
    assert_equal(tables.rows((0.1, 0.2)), expected(kit, (0.1, 0.2)))
    tables.release()
    tables.rows((0.3,))
    assert tables.nbytes == ENTRY


def test_an_interrupted_evaluation_leaves_nothing_half_done(kit, make) -> None:
    tables, cold, _ = make()

    def stop() -> None:
        if cold.read[-1:] == ["mod.1"]:
            raise Interrupted("stop")

    with pytest.raises(Interrupted):
        tables.rows((0.1, 0.2), stop)
    assert tables.nbytes == 0
    assert_equal(tables.rows((0.1, 0.2)), expected(kit, (0.1, 0.2)))


def test_prepare_evaluates_a_schedule_in_one_pass(make) -> None:
    tables, cold, stats = make(folded=(0.0,))
    tables.prepare((0.0, 0.1, 0.2, 0.3))
    tables.rows((0.1, 0.3))
    assert len(cold.read) == 3 and stats.table_misses == 3


def test_prepare_refuses_what_does_not_fit(make) -> None:
    tables, cold, _ = make(budget=2 * ENTRY)
    with pytest.raises(H3CompileError, match=r"tables of 3 new timesteps take .* GiB, the budget is"):
        tables.prepare((0.1, 0.2, 0.3))
    assert cold.read == []


def test_many_timesteps_come_call_by_call_and_are_not_kept(kit, make) -> None:
    timesteps = [i / 40 for i in range(MANY_TIMESTEPS + 1)] * 2
    tables, cold, _ = make(folded=(0.0,))
    stream = tables.select(timesteps, lambda: None)
    assert isinstance(stream, RowStream)
    wanted = expected(kit, timesteps)
    assert cold.read == []
    assert torch.equal(stream["table_0"], wanted["table_0"])
    assert cold.read == ["schedule.0", "mod.0"]
    assert torch.equal(stream["out"], wanted["out"])  # was produced on the way
    assert torch.equal(stream["table_1"], wanted["table_1"])
    with pytest.raises(KeyError):
        stream["table_1"]
    assert tables.nbytes == ENTRY


def test_few_timesteps_are_selected_from_the_tables(make) -> None:
    rows = make()[0].select([0.5] * MANY_TIMESTEPS, lambda: None)
    assert isinstance(rows, dict)


def test_tables_that_lack_a_call_are_refused(kit, make) -> None:
    lacking = list(kit.fold(kit.weights(), to_bits((0.5,))))[:-1]
    with pytest.raises(EngineError, match="the tables of table_1 are missing"):
        make((0.5,), tables=lacking)


def test_tables_of_another_shape_are_refused(kit, make) -> None:
    other = [
        (call, {n: v[:, :1] for n, v in values.items()}) for call, values in kit.fold(kit.weights(), [0])
    ]
    with pytest.raises(EngineError, match=r"table table_0 of mod.0 does not fit the program"):
        make((0.0,), tables=other)


@pytest.mark.parametrize("timesteps", [(0.0,), (0.25, 0.3), (0.3, 0.0, 0.7)])
def test_exact_rows_of_which_some_lie_on_the_host(kit, make, timesteps) -> None:
    tables, _, _ = make((0.0, 0.25), on_host=("table_1",))
    assert_equal(tables.rows(timesteps), expected(kit, timesteps))
    row, entries = 3 * 16 * 4, 2 + len(set(timesteps) - {0.0, 0.25})
    assert tables.host_nbytes == entries * row
    assembled = ENTRY if len(timesteps) > 1 else row  # of one timestep the others lie there already
    assert tables.nbytes == entries * (ENTRY - row) + len(timesteps) * assembled
    tables.release()
    assert tables.nbytes == entries * (ENTRY - row)
    assert_equal(tables.rows(timesteps), expected(kit, timesteps))


@pytest.mark.parametrize("shape", [(8,), ("rows", 8), ("timesteps+1", 8), (8, "timesteps"), ()])
def test_a_value_that_is_not_row_by_row_is_no_table(shape: tuple[int | str, ...]) -> None:
    with pytest.raises(EngineError, match="table a "):
        group_tables([PortRecord(name="a", dtype="float32", shape=shape)], "timesteps")
