"""Ranks as real processes: how they meet, what they agree on, and that one failing ends all of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from h3compile.errors import EngineError, H3CompileError, Interrupted, RankFailure
from h3compile.ops.exchange_groups import ALL, RING, ULYSSES, group_of, sent
from h3compile.program.parallel import Parallel
from h3compile.runtime.agreement import Word
from h3compile.runtime.lead import Follower, Leader
from h3compile.runtime.ranks import Ranks, join

CPU = torch.device("cpu")
PATIENCE = 2.0


@dataclass(frozen=True)
class End:
    """How a rank ended: its process's exit code, what it had to say, and the seconds from meeting to end."""

    code: int | None
    kind: str = ""
    text: str = ""
    mine: bool = False
    seconds: float = 0.0


Start = Callable[..., list[End]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A function that runs ``work(rank, size)`` in ``count`` forked processes and tells how each ended.

    A process of its own holds their store and outlives them, or rank 0 does, as where nobody says more.
    """
    # Torch asks for the name of every address it connects to; where none answers that takes 5 s.
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")

    def run(
        count: int, work: Callable[[int, int], object], seconds: float = 60, rank_0_holds_store: bool = False
    ) -> list[End]:
        fork = multiprocessing.get_context("fork")
        # Whoever holds the store is started first: nothing is forked beside its threads.
        ours, theirs = fork.Pipe()
        if rank_0_holds_store:
            host = fork.Process(target=_rank, args=(0, count, theirs, work, tmp_path))
        else:
            host = fork.Process(target=_host, args=(theirs,), daemon=True)
        host.start()
        port: int = ours.recv()
        children = [
            fork.Process(target=_rank, args=(rank, count, port, work, tmp_path))
            for rank in range(rank_0_holds_store, count)
        ]
        for child in children:
            child.start()
        if rank_0_holds_store:
            children.insert(0, host)
        deadline = time.monotonic() + seconds
        try:
            for child in children:
                child.join(max(0.0, deadline - time.monotonic()))
            return [_end(tmp_path / str(rank), child.exitcode) for rank, child in enumerate(children)]
        finally:
            for child in {*children, host}:
                child.kill()
                child.join()

    return run


def _host(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(600)


def _end(path: Path, code: int | None) -> End:
    return End(code, **json.loads(path.read_text())) if path.exists() else End(code)


def _rank(
    rank: int, count: int, port: int | Connection, work: Callable[[int, int], object], folder: Path
) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    torch.set_num_threads(1)
    if isinstance(port, int):
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    store.set(f"connected/{rank}", "")
    store.wait(
        [f"connected/{other}" for other in range(count)]
    )  # before one goes and takes connections along
    begun, said = time.monotonic(), {"kind": "", "text": ""}
    try:
        said["text"] = str(work(rank, count) or "")
    except BaseException as error:
        said = {"kind": type(error).__name__, "text": str(error), "mine": getattr(error, "mine", False)}
    partial = folder / f"{rank}.partial"
    partial.write_text(json.dumps(said | {"seconds": time.monotonic() - begun}))
    partial.rename(folder / str(rank))
    if not said["kind"]:
        dist.barrier()  # whoever ends first takes the connections of the others along
    os._exit(1 if said["kind"] else 0)


def exchange(ranks: Ranks) -> None:
    given = torch.full((ranks.size,), float(ranks.rank))
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given, group=group_of(ULYSSES, ranks.size))
    sent("toy", given.nbytes)
    assert taken.tolist() == list(range(ranks.size))


def forwards(ranks: Ranks, words: Mapping[int, Word], at: Callable[[int], None]) -> list[str]:
    """Five forwards of three exchanges each; ``at`` is called before the second one of every forward."""
    refused = []
    for number in range(5):
        with ranks.forward():
            found, _ = ranks.agree(words.get(number, Word({"x": "1"})))
            if found is None:
                for count in range(3):
                    ranks.watch.tick()
                    if count == 1:
                        at(number)
                    exchange(ranks)
        if found is not None:
            refused.append(f"{number} {type(found).__name__} {found.cause}")
    return refused


def test_ranks_meet_exchange_and_count_what_they_sent(start: Start) -> None:
    def work(rank: int, size: int) -> object:
        ranks = join(Parallel(size), CPU, "digest")
        assert ranks is not None and (ranks.rank, ranks.size) == (rank, size)
        assert forwards(ranks, {}, lambda number: None) == []
        with ranks.forward():
            assert group_of(ALL, size).size() == size
        other = ranks.another_group()
        given = torch.tensor([rank])
        dist.all_reduce(given, group=other)
        return ranks.traffic.total, given.item()

    assert [end.text for end in start(4, work)] == [f"({15 * 16}, 6)"] * 4


def test_engines_loaded_one_after_the_other_share_their_groups(start: Start) -> None:
    def work(rank: int, size: int) -> object:
        one, other = (join(Parallel(1, ring=2), CPU, f"digest {number}") for number in range(2))
        assert one is not None and other is not None
        with one.forward():
            ring = group_of(RING, 2)
        with other.forward():
            again = group_of(RING, 2)
        weights = one.another_group()
        return ring is again, weights is other.another_group(), weights is ring, ring is one.group

    assert [end.text for end in start(2, work)] == ["(True, True, False, False)"] * 2


def test_a_ring_has_neighbours_that_share_heads(start: Start) -> None:
    def work(rank: int, size: int) -> object:
        ranks = join(Parallel(2, ring=2), CPU, "digest")
        assert ranks is not None
        with ranks.forward():
            return [dist.get_process_group_ranks(group_of(name, 2)) for name in (ULYSSES, RING)]

    found = [end.text for end in start(4, work)]
    assert found == ["[[0, 1], [0, 2]]", "[[0, 1], [1, 3]]", "[[2, 3], [0, 2]]", "[[2, 3], [1, 3]]"]


def test_a_process_alone_is_told_how_to_start() -> None:
    with pytest.raises(EngineError) as raised:
        join(Parallel(4), CPU, "digest")
    assert str(raised.value) == (
        "the engine was built for 4 ranks, and this process runs alone: "
        "start it with torchrun --nproc-per-node 4, or with h3compile run --gpus 4"
    )
    assert join(None, CPU, "digest") is None


@pytest.mark.parametrize(
    ("parallel", "line"),
    [
        (Parallel(4), "4 ranks, and the process group has 3: start 4 processes, or build it for 3"),
        (Parallel(2), "2 ranks, and the process group has 3: give a group of 2 of them: load(path, group=)"),
        (None, "for one rank, and the group has 3: build it with the pass sp(ranks=3)"),
    ],
)
def test_another_number_of_ranks_is_refused(start: Start, parallel: Parallel | None, line: str) -> None:
    def work(rank: int, size: int) -> object:
        return join(parallel, CPU, "digest", group=dist.group.WORLD if parallel is None else None)

    ends = start(3, work)
    assert {end.kind for end in ends} == {"EngineError"}
    assert all(end.text.endswith(line) for end in ends), ends[0].text


def test_ranks_with_other_engines_are_refused(start: Start) -> None:
    ends = start(2, lambda rank, size: join(Parallel(2), CPU, f"digest {rank}"))
    assert [end.text for end in ends] == [
        "ranks 0 and 1 load different engines, weights or plans: give every rank the same"
    ] * 2


def test_a_rank_that_does_not_load_is_named(start: Start) -> None:
    def work(rank: int, size: int) -> object:
        if rank == 1:
            time.sleep(1.5)
            return None
        return join(Parallel(size), CPU, "digest", patience=1)

    first, second = start(2, work, seconds=20)
    assert first.text.startswith("rank 1 did not load the engine within 1 s"), first
    assert second.kind == ""


def test_ranks_stop_and_refuse_together_and_go_on(start: Start) -> None:
    def work(rank: int, size: int) -> object:
        ranks = join(Parallel(size), CPU, "digest")
        assert ranks is not None
        words = {
            1: Word({"x": "1"}, stop=rank == 2),
            2: Word({"x": "1"}, refusal="no rows" if rank == 1 else None),
            3: Word({"x": "2" if rank == 2 else "1"}),
        }
        return forwards(ranks, words, lambda number: None)

    (text,) = {end.text for end in start(3, work)}
    assert text == str(
        [
            "1 Interrupted the forward was stopped",
            "2 H3CompileError rank 1 refuses its inputs: no rows",
            "3 H3CompileError ranks 0 and 2 were given different x",
        ]
    )
    assert issubclass(Interrupted, H3CompileError)


def _fails(how: str, victim: int = 2) -> Callable[[int, int], object]:
    """Rank ``victim`` fails in the middle of the third forward."""

    def work(rank: int, size: int) -> object:
        ranks = join(Parallel(size), CPU, "digest", patience=PATIENCE)
        assert ranks is not None

        def at(number: int) -> None:
            if rank != victim or number != 2:
                return
            match how:
                case "raise":
                    raise ValueError("boom")
                case "refuse":
                    raise H3CompileError("no memory left", "take less")
                case "interrupt":
                    raise KeyboardInterrupt
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    time.sleep(1000)
                case "freeze":
                    os.kill(os.getpid(), signal.SIGSTOP)

        return forwards(ranks, {}, at)

    return work


@pytest.mark.parametrize(
    ("how", "code", "reason"),
    [
        ("raise", 1, "rank 2 failed with ValueError: boom"),
        ("refuse", 1, "rank 2 failed: no memory left: take less"),
        ("interrupt", 1, "rank 2 was interrupted"),
        ("kill", -signal.SIGKILL, "rank 2 has ended while the others are in forward 3"),
    ],
)
def test_one_rank_failing_ends_all_with_its_reason(start: Start, how: str, code: int, reason: str) -> None:
    ends = start(4, _fails(how), seconds=20)
    assert [end.code for end in ends] == [1, 1, code, 1]
    for end in (ends[0], ends[1], ends[3]):
        assert end.kind == RankFailure.__name__ and end.text.startswith(reason), end
        assert end.seconds < 10, end
    # One of them is to report it: rank 2 where it can.
    assert sum(end.mine for end in ends) == (how == "kill")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("hang", "rank 2 came no further in forward 3 for 2 s"),
        ("freeze", "rank 2 has given no sign of life for"),
    ],
)
def test_a_hung_rank_ends_all_as_processes_where_gloo_does_not_let_go(
    start: Start, capfd: pytest.CaptureFixture[str], how: str, reason: str
) -> None:
    ends = start(3, _fails(how), seconds=11)
    assert all(end.code == 1 for end in ends[:2]), ends
    assert how == "freeze" or ends[2].code == 1, "it was sleeping, and still"
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: {reason}"), lines


@pytest.mark.parametrize(
    ("how", "code", "reason"),
    [
        ("raise", 1, "rank 0 failed with ValueError: boom"),
        ("kill", -signal.SIGKILL, "rank 0 has ended"),
    ],
)
def test_the_rank_that_holds_the_store_ends_all_with_its_reason(
    start: Start, how: str, code: int, reason: str
) -> None:
    first, *others = start(3, _fails(how, victim=0), seconds=20, rank_0_holds_store=True)
    assert first.code == code
    for end in others:
        assert end.kind == RankFailure.__name__ and end.text.startswith(reason), end
        assert end.code == 1 and end.seconds < 5, end


def test_a_reason_reaches_all_though_the_rank_that_holds_the_store_ends_of_it(start: Start) -> None:
    first, second, third = start(3, _fails("raise", victim=1), seconds=20, rank_0_holds_store=True)
    for end in (first, third):
        assert end.kind == RankFailure.__name__ and not end.mine, end
        assert end.text.startswith("rank 1 failed with ValueError: boom"), end
    assert second.kind == "ValueError"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["exchange", "agreement", "between forwards"])
def test_a_stopped_rank_that_holds_the_store_ends_all_as_processes(
    start: Start, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    def work(rank: int, size: int) -> object:
        if where == "exchange":
            return _fails("freeze", victim=0)(rank, size)
        ranks = join(Parallel(size), CPU, "digest", patience=PATIENCE)
        assert ranks is not None
        assert forwards(ranks, {}, lambda number: None) == []
        if rank == 0:
            time.sleep(0.5)  # the others are waiting
            os.kill(os.getpid(), signal.SIGSTOP)
        if where == "between forwards":
            return ranks.hear()
        return forwards(ranks, {}, lambda number: None)

    first, *others = start(3, work, seconds=11, rank_0_holds_store=True)
    assert first.code is None, "it is stopped"
    assert [end.code for end in others] == [1, 1]
    lines = capfd.readouterr().err.splitlines()
    reason = "error: the process that holds the ranks' store has given no sign of life for 2 s"
    assert len(lines) == 2 and all(line.startswith(reason) for line in lines), lines


def test_the_watch_stays_for_exchanges_that_a_forward_leaves_behind(start: Start) -> None:
    def work(rank: int, size: int) -> object:
        ranks = join(Parallel(size), CPU, "digest")
        assert ranks is not None
        ranks.watch.stay_for(lambda: rank == 0)
        forwards(ranks, {}, lambda number: None)
        if rank == 1:
            os._exit(3)
        deadline = time.monotonic() + 10
        while ranks.watch.failure is None and time.monotonic() < deadline:
            time.sleep(0.02)
        with ranks.forward():
            raise AssertionError("the next forward is told before it begins")

    first, second = start(2, work, seconds=20)
    assert second.code == 3
    assert first.kind == RankFailure.__name__ and first.text.startswith("rank 1 has ended"), first
    assert first.seconds < 5


def test_followers_compute_what_the_leader_is_given(start: Start) -> None:
    layout = torch.arange(7)

    def work(rank: int, size: int) -> object:
        ranks = join(Parallel(size), CPU, "digest")
        assert ranks is not None
        if rank == 0:
            leader = Leader(ranks, CPU)
            for step in range(3):
                given = {"layout": layout, "empty": torch.zeros(0), "x": torch.full((2,), float(step))}
                leader.announce(given)
                with ranks.forward():
                    leader.send(given)
            layout.add_(1)  # the same object, written to
            leader.announce(given)
            with ranks.forward():
                leader.send(given)
            leader.end()
            return None
        follower, seen = Follower(ranks, CPU), []
        while (coming := follower.wait()) is not None:
            with ranks.forward():
                taken = follower.receive(coming)
                seen.append((sorted(coming), taken["layout"].sum().item(), taken["x"].tolist()))
        return seen

    ends = start(3, work)
    assert (
        ends[1].text
        == ends[2].text
        == str(
            [
                (["empty", "layout", "x"], 21, [0.0, 0.0]),
                (["empty", "x"], 21, [1.0, 1.0]),
                (["empty", "x"], 21, [2.0, 2.0]),
                (["layout"], 28, [2.0, 2.0]),
            ]
        )
    )


def test_another_leader_is_followed_to_what_it_announces_and_words_do_not_pile_up(start: Start) -> None:
    def work(rank: int, size: int) -> object:
        ranks = join(Parallel(size), CPU, "digest", patience=PATIENCE)
        assert ranks is not None
        if rank == 0:
            keys = []
            for block in range(2):
                time.sleep(1.2 * PATIENCE * block)
                leader = Leader(ranks, CPU)
                for step in range(8):
                    x = torch.full((2 + block,), float(step))
                    held = weakref.ref(x)
                    leader.announce({"x": x})
                    with ranks.forward():
                        leader.send({"x": x})
                        ranks.agree(Word())
                    del x
                    assert held() is None, "whose caller let go of it"
                    keys.append(ranks._store.num_keys())
                leader.end()
            return max(keys) - min(keys)
        blocks: list[list[list[float]]] = []
        for _ in range(2):
            follower, seen = Follower(ranks, CPU), []
            while (coming := follower.wait()) is not None:
                with ranks.forward():
                    seen.append(follower.receive(coming)["x"].tolist())
                    ranks.agree(Word())
            blocks.append(seen)
        return blocks

    first, *others = start(3, work)
    expected = [[[float(step)] * length for step in range(8)] for length in (2, 3)]
    assert [end.text for end in others] == [str(expected)] * 2
    # Words of the others that wait to be deleted, and that the block before has ended.
    assert int(first.text or 0) <= 3, first


def test_followers_notice_that_the_leader_is_gone(start: Start) -> None:
    def work(rank: int, size: int) -> object:
        ranks = join(Parallel(size), CPU, "digest")
        assert ranks is not None
        if rank == 0:
            os._exit(3)
        return Follower(ranks, CPU).wait()

    ends = start(3, work, seconds=20)
    assert [end.code for end in ends] == [3, 1, 1]
    assert all(end.text.startswith("rank 0 has ended") for end in ends[1:]), ends
