"""Host memory that a GPU copies from at the rate of its link: page-locked, of exact size, in a budget."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from h3compile.errors import H3CompileError
from h3compile.runtime.memory import gib

__all__ = ["HOST_SHARE", "HostBuffer", "HostMemory", "available_bytes"]

# Of the memory that is available when an engine is loaded, what its pinned weights may take. Locked pages
# cannot be swapped or reclaimed: the rest is for the text encoder, the page cache and everybody else.
HOST_SHARE = 0.8

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: locked for every context of the process


class HostMemory:
    """Host memory of one engine, at most ``limit`` bytes of it; by default `HOST_SHARE` of what is available.

    It is page-locked for a CUDA ``device``; on the CPU, and where ``pinned`` is False, it is pageable.
    Torch's own pinned memory comes in powers of two: a block of 0.77 GB would take 1.07.
    """

    def __init__(self, device: torch.device, *, limit: int | None = None, pinned: bool = True) -> None:
        self.device = device
        self.pinned = pinned and device.type == "cuda"
        self._given = limit
        self.limit = int(HOST_SHARE * available_bytes()) if limit is None else limit
        self._held = 0
        self._lock = threading.RLock()  # a finalizer may run in the thread that holds it

    @property
    def held(self) -> int:
        """Bytes taken and not given back."""
        return self._held

    def require(self, nbytes: int) -> None:
        """Raises `H3CompileError` unless ``nbytes`` more may be taken."""
        if self._held + nbytes <= self.limit:
            return
        kind = "pinned host memory" if self.pinned else "host memory"
        budget = f"the budget is {gib(self.limit)}"
        if self._given is None:
            budget += f", {HOST_SHARE:.0%} of what was available"
        raise H3CompileError(
            f"{gib(self._held + nbytes)} of {kind} are needed and {budget}",
            "keep more blocks on the device (resident=N), or allow more with host_bytes=",
        )

    def take(self, nbytes: int) -> HostBuffer:
        """A buffer of ``nbytes``; it is given back when it is no longer referred to.

        Raises `H3CompileError` when the budget or the driver refuses.
        """
        with self._lock:
            self.require(nbytes)
            self._held += nbytes
        try:
            buffer = HostBuffer(nbytes, self.device if self.pinned else None)
        except BaseException:
            self._give_back(nbytes)
            raise
        weakref.finalize(buffer, self._give_back, nbytes)
        return buffer

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self._held -= nbytes


class HostBuffer:
    """``data``: a flat uint8 tensor on the CPU, page-aligned, of exactly ``nbytes``.

    Page-locked for ``lock_for``, a CUDA device. The memory lives as long as a view of it. Raises
    `H3CompileError` when the driver refuses: never pageable memory in its place.
    """

    def __init__(self, nbytes: int, lock_for: torch.device | None = None) -> None:
        if nbytes == 0:
            self.data = torch.empty(0, dtype=torch.uint8)
        elif lock_for is None:
            self.data = _pageable(nbytes)
        else:
            self.data = _locked(nbytes, lock_for)


def _pageable(nbytes: int) -> torch.Tensor:
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise H3CompileError(
            f"the system has no {gib(nbytes)} of memory ({error.strerror})", "free some"
        ) from None
    with suppress(AttributeError, OSError):  # fewer and longer entries to walk
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)


def _locked(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory of the driver's own.

    Pages that are ours and only registered (cudaHostRegister) are as fast on most systems, but came at 6.6
    instead of 55 GB/s in a gVisor container.
    """
    driver = _driver()
    address = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # the device's context becomes the current one of this thread
        status: int = driver.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(nbytes), _PORTABLE)
    if status != 0 or address.value is None:
        raise H3CompileError(
            f"the driver has no {gib(nbytes)} of locked host memory for us (CUDA error {status}; "
            f"{gib(available_bytes())} are available)",
            "keep more blocks on the device, free memory, or allow slower pageable memory with pinned=False",
        )
    pages = (ctypes.c_uint8 * nbytes).from_address(address.value)
    # The tensor's storage holds ``pages``. A process that ends gives everything back by itself, and faster.
    weakref.finalize(pages, _free, address.value, device).atexit = False
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _free(address: int, device: torch.device) -> None:
    # The device may still copy from it: the last forward leaves the first blocks of the next on their way.
    with suppress(RuntimeError):
        torch.cuda.synchronize(device)
        _driver().cuMemFreeHost(ctypes.c_void_p(address))


def available_bytes() -> int:
    """Memory this process may still take, in bytes: what the system has and what its control group allows."""
    return min([psutil.virtual_memory().available, *_group_headrooms()])


def _group_headrooms(
    root: Path = Path("/sys/fs/cgroup"), of: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """What every control group above this process still allows, in bytes; its page cache counts as free."""
    try:
        lines = of.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        base, limit, used = root, "memory.max", "memory.current"
        if number != "0":
            if "memory" not in controllers.split(","):
                continue
            base, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        group = base / path.lstrip("/")
        # Inside a container the path may be that of the host and lead nowhere: its own group is the root.
        for folder in dict.fromkeys((group, *group.parents, base)):
            if folder != base and base not in folder.parents:
                continue
            headroom = _headroom(folder, limit, used)
            if headroom is not None:
                yield headroom


def _headroom(folder: Path, limit: str, used: str) -> int | None:
    try:
        most, held = (folder / limit).read_text().strip(), int((folder / used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return None if most == "max" else max(0, int(most) - held + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
