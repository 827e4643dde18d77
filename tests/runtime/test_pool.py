from __future__ import annotations

import gc
import threading

import pytest

from h3compile.runtime.pool import Pool


class Thing:
    pass


def test_a_key_gives_one_object_while_somebody_holds_it() -> None:
    pool = Pool()
    first = pool.share(("a",), Thing, Thing)
    assert pool.share(("a",), Thing, Thing) is first
    assert pool.share(("b",), Thing, Thing) is not first
    assert pool.holds(("a",)) and not pool.holds(("b",))


def test_the_pool_keeps_nothing_alive() -> None:
    pool = Pool()
    thing = pool.share(("a",), Thing, Thing)
    del thing
    gc.collect()
    assert not pool.holds(("a",))


def test_another_kind_under_a_key_is_refused() -> None:
    pool = Pool()
    thing = pool.share(("a",), Thing, Thing)
    with pytest.raises(TypeError, match="is a Thing, not a Pool"):
        pool.share(("a",), Pool, Pool)
    del thing


def test_threads_that_ask_at_once_make_it_once() -> None:
    pool, made, got = Pool(), [], []
    start = threading.Barrier(4)

    def make() -> Thing:
        made.append(1)
        return Thing()

    def ask() -> None:
        start.wait()
        got.append(pool.share(("a",), Thing, make))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and len(set(map(id, got))) == 1
