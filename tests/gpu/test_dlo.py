"""Streaming on a CUDA device: equal bits, copies behind the arithmetic, memory as planned."""

from __future__ import annotations

import ctypes
import gc
import itertools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import h3compile
from h3compile.errors import H3CompileError
from h3compile.plan.races import check
from h3compile.plan.schedule import Compute, Copy, Operation, Record
from h3compile.runtime import pinned
from h3compile.runtime.lanes import CudaLanes
from h3compile.runtime.module import CompiledTransformer
from h3compile.runtime.pinned import HostBuffer, HostMemory
from h3compile.runtime.streamer import Streamer

pytestmark = pytest.mark.gpu

Inputs = dict[str, torch.Tensor]
Observe = Callable[[Operation], None]
KINDS = {"exact": ("eager", "-fuse"), "inductor": ("inductor", ""), "fp8": ("inductor", "fp8")}
PLANS = [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 2), (3, 1), (4, 0)]


@pytest.fixture(scope="module")
def engine(
    checkpoints: Callable[[torch.dtype], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A function from kind to an engine of four blocks, built on and for this GPU."""
    built: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in built:
            backend, passes = KINDS[kind]
            built[kind] = tmp_path_factory.mktemp("dlo") / f"{kind}.h3e"
            h3compile.build(
                str(checkpoints(torch.bfloat16)),
                passes=passes,
                backend=backend,
                steps=(4,),
                output=built[kind],
            )
        return built[kind]

    return of


@pytest.fixture(scope="module")
def forwards(requests_of: Callable[..., Iterator[Inputs]]) -> list[Inputs]:
    """All tasks, M from 1 to 3, and the first request once more."""
    found = [
        {name: value.cuda() for name, value in inputs.items()}
        for task in ("t2va", "fl2va", "ref2va")
        for inputs in itertools.islice(requests_of(task, torch.bfloat16), 3)
    ]
    return [*found, found[0]]


def streamer(module: CompiledTransformer) -> Streamer:
    found = module._parts.streamer
    assert found is not None
    return found


def copies(module: CompiledTransformer) -> torch.cuda.Stream:
    lanes = streamer(module)._lanes
    assert isinstance(lanes, CudaLanes)
    return lanes._copies


@pytest.fixture(scope="module")
def cycles_of_a_millisecond() -> int:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    begun.record()
    torch.cuda._sleep(20_000_000)
    ended.record()
    torch.cuda.synchronize()
    return int(20_000_000 / begun.elapsed_time(ended))


def outputs(module: CompiledTransformer, requests: list[Inputs]) -> list[list[torch.Tensor]]:
    return [list(module(**inputs)) for inputs in requests]


def equal(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("kind", list(KINDS))
def test_exact_every_count_of_residents_and_slots(engine, forwards, kind: str) -> None:
    expected = outputs(h3compile.load(engine(kind)), forwards)
    for resident, slots in PLANS:
        module = h3compile.load(engine(kind), resident=resident, slots=slots)
        executed: list[Operation] = []
        streamer(module).observe = executed.append
        assert equal(outputs(module, forwards), expected), (resident, slots)
        assert module.residency is not None
        ranges = module.manifest.partitions["transformer"].ranges
        sizes = {name: record.nbytes for name, record in ranges.items()}
        assert [str(race) for race in check(executed, module.residency, sizes)] == []


def late_copies(module: CompiledTransformer, cycles: int) -> Observe:
    """Copies begin long after they were enqueued; a slot holds nonsense until they are done."""

    def observe(operation: Operation) -> None:
        if isinstance(operation, Record) and operation.event.startswith("free/"):
            streamer(module)._slots[int(operation.event.removeprefix("free/"))].fill_(0xFF)
            streamer(module)._lanes.record(
                "compute", operation.event
            )  # the filling reads the slot, so to say
        if isinstance(operation, Compute):
            with torch.cuda.stream(copies(module)):
                torch.cuda._sleep(cycles)

    return observe


def late_kernels(module: CompiledTransformer, cycles: int) -> Observe:
    """Kernels begin long after they were enqueued: a copy that does not wait for them comes first."""

    def observe(operation: Operation) -> None:
        if isinstance(operation, Copy):
            torch.cuda._sleep(cycles)

    return observe


@pytest.mark.parametrize("disturb", [late_copies, late_kernels])
@pytest.mark.parametrize(("resident", "slots"), [(0, 1), (0, 2), (1, 2)])
def test_exact_when_one_stream_is_far_behind_the_other(
    engine, forwards, cycles_of_a_millisecond, disturb, resident: int, slots: int
) -> None:
    expected = outputs(h3compile.load(engine("inductor")), forwards[:4])
    module = h3compile.load(engine("inductor"), resident=resident, slots=slots)
    streamer(module).observe = disturb(module, 3 * cycles_of_a_millisecond)
    assert equal(outputs(module, forwards[:4]), expected)


@pytest.mark.parametrize(
    ("disturb", "stream", "event"), [(late_copies, "compute", "copied/"), (late_kernels, "copy", "free/")]
)
def test_a_planted_race_is_seen(
    engine, forwards, cycles_of_a_millisecond, disturb, stream: str, event: str
) -> None:
    expected = outputs(h3compile.load(engine("inductor")), forwards[:4])
    module = h3compile.load(engine("inductor"), resident=0, slots=2)
    streamer(module).observe = disturb(module, 3 * cycles_of_a_millisecond)
    lanes = streamer(module)._lanes
    wait = lanes.wait
    lanes.wait = lambda on, name: None if on == stream and name.startswith(event) else wait(on, name)
    assert not equal(outputs(module, forwards[:4]), expected)


def test_copies_run_behind_the_arithmetic(engine, forwards, cycles_of_a_millisecond) -> None:
    module = h3compile.load(engine("inductor"), resident=0, slots=2)
    outputs(module, forwards[:1] * 2)

    def observe(operation: Operation) -> None:
        if isinstance(operation, Compute) and operation.call.startswith("block"):
            torch.cuda._sleep(20 * cycles_of_a_millisecond)
        if isinstance(operation, Copy):
            with torch.cuda.stream(copies(module)):
                torch.cuda._sleep(10 * cycles_of_a_millisecond)

    streamer(module).observe = observe
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begun.record()
    outputs(module, forwards[:1] * 3)
    ended.record()
    torch.cuda.synchronize()
    elapsed = begun.elapsed_time(ended)
    print(f"{elapsed:.0f} ms for 3 x 4 blocks of 20 ms, whose copies take 10 ms each")
    assert 240 * 0.95 < elapsed < 240 * 1.1  # one after the other it would be 360


def test_a_forward_on_another_stream(engine, forwards) -> None:
    expected = outputs(h3compile.load(engine("inductor")), forwards)
    module = h3compile.load(engine("inductor"), resident=1, slots=2)
    streams = [torch.cuda.Stream() for _ in range(2)]
    found: list[list[torch.Tensor]] = []
    for i, inputs in enumerate(forwards):
        with torch.cuda.stream(streams[i % 2]):
            found += outputs(module, [inputs])
        torch.cuda.current_stream().wait_stream(streams[i % 2])
    torch.cuda.synchronize()
    assert equal(found, expected)


# --- memory ---


def test_the_device_holds_what_the_stats_say_and_gives_it_back(engine, forwards) -> None:
    h3compile.load(engine("inductor"))(**forwards[1])  # cuBLAS takes its workspace once
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for resident, slots in ((0, 2), (2, 1)):
        module = h3compile.load(engine("inductor"), resident=resident, slots=slots)
        module(**forwards[1])
        torch.cuda.synchronize()
        held, planned = torch.cuda.memory_allocated() - before, module.stats.bytes_resident
        print(f"{resident} residents, {slots} slots: {held:,} bytes held, {planned:,} planned")
        assert abs(held - planned) < 0.05 * planned
        del module
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before


def test_two_engines_on_one_card(engine, forwards) -> None:
    expected = outputs(h3compile.load(engine("inductor")), forwards[:3])
    one = h3compile.load(engine("inductor"), resident=("block.1",), slots=1)
    other = h3compile.load(engine("inductor"), resident=("block.1", "block.2"), slots=2, share=one)
    for _ in range(2):
        assert equal(outputs(one, forwards[:3]), expected)
        assert equal(outputs(other, forwards[:3]), expected)
    assert one._parts.weights.place("block.1") is other._parts.weights.place("block.1")


def test_out_of_memory_is_one_line_and_leaves_the_module_usable(engine, forwards, packed) -> None:
    module = h3compile.load(engine("inductor"), resident=1, slots=2)
    expected = outputs(module, forwards[:2])
    large = packed("t2va", text=50, video=60_000, audio=400, timesteps=2)
    large = {name: value.cuda() for name, value in large.items()}
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (32 << 20)) / total)
    try:
        with pytest.raises(H3CompileError) as refused:
            module(**large)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    line = str(refused.value)
    print(line)
    assert "ran out of memory in a forward of 60,450 rows: the engine needs" in line
    assert "this process had allocated" in line and "resident=N" in line and "\n" not in line
    assert equal(outputs(module, forwards[:2]), expected)


def test_memory_is_locked_and_given_back() -> None:
    memory = HostMemory(torch.device("cuda", 0), limit=1 << 30)
    buffer = memory.take(12_345_678)
    assert buffer.data.is_pinned() and buffer.data.untyped_storage().nbytes() == 12_345_678
    address = buffer.data.data_ptr()
    del buffer
    gc.collect()
    assert memory.held == 0
    status = pinned._driver().cuMemFreeHost(ctypes.c_void_p(address))
    assert status == 1  # CUDA_ERROR_INVALID_VALUE: it has been freed


def test_a_refusal_of_the_driver_is_one_line_and_no_later_kernels_error() -> None:
    with pytest.raises(
        H3CompileError, match=r"the driver has no .* of locked host memory for us \(CUDA error"
    ):
        HostBuffer(1 << 50, torch.device("cuda", 0))
    assert float(torch.ones(8, device="cuda").sum()) == 8


def test_pageable_memory_is_used_only_by_name_and_with_a_note(engine, forwards) -> None:
    expected = outputs(h3compile.load(engine("inductor")), forwards[:2])
    with pytest.raises(H3CompileError, match="of pinned host memory are needed and the budget is"):
        h3compile.load(engine("inductor"), resident=0, host_bytes=1000)
    with pytest.warns(UserWarning, match="streamed from pageable host memory"):
        module = h3compile.load(engine("inductor"), resident=0, pinned=False)
    assert equal(outputs(module, forwards[:2]), expected)
    assert not streamer(module).reader.get("block.0", lambda: None).is_pinned()


def test_copies_come_at_the_rate_of_the_link() -> None:
    """One flat copy from locked memory, beside torch's own pinned memory: within 5 %."""
    nbytes = 771 << 20
    ours = HostMemory(torch.device("cuda", 0), limit=1 << 31).take(nbytes).data
    theirs = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target.copy_(ours, non_blocking=True)  # the link wakes up, and theirs is touched
    theirs.fill_(1)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(9):  # taking turns
        for source, taken in zip((ours, theirs), times, strict=True):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            target.copy_(source, non_blocking=True)
            ended.record()
            torch.cuda.synchronize()
            taken.append(begun.elapsed_time(ended))
    rates = [nbytes / statistics.median(taken) / 1e6 for taken in times]
    print(f"{rates[0]:.1f} GB/s from ours, {rates[1]:.1f} from torch's")
    assert rates[0] > 0.95 * rates[1]
