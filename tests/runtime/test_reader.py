from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import pytest
import torch

from h3compile.errors import CheckpointError, EngineError, H3CompileError, Interrupted
from h3compile.runtime.lanes import DONE
from h3compile.runtime.pinned import HostMemory
from h3compile.runtime.reader import STAGING, HostRange, Reader, Wanted

CPU = torch.device("cpu")


def nothing() -> None:
    pass


class Disk:
    """Fills ranges with their number, one at a time; ``gate`` may hold it, ``fail`` may break it."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fail: Exception | None = None

    def reader_of(self, call: str, value: int) -> Callable[[torch.Tensor], None]:
        def read(out: torch.Tensor) -> None:
            assert self.gate.wait(10)
            if self.fail is not None:
                raise self.fail
            self.read.append(call)
            out.fill_(value)

        return read

    def wanted(self, kinds: str, nbytes: int = 100) -> list[Wanted]:
        """One a letter: k is kept, s is staged."""
        return [
            Wanted(f"c.{i}", nbytes, self.reader_of(f"c.{i}", i), HostRange() if kind == "k" else None)
            for i, kind in enumerate(kinds)
        ]


@pytest.fixture
def disk() -> Disk:
    return Disk()


def started(disk: Disk, kinds: str) -> Reader:
    reader = Reader(disk.wanted(kinds), HostMemory(CPU, limit=10_000))
    reader.start()
    return reader


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "h3compile-reader"]


def settle(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("nothing came of it")


def test_ranges_come_in_order_and_the_thread_ends(disk: Disk) -> None:
    reader = started(disk, "kkk")
    for i in range(3):
        assert reader.get(f"c.{i}", nothing).eq(i).all()
    assert disk.read == ["c.0", "c.1", "c.2"]
    settle(lambda: not reader.running)
    assert reader.nbytes == 300 and reader.get("c.0", nothing).eq(0).all()


def test_what_is_staged_never_takes_more_than_its_places(disk: Disk) -> None:
    reader = started(disk, "ssssk")
    settle(lambda: len(disk.read) == STAGING)
    time.sleep(0.05)
    assert disk.read == ["c.0", "c.1"] and reader.nbytes == 100 * STAGING
    for i in range(4):
        assert reader.get(f"c.{i}", nothing).eq(i).all()
        reader.staged(f"c.{i}", DONE)
    reader.get("c.4", nothing)
    assert reader.nbytes == 100  # the staging is given back with the last of them


def test_a_staged_place_is_refilled_only_when_its_copy_has_ended(disk: Disk) -> None:
    class Copy:
        def __init__(self) -> None:
            self.ended = threading.Event()

        def wait(self) -> None:
            assert self.ended.wait(10)

    reader = started(disk, "sss")
    copy = Copy()
    reader.get("c.0", nothing)
    reader.staged("c.0", copy)
    time.sleep(0.05)
    assert disk.read == ["c.0", "c.1"]
    copy.ended.set()
    assert reader.get("c.2", nothing).eq(2).all()


@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        (
            CheckpointError("shard 3 is truncated", "download it again"),
            CheckpointError,
            "shard 3 is truncated",
        ),
        (OSError("gone"), EngineError, r"the weights of c.0 cannot be read \(gone\)"),
    ],
)
def test_an_error_surfaces_where_it_is_waited_for_and_is_tried_again(
    disk: Disk, error: Exception, kind: type[H3CompileError], line: str
) -> None:
    disk.fail = error
    reader = started(disk, "ks")
    for _ in range(2):
        with pytest.raises(kind, match=line):
            reader.get("c.0", nothing)
    disk.fail = None
    reader.pause()
    reader.start()
    assert reader.get("c.0", nothing).eq(0).all() and reader.get("c.1", nothing).eq(1).all()


def test_a_failed_range_takes_no_memory(disk: Disk) -> None:
    disk.fail = OSError("gone")
    memory = HostMemory(CPU, limit=150)
    reader = Reader(disk.wanted("k"), memory)
    reader.start()
    settle(lambda: not reader.running)
    gc.collect()
    assert memory.held == 0


def test_a_waiting_forward_can_be_stopped_and_the_thread_with_it(disk: Disk) -> None:
    disk.gate.clear()
    reader = started(disk, "kk")

    def stop() -> None:
        raise Interrupted("stop")

    with pytest.raises(Interrupted):
        reader.get("c.0", stop)
    threading.Timer(0.1, disk.gate.set).start()
    reader.pause()  # after the range that it is reading
    assert not reader.running and threads() == [] and len(disk.read) == 1
    reader.start()
    assert reader.get("c.1", nothing).eq(1).all() and disk.read == ["c.0", "c.1"]


def test_a_pause_ends_a_thread_that_waits_for_a_place(disk: Disk) -> None:
    reader = started(disk, "sss")
    settle(lambda: len(disk.read) == STAGING)
    reader.pause()
    assert threads() == []
    reader.start()
    for i in range(3):
        assert reader.get(f"c.{i}", nothing).eq(i).all()
        reader.staged(f"c.{i}")
    assert disk.read == ["c.0", "c.1", "c.2"]


def test_a_reader_that_is_let_go_leaves_no_thread(disk: Disk) -> None:
    reader = started(disk, "sss")
    settle(lambda: len(disk.read) == STAGING)
    del reader
    gc.collect()
    assert threads() == []


def test_a_range_of_two_readers_is_read_once(disk: Disk) -> None:
    wanted = disk.wanted("kk")
    memory = HostMemory(CPU, limit=10_000)
    one, other = Reader(wanted, memory), Reader(wanted, memory)
    one.start()
    other.start()
    for call in ("c.0", "c.1"):
        assert one.get(call, nothing).data_ptr() == other.get(call, nothing).data_ptr()
    assert disk.read == ["c.0", "c.1"] and memory.held == 200


def test_the_budget_is_kept_by_the_thread(disk: Disk) -> None:
    reader = Reader(disk.wanted("kk"), HostMemory(CPU, limit=150))
    reader.start()
    reader.get("c.0", nothing)
    with pytest.raises(H3CompileError, match="of host memory are needed and the budget is"):
        reader.get("c.1", nothing)
