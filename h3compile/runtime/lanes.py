"""Where the operations of a schedule run: streams and events of a GPU, or one after the other on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from h3compile.plan.schedule import Stream

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DONE", "CudaLanes", "HostLanes", "Lanes", "Ticket", "lanes_for"]


class Ticket(Protocol):
    """A copy that may still be running."""

    def wait(self) -> None:
        """Returns when it has ended."""


class _Done:
    def wait(self) -> None:
        pass


# What has ended already.
DONE: Ticket = _Done()


class Lanes(Protocol):
    """A compute, a copy and a collective stream. Compute is the current one: the caller launches regions."""

    def adopt(self, *tensors: torch.Tensor) -> None:
        """Tells the allocator that copies write these; copies wait for what used their memory before."""

    def begin(self) -> None:
        """A forward begins, on whichever stream is current now."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        """Enqueues a copy from host memory; the source must stay as it is until the ticket is done."""

    def gather(self, source: torch.Tensor, target: torch.Tensor, group: ProcessGroup) -> Ticket:
        """Enqueues an AllGather: the sources of all ranks, one after the other, become the target."""

    def gathering(self) -> bool:
        """Whether an AllGather still runs, or waits to; any thread may ask."""

    def record(self, stream: Stream, event: str) -> None:
        """Marks ``event`` at this point of ``stream``."""

    def wait(self, stream: Stream, event: str) -> None:
        """Holds ``stream`` until ``event``, as recorded last, is reached; it must have been recorded."""


class HostLanes:
    """For a CPU: every operation has ended when the next begins."""

    def adopt(self, *tensors: torch.Tensor) -> None:
        pass

    def begin(self) -> None:
        pass

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        target.copy_(source)
        return DONE

    def gather(self, source: torch.Tensor, target: torch.Tensor, group: ProcessGroup) -> Ticket:
        dist.all_gather(list(target.chunk(group.size())), source, group=group)
        return DONE

    def gathering(self) -> bool:
        return False

    def record(self, stream: Stream, event: str) -> None:
        pass

    def wait(self, stream: Stream, event: str) -> None:
        pass


class CudaLanes:
    """For a GPU: copies on a stream of their own, so that they run behind the arithmetic."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._gathers = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._computing: torch.cuda.Stream | None = None
        self._events: dict[str, torch.cuda.Event] = {}

    def adopt(self, *tensors: torch.Tensor) -> None:
        for stream in (self._copies, self._gathers):
            stream.wait_stream(torch.cuda.current_stream(self._device))
            for tensor in tensors:
                # Freed while a copy runs, its memory must not be given to somebody else before that ended.
                tensor.record_stream(stream)

    def begin(self) -> None:
        current = torch.cuda.current_stream(self._device)
        if self._computing is not None and self._computing != current:
            current.wait_stream(self._computing)  # it waited for residents, and reads of slots ended there
        self._computing = current

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            return _Copying(self._copies)

    def gather(self, source: torch.Tensor, target: torch.Tensor, group: ProcessGroup) -> Ticket:
        with torch.cuda.stream(self._gathers):
            # The group has a stream of its own, which waits for this one, and for which this one waits.
            group._allgather_base(target, source).wait()
            return _Copying(self._gathers)

    def gathering(self) -> bool:
        try:
            return not self._gathers.query()
        except RuntimeError:  # on a device that has failed nothing runs
            return False

    def record(self, stream: Stream, event: str) -> None:
        # Recording again moves an event on; who waits already, waits for the place it had.
        found = self._events.setdefault(event, torch.cuda.Event())  # type: ignore[no-untyped-call]
        found.record(self._stream(stream))

    def wait(self, stream: Stream, event: str) -> None:
        self._stream(stream).wait_event(self._events[event])

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        match stream:
            case "copy":
                return self._copies
            case "collective":
                return self._gathers
        return torch.cuda.current_stream(self._device)


class _Copying:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


def lanes_for(device: torch.device) -> Lanes:
    """The lanes of ``device``."""
    return CudaLanes(device) if device.type == "cuda" else HostLanes()
