"""The toy streamed through slots that are poisoned as soon as they are free, against plain torch."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from h3compile.engine.layout import SlotSpec, lay_out
from h3compile.engine.manifest import PartitionRecord, PlanRecord
from h3compile.errors import BuildError, EngineError, H3CompileError, Interrupted
from h3compile.plan.races import check
from h3compile.plan.schedule import Compute, Copy, Operation, Record
from h3compile.runtime.load import load
from h3compile.runtime.module import CompiledTransformer
from h3compile.runtime.reader import Reader
from h3compile.runtime.runner import Runner
from h3compile.runtime.streamer import Streamer
from h3compile.runtime.tables import MANY_TIMESTEPS, ModulationTables

BLOCKS = ("block.0", "block.1")
# Resident blocks and slots: every plan of two blocks, and slots that outnumber what is streamed.
PLANS = [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 0), (("block.1",), 1)]
ROWS = [(5, 3, 2), (1, 1, 1), (34, 6, 1), (7, 2, 19)]
TIMES = [(0.0,), (0.25, 0.5), (0.1, 0.3, 0.5, 1.0), (0.7,)]


def streamer(module: CompiledTransformer) -> Streamer:
    found = module._parts.streamer
    assert found is not None
    return found


def watched(module: CompiledTransformer) -> list[Operation]:
    """The operations as they are executed; a slot that is free is overwritten at once."""
    found: list[Operation] = []

    def observe(operation: Operation) -> None:
        found.append(operation)
        if isinstance(operation, Record) and operation.event.startswith("free/"):
            streamer(module)._slots[int(operation.event.removeprefix("free/"))].fill_(0xFF)

    streamer(module).observe = observe
    return found


def sizes(module: CompiledTransformer) -> dict[str, int]:
    ranges = module.manifest.partitions[module.partition].ranges
    return {name: record.nbytes for name, record in ranges.items()}


def assert_no_race(module: CompiledTransformer, operations: list[Operation]) -> None:
    found, size = module.residency, sizes(module)
    assert found is not None and operations
    limit = streamer(module).slot_bytes + sum(size[name] for name in found.resident)
    assert [str(race) for race in check(operations, found, size, limit)] == []


def assert_same(found, expected) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "h3compile-reader"]


@pytest.mark.parametrize(("resident", "slots"), PLANS)
def test_exact_whatever_the_plan_and_no_race(kit, engine: Path, resident, slots: int) -> None:
    module = load(engine, resident=resident, slots=slots)
    operations = watched(module)
    # M goes 1, 2, 4, 1 for each of the sizes: request after request, steps between them.
    for rows in ROWS:
        for timesteps in TIMES:
            given = kit.inputs(*rows, timesteps=timesteps)
            assert_same(module(**given), kit.reference(kit.weights(0), given))
    assert_no_race(module, operations)
    assert threads() == []


def test_a_resident_is_copied_once_and_never_again(kit, engine: Path) -> None:
    module = load(engine, resident=("block.1",), slots=1)
    operations = watched(module)
    for _ in range(3):
        module(**kit.inputs())
    copies = [(op.call, op.slot) for op in operations if isinstance(op, Copy)]
    assert copies.count(("block.1", None)) == 1
    assert [slot for call, slot in copies if call == "block.0"] == [0] * 4  # the next forward's is on its way
    assert not any(call in ("embed.0", "head.0") for call, _ in copies)


def test_exact_between_two_requests_and_after_a_new_prompt(kit, engine: Path) -> None:
    module = load(engine, resident=0, slots=2)
    operations = watched(module)
    one, other = kit.inputs(5, 3, 2, seed=1), kit.inputs(7, 2, 4, seed=2)
    for given in (one, other, one, one, other):
        assert_same(module(**given), kit.reference(kit.weights(0), given))
    one["position_ids"] = torch.rand_like(one["position_ids"])  # the angles alone are computed anew
    assert_same(module(**one), kit.reference(kit.weights(0), one))
    module.release()
    assert_same(module(**one), kit.reference(kit.weights(0), one))
    assert_no_race(module, operations)


def test_exact_when_a_timestep_is_new_and_when_every_row_has_its_own(kit, engine: Path) -> None:
    module = load(engine, resident=1, slots=1)
    watched(module)
    for timesteps in ((0.25, 0.9), (0.25, 0.5), (0.9,), [i / 50 for i in range(50)], (0.31, 0.9)):
        given = kit.inputs(40, 6, 4, timesteps=timesteps)
        assert_same(module(**given), kit.reference(kit.weights(0), given))
    assert len(timesteps) < MANY_TIMESTEPS < 50 and module.stats.table_misses > 50


def test_exact_with_strided_weights(kit, tmp_path: Path) -> None:
    class Strided(kit.Toy):
        """Its blocks' weights are stored column by column, as an FP8 GEMM wants them."""

        def _partition(self, writer, name, weights) -> PartitionRecord:
            found = super()._partition(writer, name, weights)
            for call in BLOCKS:
                specs = [SlotSpec("weight", (8, 8), torch.float32, strides=(1, 8))]
                record = writer.write_range(
                    lay_out(specs), iter(weights[call].items()), f"weights/strided/{call}.safetensors"
                )
                found.ranges[call] = record
            return found

    path = Strided().write(tmp_path / "a.h3e")
    module = load(path, resident=1, slots=1)
    operations = watched(module)
    for _ in range(2):
        given = kit.inputs()
        assert_same(module(**given), load(path)(**given))
        for one, other in zip(module(**given), kit.reference(kit.weights(), given), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    views = streamer(module)._views
    assert {tuple(found[0].stride()) for (_, call), found in views.items() if call in BLOCKS} == {(1, 8)}
    assert_no_race(module, operations)


def test_exact_with_variants_that_share_the_weights(kit, varied: Path) -> None:
    module = load(varied, resident=0, slots=1)
    watched(module)
    for rows, timesteps, sign in (
        ((5, 3, 2), (0.5,), 1.0),
        ((5, 3, 2), (0.05,), -1.0),
        ((1, 1, 1), (0.5,), -1.0),
    ):
        given = kit.inputs(*rows, timesteps=timesteps)
        assert_same(module(**given), kit.reference(kit.weights(0), given, sign=sign))
    assert len(module.measured()) == 1


# --- what is held ---


def test_stats_tell_slots_residents_tables_and_host_apart(kit, engine: Path) -> None:
    whole = load(engine).stats
    module = load(engine, resident=("block.1",), slots=3)
    module(**kit.inputs())
    size, stats = sizes(module), module.stats
    carried = ("project.0", "refine.0", "refine.1", "angles.0")
    largest = max(size[name] for name in (*carried, "block.0"))
    assert stats.bytes_slots == 3 * largest
    assert stats.bytes_weights == size["embed.0"] + size["head.0"] + size["block.1"]
    # Three timesteps are folded; of block.0 they lie on the host, and a step brings its two to the device.
    table, row = 3 * 3 * 16 * 4, 3 * 16 * 4
    assert stats.bytes_host == sum(size[name] for name in (*carried, "block.0")) + table
    assert stats.bytes_tables == whole.bytes_tables - table + 2 * (2 * row + 8 * 4)
    assert stats.bytes_copied >= sum(size[name] for name in (*carried, *BLOCKS))
    assert stats.bytes_resident == (
        stats.bytes_weights + stats.bytes_slots + stats.bytes_tables + stats.bytes_request
    )
    assert "1 of 2 blocks resident, the others in 3 slots, local" in repr(module)


def test_a_built_plan_is_the_one_that_runs_and_a_load_may_ask_for_another(kit, tmp_path: Path) -> None:
    plan = PlanRecord(blocks=BLOCKS, resident=("block.0",), slots=1)
    path = kit.Toy(changes={"plan": plan}).write(tmp_path / "a.h3e")
    built, other, more = load(path), load(path, resident=0), load(path, slots=2)
    assert built.residency is not None and built.residency.resident == ("block.0",)
    assert other.residency is not None and (other.residency.resident, other.residency.slots) == ((), 1)
    assert more.residency is not None and (more.residency.resident, more.residency.slots) == (("block.0",), 2)
    given = kit.inputs()
    for module in (built, other, more):
        assert_same(module(**given), kit.reference(kit.weights(), given))
    assert load(kit.Toy().write(tmp_path / "b.h3e")).residency is None


def test_two_engines_share_host_ranges_and_residents(kit, engine: Path) -> None:
    one = load(engine, resident=("block.1",), slots=1)
    other = load(engine, resident=("block.1",), slots=1, share=one)
    given = kit.inputs()
    for module in (one, other, one):
        watched(module)
        assert_same(module(**given), kit.reference(kit.weights(0), given))
    places = [module._parts.weights.place("block.1") for module in (one, other)]
    assert places[0] is places[1]
    reads = [streamer(module).reader.get("block.0", lambda: None).data_ptr() for module in (one, other)]
    assert reads[0] == reads[1]
    # One that streams nothing finds the place that another has not filled yet, and fills it.
    late = load(engine, resident=("block.1",), slots=1)
    whole = load(engine, share=late)
    for module in (whole, late):
        assert_same(module(**given), kit.reference(kit.weights(0), given))


def test_two_engines_in_two_threads(kit, engine: Path) -> None:
    modules = [load(engine, resident=0, slots=1)]
    modules.append(load(engine, resident=1, slots=2, share=modules[0]))
    given = [kit.inputs(*rows, seed=i) for i, rows in enumerate(ROWS)]
    wrong: list[int] = []

    def run(module: CompiledTransformer) -> None:
        for i in (*range(len(given)), *range(len(given))):
            for found, expected in zip(
                module(**given[i]), kit.reference(kit.weights(0), given[i]), strict=True
            ):
                if not torch.equal(found, expected):
                    wrong.append(i)

    pool = [threading.Thread(target=run, args=(module,)) for module in modules]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    assert wrong == []


# --- interruptions ---


def interrupt_at(
    module: CompiledTransformer, when: Callable[[Operation], bool], how: Callable[[], None]
) -> None:
    """Calls ``how`` once, right after the operation that ``when`` holds for was executed."""
    inner = streamer(module).observe

    def observe(operation: Operation) -> None:
        inner(operation)
        if when(operation):
            streamer(module).observe = inner
            how()

    streamer(module).observe = observe


def crash() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("resident", "slots"), PLANS[:5])
def test_exact_after_a_stop_or_a_crash_at_any_operation(kit, engine: Path, resident: int, slots: int) -> None:
    given = kit.inputs()
    probe = load(engine, resident=resident, slots=slots)
    operations = watched(probe)
    probe(**given)
    for place in range(len(operations)):
        module = load(engine, resident=resident, slots=slots)
        executed = watched(module)
        count = iter(range(len(operations)))
        interrupt_at(module, lambda operation, count=count, place=place: next(count) == place, crash)
        with pytest.raises(KeyboardInterrupt):
            module(**given)
        assert threads() == [] and module.stats.forwards == 0
        for _ in range(2):
            assert_same(module(**given), kit.reference(kit.weights(0), given))
        # What was executed before and after is one sequence for the device.
        assert_no_race(module, executed)


def test_stop_ends_the_forward_before_its_next_call(kit, engine: Path) -> None:
    module = load(engine, resident=0, slots=2)
    operations = watched(module)
    interrupt_at(module, lambda op: isinstance(op, Compute) and op.call == "embed.0", module.stop)
    with pytest.raises(Interrupted, match="the forward was stopped"):
        module(**kit.inputs())
    assert [op.call for op in operations if isinstance(op, Compute)][-1] == "embed.0"
    assert_same(module(**kit.inputs()), kit.reference(kit.weights(0), kit.inputs()))
    assert_no_race(module, operations)


@pytest.fixture
def gated(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str], tuple[threading.Event, threading.Event]]]:
    """A function from a range to events: its reading was reached, and may go on."""
    from h3compile.engine.loader import EngineFolder

    whole = EngineFolder.load_range
    opened: list[threading.Event] = []

    def gate(name: str) -> tuple[threading.Event, threading.Event]:
        reached, go_on = threading.Event(), threading.Event()
        opened.append(go_on)

        def held(self, partition: str, asked: str, out: torch.Tensor | None = None) -> torch.Tensor:
            if asked == name:
                reached.set()
                assert go_on.wait(10)
            return whole(self, partition, asked, out)

        monkeypatch.setattr(EngineFolder, "load_range", held)
        return reached, go_on

    yield gate
    for event in opened:
        event.set()


def test_loading_returns_before_the_blocks_are_read_and_the_forward_waits(kit, engine: Path, gated) -> None:
    reached, go_on = gated("block.1")
    module = load(engine, resident=("block.1",), slots=1)
    assert reached.wait(10) and streamer(module).reader.running
    threading.Timer(0.2, go_on.set).start()
    assert_same(module(**kit.inputs()), kit.reference(kit.weights(0), kit.inputs()))


def test_nothing_is_read_before_the_tables_are_there(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locking host memory keeps the driver from everything else: tables would come between two blocks."""
    seen: list[str] = []
    built, start = ModulationTables.__init__, Reader.start

    def init(self: ModulationTables, *args: object, **options: object) -> None:
        built(self, *args, **options)  # type: ignore[arg-type]
        seen.append("tables")

    def started(self: Reader) -> None:
        seen.append("reader")
        start(self)

    monkeypatch.setattr(ModulationTables, "__init__", init)
    monkeypatch.setattr(Reader, "start", started)
    load(engine, resident=0)
    assert seen == ["tables", "reader"]


@pytest.mark.parametrize("how", ["stop", "signal"])
def test_a_first_load_can_be_interrupted(kit, engine: Path, gated, how: str) -> None:
    reached, go_on = gated("block.1")
    module = load(engine, resident=1, slots=1)

    begun = threading.Event()
    streamer(module).observe = lambda operation: begun.set()

    def interrupt() -> None:
        # The forward runs, and ends up waiting for a range that is not read before this is done.
        assert reached.wait(10) and begun.wait(10)
        if how == "stop":
            module.stop()
        else:
            os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.1, go_on.set).start()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        with pytest.raises(Interrupted if how == "stop" else KeyboardInterrupt):
            module(**kit.inputs())
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()
    assert threads() == []
    assert_same(module(**kit.inputs()), kit.reference(kit.weights(0), kit.inputs()))


def test_a_module_that_is_let_go_in_its_first_load_leaves_no_thread(engine: Path, gated) -> None:
    reached, go_on = gated("block.0")
    module = load(engine, resident=0, slots=1)
    assert reached.wait(10)
    threading.Timer(0.1, go_on.set).start()
    del module
    gc.collect()
    assert threads() == []


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-8]), "is truncated|it has|not"),
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-8] + b"otherone"), "has changed since the engine"),
    ],
)
def test_a_range_damaged_after_the_checks_is_one_line_in_the_forward(
    kit, tmp_path: Path, gated, damage: Callable[[Path], None], line: str
) -> None:
    path = kit.Toy().write(tmp_path / "a.h3e")
    file = path / "weights/transformer/block.1.safetensors"
    whole, written = file.read_bytes(), file.stat().st_mtime_ns
    reached, go_on = gated("block.0")
    module = load(path, resident=0, slots=1)
    assert reached.wait(10)
    damage(file)
    go_on.set()
    for _ in range(2):
        with pytest.raises(EngineError, match=line) as refused:
            module(**kit.inputs())
        assert "block.1" in str(refused.value) and "\n" not in str(refused.value)
        assert threads() == []
    file.write_bytes(whole)
    os.utime(file, ns=(written, written))
    assert_same(module(**kit.inputs()), kit.reference(kit.weights(), kit.inputs()))


def test_out_of_memory_is_one_line_and_leaves_the_module_usable(
    kit, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load(engine, resident=1, slots=1)
    watched(module)
    run, full = Runner.run, [True]

    def refuse(*arguments: object) -> None:
        if full[0]:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    interrupt_at(module, lambda op: isinstance(op, Compute) and op.call == "block.0", refuse)
    with pytest.raises(H3CompileError) as refused:
        module(**kit.inputs())
    line = str(refused.value)
    assert line.startswith(
        "cpu ran out of memory in a forward of 10 rows: the engine needs 0.00 GiB of weights"
    )
    assert "of slots" in line and "load(path, resident=N)" in line and "\n" not in line
    assert refused.value.__context__ is None and Runner.run is run
    assert_same(module(**kit.inputs()), kit.reference(kit.weights(0), kit.inputs()))


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "kind", "line"),
    [
        ({"resident": 3}, BuildError, "resident=3 does not fit the 2 blocks there are"),
        ({"resident": -1}, BuildError, "resident=-1 does not fit the 2 blocks"),
        ({"resident": ("block.2",)}, BuildError, "no streamable block is called 'block.2'"),
        ({"resident": 1, "slots": 0}, BuildError, "1 blocks are streamed and there is no slot for them"),
        ({"resident": 2, "slots": 2}, BuildError, "every block is resident and slots=2 would stay empty"),
        ({"slots": 2}, H3CompileError, "slots are places for blocks that are streamed: say how many stay"),
        ({"resident": 0, "host_bytes": 100}, H3CompileError, "of host memory are needed and the budget is"),
    ],
)
def test_an_impossible_plan_is_refused(
    engine: Path, arguments: dict[str, object], kind: type[Exception], line: str
) -> None:
    with pytest.raises(kind, match=line):
        load(engine, **arguments)
    assert threads() == []


def test_a_plan_for_several_ranks_is_refused_by_name(kit, tmp_path: Path) -> None:
    plan = PlanRecord(blocks=BLOCKS, resident=(), slots=2, mode="allgather", pieces=2)
    path = kit.Toy(changes={"plan": plan}).write(tmp_path / "a.h3e")
    with pytest.raises(EngineError, match=r"gathers every block from several ranks \(mode=allgather\)"):
        load(path)
    module = load(path, resident=0)
    assert_same(module(**kit.inputs()), kit.reference(kit.weights(), kit.inputs()))


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        (
            PlanRecord(blocks=("block.0", "mod.1"), resident=(), slots=1),
            "plans for mod.1, a step call that it lacks",
        ),
        (
            PlanRecord(blocks=BLOCKS, resident=("block.7",), slots=1),
            "no streamable block is called 'block.7'",
        ),
        (PlanRecord(blocks=BLOCKS[::-1], resident=(), slots=1), "the residency is of another program"),
    ],
)
def test_a_plan_that_does_not_fit_its_engine_is_refused(
    kit, tmp_path: Path, plan: PlanRecord, line: str
) -> None:
    path = kit.Toy(changes={"plan": plan}).write(tmp_path / "a.h3e")
    with pytest.raises(H3CompileError, match=line):
        load(path)


def test_ranks_meet_with_the_same_blocks_on_the_device(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which blocks are gathered, and into how many slots, is part of what all ranks must agree on."""
    digests: list[str] = []

    def joined(parallel: object, device: object, digest: str, *rest: object) -> None:
        digests.append(digest)

    monkeypatch.setattr("h3compile.runtime.load.join", joined)
    plans: tuple[dict[str, Any], ...] = (
        {"resident": 1, "slots": 1},
        {"resident": ("block.1",), "slots": 1},
        {"resident": 1, "slots": 2},
        {},
    )
    for plan in plans:
        load(engine, **plan)
    assert len(set(digests)) == 4
    load(engine, **plans[0])
    assert digests[-1] == digests[0]
