"""Brings an engine's weights from disk into host memory, in order of need, in a thread of its own."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from h3compile.errors import EngineError, H3CompileError
from h3compile.runtime.lanes import DONE, Ticket
from h3compile.runtime.pinned import HostBuffer, HostMemory

__all__ = ["STAGING", "HostRange", "Reader", "Wanted"]

# Host places that ranges on their way to the device take turns in: one is read while the other is copied.
STAGING = 2

# How often a waiting forward looks whether it was stopped, in seconds.
_GLANCE = 0.05

Read = Callable[[torch.Tensor], object]


class HostRange:
    """The bytes of a range in host memory, one for all engines of a process that have the same bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer: HostBuffer | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held: none before it is filled."""
        return 0 if self._buffer is None else self._buffer.data.nbytes

    def fill(self, nbytes: int, memory: HostMemory, read: Read) -> torch.Tensor:
        """The bytes, after ``read`` filled memory for them where nobody did before."""
        with self._lock:
            if self._buffer is None:
                buffer = memory.take(nbytes)
                read(buffer.data)
                self._buffer = buffer  # now, so that nobody sees half of it
            return self._buffer.data


@dataclass(frozen=True)
class Wanted:
    """The range of a call: ``kept`` in host memory, or staged there on its way to the device (None)."""

    call: str
    nbytes: int
    read: Read
    kept: HostRange | None


@dataclass
class _State:
    """What the thread and the forward share. The thread knows nothing else: a module can be let go."""

    memory: HostMemory
    remaining: deque[Wanted]
    changed: threading.Condition = field(default_factory=threading.Condition)
    ready: dict[str, torch.Tensor] = field(default_factory=dict)
    staging: list[tuple[HostBuffer, Ticket]] = field(default_factory=list)  # those that may be taken
    staged: dict[str, HostBuffer] = field(default_factory=dict)  # those that are filled, by call
    stopping: bool = False
    error: Exception | None = None


class Reader:
    """Reads what is ``wanted``, in this order, into host memory; `get` waits for it call by call.

    At most `STAGING` ranges that are not kept lie in host memory at a time. `pause` ends the thread and
    `start` goes on with what is missing.
    """

    def __init__(self, wanted: Sequence[Wanted], memory: HostMemory) -> None:
        self._calls = {item.call for item in wanted}
        self._kept = tuple({id(item.kept): item.kept for item in wanted if item.kept is not None}.values())
        self._state = _State(memory, deque(wanted))
        self._state.staging += _staging(wanted, memory)
        self._thread: threading.Thread | None = None
        self._end: Callable[[], object] = lambda: None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held now: what is kept, and the staging while something is to be staged."""
        state = self._state
        with state.changed:
            staging = [*(buffer for buffer, _ in state.staging), *state.staged.values()]
        return sum(item.nbytes for item in self._kept) + sum(buffer.data.nbytes for buffer in staging)

    @property
    def running(self) -> bool:
        """Whether the thread is there."""
        return self._thread is not None and self._thread.is_alive()

    def __contains__(self, call: str) -> bool:
        """Whether `get` gives the range of ``call``: it is wanted, and was not staged and taken already."""
        return call in self._calls

    def start(self) -> None:
        """Starts the thread, unless it runs or everything is read; what failed before is tried again."""
        state = self._state
        if self.running and not state.stopping:
            return
        self.pause()
        state.stopping, state.error = False, None
        if state.remaining:
            # A daemon, because the interpreter waits for the others before it calls what ends this one.
            self._thread = threading.Thread(target=_read, args=(state,), name="h3compile-reader", daemon=True)
            self._end = weakref.finalize(self, _stop, state, self._thread)
            self._thread.start()

    def pause(self) -> None:
        """Ends the thread, after the range that it is reading."""
        self._end()
        self._thread = None

    def get(self, call: str, check: Callable[[], None]) -> torch.Tensor:
        """The bytes of a call's range, in host memory. ``check`` is called while it waits.

        Raises the error that the thread met, or what ``check`` raises.
        """
        state = self._state
        with state.changed:
            while call not in state.ready:
                if state.error is not None:
                    raise _fresh(call, state.error)
                if not self.running:
                    raise RuntimeError(f"nobody reads {call}: start the reader")
                state.changed.wait(_GLANCE)
                check()
            return state.ready[call]

    def staged(self, call: str, copied: Ticket = DONE) -> None:
        """A staged range is on its way to the device; its place is free when ``copied`` is done."""
        state = self._state
        with state.changed:
            buffer = state.staged.pop(call)
            del state.ready[call]
            self._calls.remove(call)
            state.staging.append((buffer, copied))
            if not state.staged and all(item.kept is not None for item in state.remaining):
                places, state.staging = state.staging, []
                for _, ticket in places:
                    ticket.wait()
            state.changed.notify_all()


def _staging(wanted: Sequence[Wanted], memory: HostMemory) -> list[tuple[HostBuffer, Ticket]]:
    sizes = [item.nbytes for item in wanted if item.kept is None]
    return [(memory.take(max(sizes)), DONE) for _ in range(min(STAGING, len(sizes)))]


def _read(state: _State) -> None:
    device = state.memory.device
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.no_grad():
            while not state.stopping and state.remaining:
                item = state.remaining[0]
                data = _bring(state, item)
                if data is None:
                    return
                with state.changed:
                    state.remaining.popleft()
                    state.ready[item.call] = data
                    state.changed.notify_all()
    except Exception as error:
        with state.changed:
            # Without its frames, which hold the memory that could not be filled.
            state.error = error.with_traceback(None)
            state.changed.notify_all()


def _bring(state: _State, item: Wanted) -> torch.Tensor | None:
    """The range in host memory; None when the thread is to end instead."""
    if item.kept is not None:
        return item.kept.fill(item.nbytes, state.memory, item.read)
    with state.changed:
        state.changed.wait_for(lambda: state.stopping or bool(state.staging))
        if state.stopping:
            return None
        buffer, ticket = state.staging.pop(0)
    try:
        ticket.wait()
        data = buffer.data[: item.nbytes]
        item.read(data)
    except BaseException:
        with state.changed:
            state.staging.append((buffer, DONE))
        raise
    with state.changed:
        state.staged[item.call] = buffer
    return data


def _stop(state: _State, thread: threading.Thread) -> None:
    with state.changed:
        state.stopping = True
        state.changed.notify_all()
    if thread is not threading.current_thread():
        thread.join()


def _fresh(call: str, error: Exception) -> H3CompileError:
    """The thread's error as one of this thread, which can be raised any number of times."""
    if isinstance(error, H3CompileError):
        found = type(error)(error.cause, error.mend)
    else:
        found = EngineError(
            f"the weights of {call} cannot be read ({error})", "build or copy the engine again"
        )
    found.__cause__ = error
    return found
