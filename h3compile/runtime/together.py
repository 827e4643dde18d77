"""A forward of several ranks: they agree that all can run it, or none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from h3compile.errors import H3CompileError
from h3compile.runtime.agreement import Word, digest, shape_digest
from h3compile.runtime.forward import Forward, Ready
from h3compile.runtime.lead import MEASURED, Follower, Leader
from h3compile.runtime.measures import MeasuredStep, summed
from h3compile.runtime.parts import Parts
from h3compile.runtime.ranks import Ranks
from h3compile.runtime.runner import Check
from h3compile.runtime.validate import check_shapes

__all__ = ["Together"]

Given = Mapping[str, torch.Tensor]
Outputs = tuple[torch.Tensor, torch.Tensor]


class Together:
    """Forwards of ``ranks``: each calls `step` with the same inputs, or one is `leading` others."""

    def __init__(self, ranks: Ranks, parts: Parts, forward: Forward) -> None:
        self._ranks = ranks
        self._parts = parts
        self._forward = forward
        self._leader: Leader | None = None
        self._digests: dict[str, str] = {}  # of inputs that are kept

    def step(self, given: Given, stop: bool, obey: Check) -> Outputs:
        """The outputs of ``given``; all ranks stop before it when one of them is to ``stop``.

        Raises `H3CompileError` when a rank refuses what it was given or was given something else: the next
        forward may run. Raises `RankFailure` when one failed, ended or hangs: none will.
        """
        leader = self._leader
        if leader is not None:
            check_shapes(self._parts.ports, self._parts.manifest.dims, given)  # refused: not announced
            leader.announce(given)

        def bring() -> Given:
            if leader is not None:
                leader.send(given)
            return given

        outcome = self._step(bring, stop, obey)
        if isinstance(outcome, H3CompileError):
            raise outcome
        return outcome

    def measured(self) -> tuple[MeasuredStep, ...]:
        """What the steps of the request measured, added up over the ranks: all must ask, or rank 0 `leading`.

        Raises `H3CompileError` where a rank asks for something else, a forward or the sum of fewer steps.
        """
        if not self._parts.measures.names:
            return ()
        if self._leader is not None:
            self._leader.announce_sum()
        outcome = self._measured()
        if isinstance(outcome, H3CompileError):
            raise outcome
        return outcome

    @contextmanager
    def leading(self) -> Iterator[None]:
        """The other ranks follow this one, rank 0, while the block runs."""
        if self._ranks.rank != 0:
            raise H3CompileError(
                f"rank {self._ranks.rank} cannot lead", "lead on rank 0, and follow on the others"
            )
        self._leader = leader = Leader(self._ranks, self._parts.device)
        try:
            yield
        finally:
            self._leader = None
            leader.end()

    def following(self) -> Iterator[Callable[[bool, Check], Outputs | H3CompileError | None]]:
        """What to call for every forward of rank 0, until it does not lead any more: `step` without inputs.

        What this rank would raise because a rank refuses is returned: rank 0 raises it. None: it was no
        forward, what was measured has been added up.
        """
        follower = Follower(self._ranks, self._parts.device)
        while (coming := follower.wait()) is not None:
            if coming == MEASURED:
                yield self._add_measured
            else:
                yield partial(self._step, partial(follower.receive, coming))

    def _add_measured(self, stop: bool, obey: Check) -> H3CompileError | None:
        outcome = self._measured()
        return outcome if isinstance(outcome, H3CompileError) else None

    def _measured(self) -> tuple[MeasuredStep, ...] | H3CompileError:
        steps = self._parts.measures.steps
        with self._ranks.forward():  # for its watch
            found, _ = self._ranks.agree(Word(measured=len(steps)))
            if found is None:
                return summed(steps, self._ranks.group)
        return found

    def _step(self, bring: Callable[[], Given], stop: bool, obey: Check) -> Outputs | H3CompileError:
        ready: Ready | None = None
        own: H3CompileError | None = None
        with self._ranks.forward():
            given = bring()
            try:
                ready = self._forward.prepare(given)
                word = Word(self._digested(given, ready), self._parts.request.missing, stop)
            except H3CompileError as error:
                own, word = error, Word(refusal=error.cause)
            found, even = self._ranks.agree(word)
            if found is None and ready is not None:
                if not even:
                    self._parts.request.release()
                return self._forward.run(ready, obey)
        # Nothing was exchanged, so the next forward may run.
        refused = own or found
        assert refused is not None
        return refused

    def _digested(self, given: Given, ready: Ready) -> dict[str, str]:
        """What tells this rank's inputs from those of others.

        The contents of those that are kept, and the shapes of the others; their contents too when a request
        begins, because a rank that draws noise of its own goes wrong from there on.
        """
        kept = self._parts.inputs.kept
        for name in kept & (ready.changed | (kept - self._digests.keys())):
            self._digests[name] = digest(ready.values[name])
        found = dict(self._digests)
        for name in given.keys() - kept:
            found[f"shapes of {name}"] = shape_digest(given[name])
            if self._forward.begins(ready):
                found[name] = digest(ready.values[name])
        return found
