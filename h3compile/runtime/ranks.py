"""The ranks that run an engine together: the process groups they exchange over, and what they agree on.

Every rank is a process with a device of its own. It calls the module with the same inputs as the others, has
its stretch of the rows, and gets the same outputs.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from h3compile.errors import EngineError, H3CompileError
from h3compile.ops.exchange_groups import ALL, RING, ULYSSES, Traffic, counting, find_group, name_group
from h3compile.program.parallel import Parallel
from h3compile.runtime.agreement import Word, difference
from h3compile.runtime.peers import Peers, identity
from h3compile.runtime.watch import PATIENCE, Watch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Ranks", "join"]

# Seconds between two looks of a rank that waits for the others: more, the longer it waits.
_SHORTEST, _LONGEST = 1e-4, 2e-2


class Ranks:
    """This process among those that run an engine together, from `join`.

    ``rank`` of ``size`` within ``group``, in the order of the rows. ``traffic`` counts what was sent.
    """

    def __init__(
        self,
        parallel: Parallel,
        group: dist.ProcessGroup,
        device: torch.device,
        store: Store,
        identities: Sequence[str],
        patience: float,
    ) -> None:
        self.parallel = parallel
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.traffic = Traffic()
        self._device = device
        self._store = store
        self._words = 0  # that this rank told or heard
        self._told: list[str] = []  # keys of those that not all may have heard yet
        self._named = _named_groups(parallel, group, device)
        self._aborted = [*{id(found): found for found in self._named.values()}.values()]
        traffic, aborted = self.traffic, self._aborted
        self.watch = Watch(
            store.clone(),
            self.rank,
            self.size,
            Peers(identities, self.rank),
            patience=patience,
            # A copy: another thread adds to it.
            sent=lambda: sum(tuple(traffic.sent.values())),
            abort=lambda: _abort(aborted, device),
        )

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A forward of all ranks: exchanges find their groups, and the watch is on; see `Watch.forward`."""
        with self.watch.forward(), counting(self.traffic):
            for name, group in self._named.items():
                name_group(name, group)
            yield
            self._arrive()

    def agree(self, word: Word) -> tuple[H3CompileError | None, bool]:
        """Why the ranks do not run this forward, once each has given its word; the same answer for all.

        With it whether all miss the same values of the request. To be asked within `forward`, and obeyed
        outside of it: nothing was exchanged, nothing has failed.
        """
        number = self.watch.number
        self._store.set(f"word/{number}/{self.rank}", word.encode())
        keys = [f"word/{number}/{rank}" for rank in range(self.size)]
        self._wait(keys, self.watch.check)
        words = self._store.multi_get(keys)
        # Who is here has read all words of the forward before, and heard what called it to this one.
        for key in (f"word/{number - 1}/{self.rank}", *self._told):
            self._store.delete_key(key)
        self._told.clear()
        decoded = [Word.decode(found) for found in words]
        return difference(decoded), len({found.missing for found in decoded}) == 1

    def inputs(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs that differ from rank to rank, from the layout that all ranks were given."""
        indices = {kind.index: values[kind.index] for kind in self.parallel.kinds}
        return self.parallel.values(values["token_tags"].shape[0], indices, self.rank)

    def another_group(self) -> dist.ProcessGroup:
        """A group of the same ranks whose exchanges wait for no other's; every rank must ask for it."""
        made = _group_of(dist.get_process_group_ranks(self.group), self.group, self._device, "weights")
        self._aborted.append(made)
        return made

    def tell(self, text: str) -> None:
        """Leaves a word for the other ranks, who `hear` one after the other for as long as they run."""
        key = f"told/{self._words}"
        try:
            self._store.set(key, text)
        except RuntimeError as error:  # of the store
            raise self.watch.lost(error) from error
        self._words += 1
        self._told.append(key)

    def hear(self) -> bytes:
        """The next word that a rank left, after waiting for it; raises `RankFailure` when a rank is gone."""
        key = f"told/{self._words}"
        try:
            with self.watch.listening():
                self._wait([key], self.watch.check)
                found = self._store.get(key)
        except RuntimeError as error:  # of the store
            raise self.watch.lost(error) from error
        self._words += 1
        return found

    def close(self) -> None:
        """Ends the watch."""
        self.watch.close()

    def _arrive(self) -> None:
        """Waits for the device: a forward whose exchanges are enqueued is none that has been computed.

        Outside of the forward nobody would free this rank from an exchange with one that has ended, and what
        such an exchange leaves behind must not be taken for the outputs.
        """
        if self._device.type == "cuda":
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            event.synchronize()

    def _wait(self, keys: list[str], look: Callable[[], None]) -> None:
        # Not by the store's own wait, which tells stderr of every second in which nothing came.
        pause = _SHORTEST
        while not self._store.check(keys):
            look()
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST)


def join(
    parallel: Parallel | None,
    device: torch.device,
    digest: str,
    group: dist.ProcessGroup | None = None,
    patience: float = PATIENCE,
) -> Ranks | None:
    """This process among the ranks of an engine built for ``parallel``; None for an engine of one rank.

    ``group`` are the ranks, by default all processes of `torch.distributed`, which is initialized already.
    Every one of them must join, with the same ``digest`` of engine and plan. Raises `EngineError` where this
    is none of them, they are not as many as the engine needs, or speak a backend that its device cannot,
    `H3CompileError` when one of them does not come within ``patience`` seconds.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise EngineError(
            "this process is not in the group given", "load the engine on the ranks of the group alone"
        )
    if parallel is None:
        if group is not None and group.size() > 1:
            raise EngineError(
                f"the engine was built for one rank, and the group has {group.size()}",
                f"build it with the pass sp(ranks={group.size()})",
            )
        return None
    if not (dist.is_available() and dist.is_initialized()):
        count = parallel.ranks
        raise EngineError(
            f"the engine was built for {count} ranks, and this process runs alone",
            f"start it with torchrun --nproc-per-node {count}, or with h3compile run --gpus {count}",
        )
    ranks = group if group is not None else dist.group.WORLD
    assert ranks is not None
    if ranks.size() != parallel.ranks:
        of = "the process group has" if group is None else "the group given has"
        mend = f"start {parallel.ranks} processes, or build it for {ranks.size()}"
        if group is None and ranks.size() > parallel.ranks:
            mend = f"give a group of {parallel.ranks} of them: load(path, group=)"
        raise EngineError(f"the engine was built for {parallel.ranks} ranks, and {of} {ranks.size()}", mend)
    _require_backend(ranks, device)
    store = _own_store(ranks)
    identities = _meet(store, ranks.rank(), ranks.size(), digest, patience)
    return Ranks(parallel, ranks, device, store, identities, patience)


def _require_backend(group: dist.ProcessGroup, device: torch.device) -> None:
    wanted = "nccl" if device.type == "cuda" else "gloo"
    try:
        spoken = group._get_backend(torch.device(device.type)).name()
    except RuntimeError:
        spoken = "none"
    if spoken.lower() != wanted:
        raise EngineError(
            f"the ranks' backend for {device.type} is {spoken}, and exchanges there need {wanted}",
            f"torch.distributed.init_process_group({wanted!r})",
        )


def _own_store(group: dist.ProcessGroup) -> Store:
    """A store for this engine alone, over a connection of its own."""
    from torch._C._distributed_c10d import PrefixStore

    base = group.get_group_store().clone()
    # Ranks load the same engines in the same order, so the count is the same for all.
    number = base.add(f"h3compile/joined/{group.rank()}", 1)
    return PrefixStore(f"h3compile/{number}", base)


def _meet(store: Store, rank: int, size: int, digest: str, patience: float) -> list[str]:
    """Waits for all ranks; the identities of their processes."""
    store.set_timeout(timedelta(seconds=patience))
    store.set(f"rank/{rank}", json.dumps([identity(), digest]))
    keys = [f"rank/{other}" for other in range(size)]
    try:
        store.wait(keys, timedelta(seconds=patience))
    except RuntimeError:
        absent = [str(other) for other in range(size) if not store.check([f"rank/{other}"])]
        if not absent:
            raise
        raise H3CompileError(
            f"rank {', '.join(absent)} did not load the engine within {patience:g} s",
            "load it on every rank, in the same order",
        ) from None
    words = [json.loads(word) for word in store.multi_get(keys)]
    for other, (_, found) in enumerate(words):
        if found != words[0][1]:
            raise EngineError(
                f"ranks 0 and {other} load different engines, weights or plans", "give every rank the same"
            )
    return [text for text, _ in words]


def _named_groups(
    parallel: Parallel, group: dist.ProcessGroup, device: torch.device
) -> dict[str, dist.ProcessGroup]:
    """The groups that programs exchange over, by their names."""
    ranks, own, shared = dist.get_process_group_ranks(group), group.rank(), parallel.ulysses
    if parallel.ring == 1:
        return {ALL: group, ULYSSES: group}
    named = {ALL: group, RING: _group_of(ranks[own % shared :: shared], group, device, "ring")}
    if shared > 1:
        first = own - own % shared
        named[ULYSSES] = _group_of(ranks[first : first + shared], group, device, "heads")
    return named


def _group_of(
    ranks: list[int], like: dist.ProcessGroup, device: torch.device, purpose: str
) -> dist.ProcessGroup:
    """A group for ``device`` of these ranks of the world, which all must ask for it, and nobody else.

    ``like`` is a group that speaks its backend. Engines that are loaded one after the other get the same for
    one ``purpose``: a communicator takes device memory, and is never given back.
    """
    name = f"h3compile.{purpose}.{device.type}.{'-'.join(map(str, ranks))}"
    known = find_group(name)
    if known is not None:
        return known
    if device.type != "cuda":
        made = dist.new_group(ranks, backend=dist.get_backend_config(like), use_local_synchronization=True)
    else:
        options = dist.ProcessGroupNCCL.Options()
        # What is exchanged behind the arithmetic needs a few multiprocessors, and would otherwise wait until
        # a kernel that was launched beside it has handed out all of its blocks.
        options.is_high_priority_stream = True
        with _unsplit():
            made = dist.new_group(
                ranks, backend="cuda:nccl", pg_options=options, use_local_synchronization=True
            )
    assert isinstance(made, dist.ProcessGroup)
    name_group(name, made)
    return made


@contextmanager
def _unsplit() -> Iterator[None]:
    """Groups made in the block get communicators of their own.

    Where the world was initialized with a ``device_id``, torch would split the world's communicator for them,
    and all processes of the world would have to take part in that, those of other engines too.
    """
    world = dist.group.WORLD
    assert world is not None
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def _abort(groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Ends what runs on these groups, where the backend can: gloo cannot, and its ranks end as processes."""
    if device.type != "cuda":
        return
    # Each in a thread of its own: one communicator's abort may wait for that of another.
    for group in tuple(groups):
        # Of a group that speaks to the CPU too, the backend for the device alone: gloo's refuses.
        end = group._get_backend(device).abort
        threading.Thread(target=end, name="h3compile-abort", daemon=True).start()
