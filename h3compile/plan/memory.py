"""Where the bytes are: on the device by kind and phase of a request, and on the host, pinned or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from h3compile.plan.collectives import RING_HOLDS, RING_MERGES, split
from h3compile.plan.components import Component, Phase, host_bytes
from h3compile.plan.cost import Parallel, local_sizes
from h3compile.plan.polynomial import NOTHING, Sizes
from h3compile.plan.residency import Residency, piece_bytes
from h3compile.plan.work import CallWork, ProgramWork, own_rings
from h3compile.targets import Target

__all__ = ["KINDS", "MemoryPlan", "activation_bytes", "kept_timesteps", "memory_plan", "slot_bytes", "usable"]

MIB = 2**20

# The kinds of device memory, in the order in which they are shown.
KINDS = (
    "resident weights",
    "slots",
    "shards",
    "tables",
    "activations",
    "staging",
    "collectives",
    "tenants",
    "workspace",
    "context",
)

# A CUDA context with the modules of torch, cuBLAS and an engine, beyond what the allocator holds: 785 to 849
# MiB on an H200 with torch 2.11 and CUDA 13 (benchmarks/README.md, "Streaming"). Assumed of other cards.
_CONTEXT = 800 * MIB
# cuBLAS on Hopper and later asks for 32 MiB a handle and stream, as torch sets it up; two streams compute.
_CUBLAS = 2 * 32 * MIB
# What the allocator holds beyond what is alive, as a share of activations: the values of a step are packed
# (`packing.py`), small ones take segments. On an H200, reserved was 0.99 to 1.00 of the plan with this.
_SLACK = 0.02
# NCCL's channels: of the communicator that exchanges for heads, and of one that gathers weights beside it.
# Measured with two H200 and NCCL 2.28 (h200_x2_ranks_earlier.json): what the driver counts beyond the
# allocator's and the context, 1,251 to 1,385 MiB and 440 to 450. Assumed of more devices, and of rings, which
# have two communicators or three.
_NCCL_EXCHANGES = 1260 * MIB
_NCCL_GATHERS = 450 * MIB
# Python, torch and CUDA on the host. Assumed.
_PROCESS = 3 * 10**9
_BF16 = 2


def kept_timesteps(forwards: int, timesteps: int = 4) -> int:
    """Distinct t of a schedule: at the first forward video and sound share one, conditions keep theirs.

    ``timesteps`` is the most that one forward has: 2, and one more for each kind of condition. An engine
    holds those of both kinds, whatever is asked of it.
    """
    return 2 * forwards - 1 + max(0, timesteps - 2)


def usable(target: Target) -> int | None:
    """Bytes that a plan may use of a device; None where the machine decides."""
    return target.memory


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device by phase and kind, and on the host by kind, pinned and pageable."""

    device: Mapping[Phase, Mapping[str, int]]
    pinned: Mapping[str, int]
    pageable: Mapping[str, int]

    def total(self, phase: Phase) -> int:
        """Bytes of the device in ``phase``."""
        return sum(self.device[phase].values())

    @property
    def phase(self) -> Phase:
        """The phase that needs the most."""
        return max(self.device, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes of the device that the request needs."""
        return self.total(self.phase)

    @property
    def host(self) -> int:
        """Bytes of the host, a device's share."""
        return sum(self.pinned.values()) + sum(self.pageable.values())

    def missing(self, limit: int) -> int:
        """By how many bytes the plan exceeds ``limit``; 0 when it fits."""
        return max(0, self.peak - limit)


def activation_bytes(work: ProgramWork, sizes: Sizes, *stages: str) -> int:
    """The most that lives at once in the calls of ``stages``, by liveness; tables and weights left out."""
    return round(
        max(
            (
                call.held.at(sizes) + max(peak.at(sizes) for peak in work.regions[call.region].peak)
                for call in work.calls
                if call.stage in stages
            ),
            default=0.0,
        )
    )


def _by_library(work: ProgramWork, sizes: Sizes, arch: str) -> int:
    """What libraries return within a step, beside what is placed before it."""
    if not work.placed:
        return 0
    found = [work.regions[call.region].by_library(arch).at(sizes) for call in work.stage("step")]
    return round(max(found, default=0.0))


def slot_bytes(work: ProgramWork, residency: Residency, sizes: Sizes) -> int:
    """Bytes of one slot: the largest streamed call, or call of the request, with its tables of one step."""
    if not residency.slots:
        return 0
    return max(_moved(work, name, sizes) for name in (*residency.streamed, *work.names("request")))


def _moved(work: ProgramWork, name: str, sizes: Sizes) -> int:
    call = work.call(name)
    return work.regions[call.region].weights + round(call.table * sizes["timesteps"])


def memory_plan(
    work: ProgramWork,
    sizes: Sizes,
    residency: Residency,
    parallel: Parallel | None = None,
    *,
    timesteps: int = 0,
    tenants: Sequence[Component] = (),
    pixels: int = 0,
    folded: bool = True,
    keep: bool = True,
    arch: str = "",
) -> MemoryPlan:
    """What a request of ``sizes`` takes on each device and on the host, for each device.

    ``timesteps`` rows of tables are kept (`kept_timesteps`); ``tenants`` share the device, ``pixels`` is
    all that the decoder makes. ``folded``: no timestep is evaluated that the engine does not hold, or else
    cold weights pass through the device. ``keep``: residents stay while tenants work. ``arch`` says which
    attention a library computes; without it, all that is dense.
    """
    parallel = parallel or Parallel()
    here = local_sizes(sizes, parallel.shards)
    fixed = [call for call in work.stage("step") if call.names[0] not in residency.blocks]
    if not residency.slots:
        fixed += work.stage("request")
    residents = {"resident weights": sum(_range(work, name) for name in residency.resident)}
    base = {"resident weights": sum(work.regions[c.region].weights * c.count for c in fixed)}
    base |= _moving(work, residency, sizes, parallel)
    base["tables"] = _table_bytes(work, residency, fixed, timesteps + round(sizes["timesteps"]))
    base["workspace"] = _CUBLAS
    base["context"] = _CONTEXT
    step = max(activation_bytes(work, here, "step"), activation_bytes(work, sizes, "request"))
    sharing = {"collectives": _channels(work, residency, parallel)}
    during = {"activations": step, "workspace": round(_SLACK * step) + _by_library(work, here, arch)}
    if not folded:
        # Tables are evaluated before the step's first call: what is alive is the larger of both.
        during["staging"] = max(0, _cold(work) - step)
    if parallel.shards > 1:
        during["collectives"] = _exchanged(work, sizes, parallel.shards, arch)
    phases: dict[Phase, list[Mapping[str, int]]] = {
        phase: [base, sharing, {"tenants": _tenant_bytes(tenants, phase, pixels)}]
        for phase in get_args(Phase)
    }
    phases["denoise"] += [during]
    for phase, parts in phases.items():
        if keep or phase == "denoise":
            parts.append(residents)
    pinned, pageable = _host(work, residency, sizes, parallel, timesteps, tenants, folded)
    return MemoryPlan({phase: _sum(parts) for phase, parts in phases.items()}, pinned, pageable)


def _range(work: ProgramWork, name: str) -> int:
    return work.regions[work.call(name).region].weights


def _moving(work: ProgramWork, residency: Residency, sizes: Sizes, parallel: Parallel) -> dict[str, int]:
    """Places on the device that blocks and shards pass through."""
    slot = slot_bytes(work, residency, sizes)
    found = {"slots": residency.slots * slot}
    if residency.mode == "allgather":
        largest = max((_moved(work, name, sizes) for name in residency.blocks), default=0)
        found["shards"] = residency.areas * piece_bytes(largest, parallel.ranks, residency.pieces)
    return found


def _table_bytes(work: ProgramWork, residency: Residency, fixed: Iterable[CallWork], timesteps: int) -> int:
    """Tables on the device: those of calls whose weights are there; a streamed block brings its own."""
    kept = sum(work.call(name).table for name in residency.resident)
    return timesteps * (kept + sum(call.table * call.count for call in fixed))


def _cold(work: ProgramWork) -> int:
    """The largest range of the schedule's calls: one buffer serves them in turn."""
    return max((work.regions[call.region].weights for call in work.stage("schedule")), default=0)


def _channels(work: ProgramWork, residency: Residency, parallel: Parallel) -> int:
    """What NCCL holds for the groups that exchange rows and gather weights.

    Rows are exchanged where ranks are planned for, and by work that is one rank's already.
    """
    built = any(region.exchanged != NOTHING for region in work.regions.values())
    exchanges = _NCCL_EXCHANGES if parallel.shards > 1 or built else 0
    return exchanges + (_NCCL_GATHERS if residency.mode == "allgather" else 0)


def _exchanged(work: ProgramWork, sizes: Sizes, shards: int, arch: str) -> int:
    """What exchanges hold: queries, keys and values, sent and received at once; of a ring, what it merges."""
    ulysses, ring = split(work.heads, shards)
    heads = 2 * 3 * _BF16 if ulysses > 1 else 0
    turns = (RING_HOLDS + (0 if own_rings(arch) else RING_MERGES)) * _BF16 if ring > 1 else 0
    return round((heads + turns) * sizes["rows"] / shards * work.attended)


def _tenant_bytes(tenants: Iterable[Component], phase: Phase, pixels: int) -> int:
    """Weights that are there in ``phase``, and the most that one of them works with: they take turns."""
    there = [tenant for tenant in tenants if tenant.placement != "elsewhere"]
    working = [tenant.work_bytes(pixels) for tenant in there if tenant.phase == phase]
    return sum(tenant.on_device(phase) for tenant in there) + max(working, default=0)


def _host(
    work: ProgramWork,
    residency: Residency,
    sizes: Sizes,
    parallel: Parallel,
    timesteps: int,
    tenants: Sequence[Component],
    folded: bool,
) -> tuple[dict[str, int], dict[str, int]]:
    """Pinned and pageable bytes of one device's process."""
    ranks = parallel.ranks if residency.mode == "allgather" else 1
    moving = [*residency.streamed, *(work.names("request") if residency.slots else ())]
    pinned = {
        "streamed weights": sum(-(-_range(work, name) // ranks) for name in moving),
        "streamed tables": timesteps * sum(work.call(name).table for name in residency.streamed),
        # One range at a time on its way to a resident's place, or of cold weights.
        "staging": max(
            max((_range(work, name) for name in residency.resident), default=0),
            0 if folded else _cold(work),
        ),
    }
    return pinned, {"process": _PROCESS, "tenants": host_bytes(tenants)}


def _sum(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Bytes by kind, in the order of `KINDS`; kinds of which there is nothing left out."""
    total = dict.fromkeys(KINDS, 0)
    for part in parts:
        for kind, count in part.items():
            total[kind] += count
    return {kind: count for kind, count in total.items() if count}
