"""Watches over the ranks of an engine: one that fails, ends or hangs ends the forward of all of them.

A rank that waits in an exchange learns nothing: it would wait for as long as its backend allows. So a thread
of every rank tells the others through their store how far it is and looks at what they tell. Another one
frees its own rank from the exchange where one of them cannot go on. It asks nothing of the store: while the
process that holds it is stopped, no call returns, whatever its timeout. Between forwards both sleep.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from h3compile.errors import H3CompileError, Interrupted, RankFailure
from h3compile.runtime.peers import Peers
from h3compile.runtime.verdict import Beat, judge

__all__ = ["PATIENCE", "Store", "Watch", "end_process"]

# Seconds without progress of any rank after which a forward is given up. The first block of a cold engine
# may wait for its disk; the backends' own limits are ten minutes and more.
PATIENCE = 120.0

# Seconds between two beats, and about what it takes to hear of a failure.
_PERIOD = 0.25

# Seconds in which a rank that is freed from its exchange must have left the forward, before its process ends.
_GRACE = 5.0

# Seconds for which an error that may follow from another rank's failure waits for word of that.
_HEARING = 2.0

# Seconds at most for which a failed rank stays for the others to hear of it: their store may end with it.
_LINGER = 1.0

_FAILED = "failed"
_LOST = "look at the output of every rank"


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


def end_process(failure: RankFailure) -> None:
    """The last resort: ends this process, with the reason where it is the one to report it."""
    if failure.mine:
        sys.stderr.write(f"error: {failure}\n")  # at once: other ranks may say theirs
        sys.stderr.flush()
    os._exit(1)


@dataclass
class _State:
    """What threads and forward share. The threads know nothing else, so that a module can be let go."""

    store: Store
    rank: int
    size: int
    peers: Peers
    patience: float
    sent: Callable[[], int]
    abort: Callable[[], None]
    last_resort: Callable[[RankFailure], object] = end_process
    changed: threading.Condition = field(default_factory=threading.Condition)
    closing: bool = False
    forward: int = 0
    inside: int | None = None  # the thread that is in a forward
    listening: bool = False  # whether this rank waits for a call of another one
    ticked: float = 0.0
    number: int = 0
    told: bool = False  # whether the last beat said that this rank is in a forward
    silence: float | None = None  # for how many seconds the store owes an answer
    found: RankFailure | None = None  # what this rank has to announce
    failure: RankFailure | None = None  # what all ranks were told
    spread: bool = False  # whether all others have heard of it, as far as they can
    running: tuple[Callable[[], bool], ...] = ()  # whether exchanges of the last forward still run
    heard: dict[int, tuple[Beat, float]] = field(default_factory=dict)  # rank -> its last beat, and when


class Watch:
    """The watch of rank ``rank`` of ``size``, over a connection to their ``store`` that nothing else uses.

    ``sent`` counts the bytes sent so far, and ``abort`` frees this rank from a running exchange, as far as
    the backend can. Where it is not free within seconds after that, the process ends: see `at_last_resort`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        peers: Peers,
        *,
        patience: float = PATIENCE,
        sent: Callable[[], int] = lambda: 0,
        abort: Callable[[], None] = lambda: None,
    ) -> None:
        self._state = _State(store, rank, size, peers, patience, sent, abort)
        store.set(f"beat/{rank}", _beat(self._state).encode())
        threads = [
            threading.Thread(target=run, args=(self._state,), name=f"h3compile-{name}", daemon=True)
            for name, run in (("hear", _hear), ("watch", _watch))
        ]
        self._end = weakref.finalize(self, _close, self._state, threads)
        for thread in threads:
            thread.start()

    @property
    def failure(self) -> RankFailure | None:
        """Why the ranks cannot go on; None while nothing is known."""
        return self._state.failure

    @property
    def number(self) -> int:
        """How many forwards were begun."""
        return self._state.forward

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Watches while the block runs. What leaves it as an error ends the forward of every rank.

        Raises the first failure of any rank, `RankFailure`, in the place of what follows from it.
        """
        state = self._state
        self.check()
        with state.changed:
            state.forward += 1
            state.ticked = time.monotonic()
            state.heard.clear()
            state.inside = threading.get_ident()
            state.changed.notify_all()
        try:
            yield
            self.check()
        except RankFailure:
            self._linger()
            raise
        except BaseException as error:
            known = self._settle(error)
            self._linger()
            if known.rank == self._state.rank and known.mine:
                raise
            raise _fresh(known) from error
        finally:
            with state.changed:
                state.inside = None
                state.changed.notify_all()

    def tick(self) -> None:
        """This rank came further. Raises `RankFailure` when another one did not."""
        self._state.ticked = time.monotonic()
        self.check()

    def check(self) -> None:
        """Raises `RankFailure` when one is known."""
        if self._state.failure is not None:
            raise _fresh(self._state.failure)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Watches while the block waits for a call of another rank, outside of forwards.

        What another one announced, or that its process has ended, is then raised by `check`.
        """
        self._listen(True)
        try:
            yield
        finally:
            self._listen(False)

    def lost(self, error: RuntimeError) -> RankFailure:
        """The failure that an ``error`` of the store stands for."""
        found = _lost(self._state, error)
        with self._state.changed:
            self._state.failure = self._state.failure or found
            self._state.changed.notify_all()
            return _fresh(self._state.failure)

    def stay_for(self, running: Callable[[], bool]) -> None:
        """Has the watch stay on after a forward for as long as ``running`` says; any thread may ask it.

        For exchanges that a forward leaves behind: the next one is told of what becomes of them.
        """
        self._state.running += (running,)

    def at_last_resort(self, end: Callable[[RankFailure], object]) -> None:
        """Has ``end`` called where a rank does not come free, in the place of `end_process`."""
        self._state.last_resort = end

    def close(self) -> None:
        """Ends the threads."""
        self._end()

    def _listen(self, whether: bool) -> None:
        with self._state.changed:
            self._state.listening = whether
            self._state.changed.notify_all()

    def _settle(self, error: BaseException) -> RankFailure:
        """The failure that all ranks agree on, after ``error`` left the forward of this one."""
        state = self._state
        with state.changed:
            if _may_follow(error):
                state.changed.wait_for(lambda: state.failure is not None, _HEARING)
            cause = f"rank {state.rank} {_what(error)}"
            mend = error.mend if isinstance(error, H3CompileError) else ""
            state.found = state.found or RankFailure(cause, mend, rank=state.rank, mine=True)
            state.changed.notify_all()
            state.changed.wait_for(lambda: state.closing or state.failure is not None, state.patience)
            state.failure = state.failure or state.found
            return state.failure

    def _linger(self) -> None:
        with self._state.changed:
            self._state.changed.wait_for(lambda: self._state.spread, _LINGER)


def _watch(state: _State) -> None:
    """Waits for a failure, frees this rank from what it is in, and ends the process where that is in vain."""
    with state.changed:
        while state.failure is None:
            if state.closing:
                return
            if state.silence is not None and state.silence > state.patience:
                # Nobody can be told: the others find the same.
                state.failure = state.found or _silent(state.silence)
                state.spread = True
                state.changed.notify_all()
            elif state.silence is None and not _busy(state):
                state.changed.wait()
            elif not state.changed.wait(_PERIOD) and state.silence is not None:
                state.silence += _PERIOD  # not by the clock, which went on where this process was stopped
        failure = state.failure
    # In a thread of its own: some backends wait for each other even here.
    threading.Thread(target=state.abort, name="h3compile-abort", daemon=True).start()
    with state.changed:
        if not state.changed.wait_for(lambda: state.closing or _free(state), _GRACE):
            state.last_resort(failure)


def _hear(state: _State) -> None:
    """Tells the others and hears of them until a failure is known; the only one that asks the store."""
    while True:
        with state.changed:
            state.changed.wait_for(lambda: state.closing or _busy(state))
            if state.closing:
                return
            state.silence = 0.0
            beat = _beat(state)
        try:
            known = _look(state, beat)
        except RuntimeError as error:  # of the store
            known = _lost(state, error)
        with state.changed:
            state.silence = None
            state.failure = state.failure or known
            state.changed.notify_all()
            if state.failure is None:
                state.changed.wait(_PERIOD)
                continue
        with suppress(RuntimeError):  # of the store
            _spread(state)
        with state.changed:
            state.spread = True
            state.changed.notify_all()
        return


def _busy(state: _State) -> bool:
    if _free(state) and not state.told:  # if told, the others still take it for being inside
        return state.forward > 0 and any(running() for running in state.running)
    return True


def _free(state: _State) -> bool:
    return state.inside is None and not state.listening


def _look(state: _State, beat: Beat) -> RankFailure | None:
    """Tells the others of this rank and looks at what they tell; the failure that all are told."""
    state.store.set(f"beat/{state.rank}", beat.encode())
    state.told = beat.inside
    if not _busy(state):  # it has left, and what others do now is their own affair
        return None
    told = _told(state)
    if told is not None:
        return told
    found = _judged(state, beat) if beat.inside else _gone(state)
    with state.changed:
        state.found = state.found or found
    return None if state.found is None else _announce(state, state.found)


def _lost(state: _State, error: RuntimeError) -> RankFailure:
    time.sleep(_PERIOD)  # a process closes its connections a moment before it has ended
    return _gone(state) or RankFailure(
        f"the process that holds the ranks' store has ended ({_line(error)})", _LOST, mine=True
    )


def _silent(seconds: float) -> RankFailure:
    return RankFailure(
        f"the process that holds the ranks' store has given no sign of life for {seconds:.0f} s",
        "look whether it is stopped or its machine is gone",
        mine=True,
    )


def _beat(state: _State) -> Beat:
    """This rank's next word about itself."""
    state.number += 1
    still = time.monotonic() - state.ticked if state.inside is not None else 0.0
    waits = still > 2 * _PERIOD and state.inside is not None and _exchanges(state.inside)
    return Beat(state.number, state.forward, state.inside is not None, still, state.sent(), waits)


def _told(state: _State) -> RankFailure | None:
    """The failure that a rank announced."""
    if not state.store.check([_FAILED]):
        return None
    return _decode(state, state.store.multi_get([_FAILED])[0])


def _gone(state: _State) -> RankFailure | None:
    """The failure that a rank's process has ended, outside of a forward."""
    ended = _ended(state)
    return RankFailure(f"rank {ended[0]} has ended", _LOST, rank=ended[0], mine=True) if ended else None


def _ended(state: _State) -> tuple[int, ...]:
    with state.changed:  # only one thread at a time may poll
        return state.peers.ended()


def _judged(state: _State, own: Beat) -> RankFailure | None:
    """The failure that follows from what the ranks tell."""
    now = time.monotonic()
    beats = [Beat.decode(text.decode()) for text in state.store.multi_get(_beats(state.size))]
    with state.changed:
        if state.inside is None or state.forward != own.forward:  # it was left meanwhile
            return None
        for rank, beat in enumerate(beats):
            last = state.heard.get(rank)
            if last is None or last[0].number != beat.number:
                state.heard[rank] = (beat, now)
        # Outside of its forwards a rank says nothing.
        unheard = {rank: now - since for rank, (beat, since) in state.heard.items() if beat.inside}
        return judge(state.rank, beats, unheard, state.peers.ended(), state.patience)


def _beats(size: int) -> list[str]:
    return [f"beat/{rank}" for rank in range(size)]


def _announce(state: _State, failure: RankFailure) -> RankFailure:
    """Tells all ranks; what they were told first counts, and is returned."""
    word = json.dumps([failure.cause, failure.mend, failure.rank, state.rank])
    try:
        return _decode(state, state.store.compare_set(_FAILED, "", word))
    except RuntimeError:  # the store is gone, and with it whoever else could be told
        return failure


def _spread(state: _State) -> None:
    """Waits for all others to hear of the failure, if they do: the store may end with this process."""
    state.store.set(f"{_FAILED}/{state.rank}", "")
    deadline = time.monotonic() + _LINGER
    while time.monotonic() < deadline:
        left = set(range(state.size)) - set(_ended(state))
        if state.store.check([f"{_FAILED}/{rank}" for rank in sorted(left)]):
            return
        time.sleep(_PERIOD / 10)


def _decode(state: _State, word: bytes) -> RankFailure:
    cause, mend, rank, by = json.loads(word)
    return RankFailure(cause, mend, rank=rank, mine=by == state.rank)


def _fresh(failure: RankFailure) -> RankFailure:
    """The same failure, to be raised once more."""
    return RankFailure(failure.cause, failure.mend, rank=failure.rank, mine=failure.mine)


def _may_follow(error: BaseException) -> bool:
    """Whether an error looks like that of an exchange, which fails when another rank does."""
    # A kernel that reads another device's memory faults when the process that owned it is gone.
    words = ("gloo", "nccl", "connection", "process group", "timed out", "store", "cuda error")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def _what(error: BaseException) -> str:
    if isinstance(error, (KeyboardInterrupt, Interrupted)):
        return "was interrupted"
    if isinstance(error, H3CompileError):
        return f"failed: {error.cause}"
    return f"failed with {type(error).__name__}: {_line(error) or 'no message'}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _exchanges(thread: int) -> bool:
    """Whether a thread is in a collective of torch, or waits for a GPU, which does what is enqueued."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(("torch.distributed", "torch.cuda.streams")):
            return True
        frame = frame.f_back
    return False


def _close(state: _State, threads: list[threading.Thread]) -> None:
    with state.changed:
        state.closing = True
        state.changed.notify_all()
    deadline = time.monotonic() + _GRACE
    for thread in threads if threading.current_thread() not in threads else ():
        with suppress(RuntimeError):  # not started yet
            thread.join(max(0.0, deadline - time.monotonic()))
    state.peers.close()
