"""One rank calls the module and the others follow: it sends them the inputs of every forward.

Or calls them to add up what all have measured.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from h3compile.program.serialize import dtype_name, parse_dtype
from h3compile.runtime.ranks import Ranks

__all__ = ["MEASURED", "Coming", "Follower", "Leader"]

_LEADER = 0

# A call to add up what was measured.
_Measured = Literal["measured"]
MEASURED: _Measured = "measured"

# What will be sent: dtype and shape by name.
Coming = Mapping[str, tuple[str, list[int]]]


@dataclass(frozen=True)
class _Sent:
    given: weakref.ref[torch.Tensor]  # dead once its caller let go of it: no other tensor is this object
    version: int | None


class Leader:
    """Rank 0's side: for every forward `announce` and then, within it, `send`; `end` when no more will come.
    `announce_sum` is for what was measured.

    A tensor that is the same object as last time, not written to since, is not sent again: followers keep
    theirs, and see that nothing changed. A new leader sends everything, to followers that are new too.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._sent: dict[str, _Sent] = {}

    def announce(self, given: Mapping[str, torch.Tensor]) -> None:
        """Calls the followers to a forward of these inputs, tensors of any device."""
        coming = {
            name: (dtype_name(tensor.dtype), list(tensor.shape))
            for name, tensor in given.items()
            if not self._known(name, tensor)
        }
        self._tell(coming)

    def send(self, given: Mapping[str, torch.Tensor]) -> None:
        """What was announced."""
        for name, tensor in given.items():
            if self._known(name, tensor):
                continue
            data = tensor.detach().to(self._device).contiguous()
            if data.numel():
                dist.broadcast(data, group=self._ranks.group, group_src=_LEADER)
            self._sent[name] = _Sent(weakref.ref(tensor), None if tensor.is_inference() else tensor._version)

    def announce_sum(self) -> None:
        """Calls the followers to add up what was measured."""
        self._tell(MEASURED)

    def end(self) -> None:
        """Lets the followers return."""
        self._tell(None)

    def _known(self, name: str, tensor: torch.Tensor) -> bool:
        sent = self._sent.get(name)
        if sent is None or sent.given() is not tensor or sent.version is None:
            return False
        return sent.version == tensor._version

    def _tell(self, coming: Coming | _Measured | None) -> None:
        self._ranks.tell(json.dumps(coming))


class Follower:
    """The side of the other ranks: `wait` for a forward and then, within it, `receive`."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._held: dict[str, torch.Tensor] = {}

    def wait(self) -> Coming | _Measured | None:
        """What will be sent, when rank 0 announces it; None when no more forwards will come.

        Or `MEASURED`, when it is to be added up what the ranks measured.

        Waits for as long as rank 0 does other things. Raises `RankFailure` when any rank is gone.
        """
        coming: Coming | _Measured | None = json.loads(self._ranks.hear())
        return coming

    def receive(self, coming: Coming) -> dict[str, torch.Tensor]:
        """All inputs of the forward, on this rank's device; those not sent are the same as last time."""
        for name, (dtype, shape) in coming.items():
            data = torch.empty(shape, dtype=parse_dtype(dtype), device=self._device)
            if data.numel():
                dist.broadcast(data, group=self._ranks.group, group_src=_LEADER)
            self._held[name] = data
        return dict(self._held)
