from __future__ import annotations

import ctypes
import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from h3compile.errors import H3CompileError
from h3compile.runtime import pinned
from h3compile.runtime.pinned import HOST_SHARE, HostBuffer, HostMemory, available_bytes

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GIB = 1 << 30


def test_a_buffer_has_exactly_the_bytes_asked_for_on_a_page_of_its_own() -> None:
    data = HostBuffer(771).data
    assert (data.dtype, tuple(data.shape), data.device) == (torch.uint8, (771,), CPU)
    assert data.data_ptr() % 4096 == 0 and data.untyped_storage().nbytes() == 771
    data.fill_(7)
    assert HostBuffer(0).data.numel() == 0


def test_what_is_taken_counts_until_it_is_no_longer_referred_to() -> None:
    memory = HostMemory(CPU, limit=10_000)
    one, other = memory.take(6000), memory.take(4000)
    assert memory.held == 10_000
    del one
    gc.collect()
    assert memory.held == 4000
    memory.take(6000)
    assert other.data.nbytes == 4000


def test_views_outlive_their_buffer() -> None:
    buffer = HostBuffer(1 << 16)
    buffer.data.fill_(5)
    view = buffer.data[100:200]
    del buffer
    gc.collect()
    assert view.eq(5).all()


def test_the_budget_is_kept_and_the_line_has_the_figures() -> None:
    memory = HostMemory(CPU, limit=2 * GIB)
    memory.require(2 * GIB)
    with pytest.raises(H3CompileError) as refused:
        memory.require(3 * GIB)
    assert str(refused.value) == (
        "3.00 GiB of host memory are needed and the budget is 2.00 GiB: keep more blocks on the device"
        " (resident=N), or allow more with host_bytes="
    )
    with pytest.raises(H3CompileError, match=r"the budget is 2\.00 GiB"):
        memory.take(2 * GIB + 1)
    assert memory.held == 0


def test_by_default_it_is_a_stated_share_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "available_bytes", lambda: 10 * GIB)
    memory = HostMemory(CPU)
    assert memory.limit == int(HOST_SHARE * 10 * GIB)
    with pytest.raises(H3CompileError, match=r"the budget is 8.00 GiB, 80% of what was available"):
        memory.require(9 * GIB)


def test_nothing_is_locked_for_a_cpu_or_against_the_users_word() -> None:
    assert not HostMemory(CPU).pinned
    assert not HostMemory(GPU, pinned=False).pinned
    assert HostMemory(GPU).pinned


class Driver:
    """Stands for the CUDA driver: locks the first ``most`` buffers."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.locked: dict[int, ctypes.Array[ctypes.c_char]] = {}

    def cuMemHostAlloc(self, address: Any, nbytes: ctypes.c_size_t, flags: int) -> int:
        assert flags == 1
        if len(self.locked) == self.most:
            return 2
        pages = ctypes.create_string_buffer(nbytes.value)
        address._obj.value = ctypes.addressof(pages)
        self.locked[ctypes.addressof(pages)] = pages
        return 0

    def cuMemFreeHost(self, address: ctypes.c_void_p) -> int:
        assert address.value is not None
        del self.locked[address.value]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver(most=1)
    monkeypatch.setattr(pinned, "_driver", lambda: found)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


def test_memory_is_locked_in_its_exact_size_and_freed_with_the_last_view(driver: Driver) -> None:
    buffer = HostMemory(GPU, limit=GIB).take(5000)
    assert list(driver.locked) == [buffer.data.data_ptr()]
    assert len(driver.locked[buffer.data.data_ptr()]) == buffer.data.nbytes == 5000
    view = buffer.data[100:200].fill_(3)
    del buffer
    gc.collect()
    assert len(driver.locked) == 1 and view.eq(3).all()
    del view
    gc.collect()
    assert driver.locked == {}


def test_a_refusal_of_the_driver_is_one_line_and_takes_nothing(driver: Driver) -> None:
    memory = HostMemory(GPU, limit=4 * GIB)
    kept = memory.take(5000)
    with pytest.raises(H3CompileError) as refused:
        memory.take(1 << 20)
    line = str(refused.value)
    assert line.startswith("the driver has no 0.00 GiB of locked host memory for us (CUDA error 2; ")
    assert "pinned=False" in line and "\n" not in line
    del refused
    gc.collect()
    assert memory.held == kept.data.nbytes == 5000


# --- what is available ---


def group(folder: Path, limit: str, used: int, cache: int, v1: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    (folder / names[0]).write_text(limit)
    (folder / names[1]).write_text(str(used))
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")


def headrooms(root: Path, line: str) -> list[int]:
    of = root / "cgroup"
    of.write_text(line)
    return list(pinned._group_headrooms(root, of))


def test_every_group_above_the_process_counts_and_cache_counts_as_free(tmp_path: Path) -> None:
    group(tmp_path / "a", "1000", used=700, cache=100)
    group(tmp_path / "a/b", "max", used=300, cache=0)
    group(tmp_path / "a/b/c", "500", used=450, cache=10)
    assert headrooms(tmp_path, "0::/a/b/c\n") == [60, 400]


def test_inside_a_container_its_own_group_is_the_root(tmp_path: Path) -> None:
    group(tmp_path, "900", used=100, cache=0)
    assert headrooms(tmp_path, "0::/some/host/path\n") == [800]


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    group(tmp_path / "memory/x", "800", used=100, cache=50, v1=True)
    assert headrooms(tmp_path, "5:cpu:/x\n4:memory:/x\n0::/\n") == [750]


def test_available_is_more_than_nothing() -> None:
    assert 0 < available_bytes() < 1 << 50
