"""A plan: one choice of everything, with what it takes and how long, as it is shown and drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from h3compile.plan import races
from h3compile.plan.components import other_seconds
from h3compile.plan.cost import RequestSeconds, moved_bytes, request_seconds
from h3compile.plan.memory import MemoryPlan
from h3compile.plan.residency import Residency
from h3compile.plan.schedule import Operation, Schedule, Stream
from h3compile.plan.search import Candidate
from h3compile.plan.simulate import Timeline, simulate
from h3compile.plan.space import Space
from h3compile.targets import Node

__all__ = ["Plan", "checked"]

# Steps until the first one is forgotten, and slots and blocks have met in every way they do.
_STEPS = 6


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Who computes what and where weights live, for one clip on one node: a prediction.

    ``step`` is seconds of a forward under the plan; ``limit`` what may be used of each device, None where
    nobody said.
    """

    node: Node
    space: Space
    residency: Residency
    step: float
    limit: int | None

    def __repr__(self) -> str:
        return f"<Plan {self.node} {self.residency}: {self.step:.3f} s, {self.device_bytes:,} bytes>"

    @cached_property
    def memory(self) -> MemoryPlan:
        """Bytes of each device and of the host for each device."""
        return self.space.memory(self.residency)

    @property
    def device(self) -> Mapping[str, int]:
        """Bytes of a device by kind, in the phase that needs the most."""
        return self.memory.device[self.memory.phase]

    @property
    def device_bytes(self) -> int:
        """Bytes of a device in that phase."""
        return self.memory.peak

    @property
    def host(self) -> Mapping[str, int]:
        """Bytes of the machine's memory by kind, for all devices together."""
        pinned = {f"pinned {kind}": count for kind, count in self.memory.pinned.items()}
        parts = {**pinned, **self.memory.pageable}
        return {kind: count * self.space.devices for kind, count in parts.items() if count}

    @property
    def host_bytes(self) -> int:
        """Bytes of the machine's memory."""
        return sum(self.host.values())

    @property
    def resident_step(self) -> float:
        """Seconds of a forward on the same devices with all weights there."""
        blocks = self.residency.blocks
        return self.space.load(Residency(blocks, blocks, 0)).compute

    @property
    def slowdown(self) -> float:
        """By what share a step is longer than with all weights on the devices."""
        return self.step / self.resident_step - 1

    @cached_property
    def request(self) -> RequestSeconds:
        """Seconds of a request, by part."""
        space, clip = self.space, self.space.clip
        return request_seconds(
            space.work,
            space.target,
            clip.dims,
            forwards=clip.forwards,
            step=self.step,
            shards=space.parallel.shards,
            others=other_seconds(
                space.target,
                frames=clip.frames,
                width=clip.width,
                height=clip.height,
                shards=space.parallel.shards,
            ),
        )

    @property
    def clips_an_hour(self) -> float:
        """What the node makes when it is never idle."""
        return 3600 / self.request.total * self.space.replicas

    @property
    def copied_bytes(self) -> int:
        """Bytes that come from the host to each device in a step."""
        work, dims = self.space.work, self.space.clip.dims
        moved = sum(moved_bytes(work.call(name), work, dims) for name in self.residency.streamed)
        return round(moved / (self.space.parallel.ranks if self.residency.mode == "allgather" else 1))

    @cached_property
    def timeline(self) -> Timeline:
        """Some steps of many, simulated from the first on with the residents there."""
        return simulate(self._operations(_STEPS), self.space.seconds(self.residency))

    @property
    def window(self) -> tuple[float, float]:
        """When the last of the simulated steps began and ended on the kernels' stream, in seconds."""
        kernels = self.timeline.on("compute")
        return kernels[-1 - len(kernels) // _STEPS].end, kernels[-1].end

    @cached_property
    def bounds(self) -> Mapping[Stream, float]:
        """What the critical path of a step is made of: shares by stream."""
        begin, end = self.window
        shares: dict[Stream, float] = {"compute": 0.0, "copy": 0.0, "collective": 0.0}
        for span in self.timeline.critical_path():
            shares[span.stream] += max(0.0, min(span.end, end) - max(span.start, begin))
        return {stream: seconds / (end - begin) for stream, seconds in shares.items()}

    def record(self) -> dict[str, object]:
        """Everything that is known of it, as plain values: bytes and seconds."""
        space, clip, residency = self.space, self.space.clip, self.residency
        return {
            "predicted": True,
            "target": self.node.target.name,
            "gpus": self.node.count,
            "gpus_a_clip": space.parallel.shards,
            "clips_at_once": space.replicas,
            "passes": space.passes,
            "clip": {"task": clip.task, "width": clip.width, "height": clip.height, "frames": clip.frames}
            | {"steps": clip.steps, "forwards": clip.forwards}
            | clip.dims,
            "resident": len(residency.resident),
            "resident_blocks": list(residency.resident),
            "slots": residency.slots,
            "mode": residency.mode,
            "pieces": residency.pieces,
            "weights_gathered_by": space.parallel.ranks if residency.mode == "allgather" else 1,
            "step_seconds": self.step,
            "step_seconds_all_resident": self.resident_step,
            "request_seconds": {
                "total": self.request.total,
                "request": self.request.request,
                "steps": self.request.steps,
                **self.request.others,
            },
            "critical_path": dict(self.bounds),
            "copied_bytes_a_step": self.copied_bytes,
            "components": {tenant.name: tenant.placement for tenant in space.tenants},
            "device_bytes": {phase: dict(kinds) for phase, kinds in self.memory.device.items()},
            "device_bytes_peak": self.device_bytes,
            "device_bytes_limit": self.limit,
            "host_bytes": dict(self.host),
            "host_bytes_total": self.host_bytes,
        }

    def _operations(self, steps: int, *, loaded: bool = True) -> list[Operation]:
        work = self.space.work
        schedule = Schedule(work.names("step"), work.names("request"), self.residency, loaded=loaded)
        found = list(schedule.request()) if not loaded else []
        for _ in range(steps):
            found += schedule.step()
        return found

    def races(self) -> list[races.Race]:
        """What may go wrong in a request from a cold start, and its steps: nothing, or there is a bug."""
        work, dims, ranks = self.space.work, self.space.clip.dims, self.space.parallel.ranks
        sizes = {
            name: round(moved_bytes(work.call(name), work, dims))
            for name in (*work.names("request"), *self.residency.blocks)
        }
        kinds = self.memory.device["denoise"]
        limit = kinds.get("slots", 0) + kinds.get("shards", 0)
        limit += sum(sizes[name] for name in self.residency.resident)
        return races.check(self._operations(3, loaded=False), self.residency, sizes, limit, ranks=ranks)


def checked(node: Node, space: Space, candidate: Candidate, limit: int | None) -> Plan:
    """The plan of a candidate, measured by itself and its schedule checked; RuntimeError where that fails."""
    plan = Plan(node, space, candidate.residency, candidate.step * space.together, limit)
    if found := plan.races():
        raise RuntimeError(f"the schedule of {candidate.residency} is not safe: {found[0]}")
    if plan.device_bytes != candidate.device:
        raise RuntimeError(f"{candidate.residency} takes {plan.device_bytes} bytes, not {candidate.device}")
    return plan
