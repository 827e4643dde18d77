"""Where the weights of an engine lie once it is loaded: what stays on the device, and what passes through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from h3compile.engine.manifest import CallRecord, Manifest
from h3compile.engine.records import residency_of
from h3compile.errors import EngineError, H3CompileError
from h3compile.plan.residency import spaced
from h3compile.program.residency import Residency, repeated
from h3compile.runtime.link import LinkedProgram, call_name
from h3compile.runtime.reader import STAGING
from h3compile.runtime.sharding import WHOLE, Sharding

__all__ = ["Places", "residency_for"]

# One slot is read while another is filled.
_SLOTS = 2


def residency_for(
    manifest: Manifest,
    resident: int | Sequence[str] | None = None,
    slots: int | None = None,
    ranks: int = 1,
) -> Residency | None:
    """The plan an engine was built with, or the one asked for: so many blocks, evenly spaced, or these.

    None: everything stays on the device, and is there when loading ends. Raises `H3CompileError` when the
    plan is impossible, or needs several ranks.
    """
    built = None if manifest.plan is None else residency_of(manifest.plan)
    if resident is None and slots is None:
        if built is not None and built.mode != "local" and ranks == 1:
            raise EngineError(
                f"the engine's plan gathers every block from several ranks (mode={built.mode}), and one"
                " process runs it",
                "load it with resident=N, or build it with dlo(mode=local)",
            )
        return built
    blocks = built.blocks if built is not None else _blocks(manifest)
    if not blocks:
        raise EngineError("the engine has no repeated blocks to stream", "load it without resident and slots")
    kept = _kept(blocks, resident, built)
    if len(kept) == len(blocks):
        return Residency(blocks, kept, slots or 0)
    if slots is None:
        slots = built.slots if built is not None and built.slots else _SLOTS
    if built is not None and ranks > 1:
        return Residency(blocks, kept, slots, built.mode, built.pieces)
    return Residency(blocks, kept, slots)


def _kept(
    blocks: tuple[str, ...], resident: int | Sequence[str] | None, built: Residency | None
) -> tuple[str, ...]:
    if resident is None:
        if built is None:
            raise H3CompileError(
                "slots are places for blocks that are streamed", "say how many stay: resident=N"
            )
        return built.resident
    if isinstance(resident, int):
        return spaced(blocks, resident)
    asked = set(resident)
    return (*(name for name in blocks if name in asked), *sorted(asked.difference(blocks)))


def _blocks(manifest: Manifest) -> tuple[str, ...]:
    return repeated(
        (call.region, call_name(call))
        for call in manifest.calls
        if call.stage == "step" and call.range is not None
    )


@dataclass(frozen=True)
class Places:
    """The ranges of a partition by where they lie.

    ``always`` are on the device when loading ends. ``residents``, ``streamed`` and ``carried`` map calls to
    their ranges: blocks that come to stay, blocks that take turns in the slots, and calls of the request
    that do so too.
    """

    residency: Residency
    sizes: dict[str, int]  # of every range, in bytes
    always: tuple[str, ...]
    residents: dict[str, str]
    streamed: dict[str, str]
    carried: dict[str, str]
    sharding: Sharding = WHOLE  # of what does not stay from the beginning, on the host

    @classmethod
    def of(
        cls,
        program: LinkedProgram,
        sizes: dict[str, int],
        residency: Residency | None,
        rank: int = 0,
        ranks: int = 1,
    ) -> Places:
        """Where ``residency`` puts what the calls of request and step read. None: all of it stays."""
        request, step = _ranges(program.request), _ranges(program.step)
        if residency is None:
            always = tuple(dict.fromkeys((*request.values(), *step.values())))
            return cls(Residency((), (), 0), sizes, always, {}, {}, {})
        for name in residency.blocks:
            if name not in step:
                raise EngineError(
                    f"the engine plans for {name}, a step call that it lacks", "rebuild the engine"
                )
        carried = request if residency.slots else {}
        moving = {*residency.blocks, *carried}
        stays = dict.fromkeys(found for call, found in {**request, **step}.items() if call not in moving)
        return cls(
            residency,
            sizes,
            tuple(stays),
            {name: step[name] for name in residency.resident},
            {name: step[name] for name in residency.streamed},
            carried,
            Sharding(rank, ranks, residency.pieces) if residency.mode == "allgather" else WHOLE,
        )

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: those of the largest range that passes through, and what fills it up."""
        return max((self.sharding.gathered(self.sizes[found]) for found in self._passing()), default=0)

    @property
    def area_bytes(self) -> int:
        """Bytes of one area, where a part waits to be gathered: those of the largest part."""
        moving = (*self._passing(), *self.residents.values())
        return max((self.sharding.part(self.sizes[found]) for found in moving), default=0)

    @property
    def staging_bytes(self) -> int:
        """Host bytes that residents pass through."""
        sizes = [self.sharding.held(self.sizes[found]) for found in self.residents.values()]
        return max(sizes, default=0) * min(STAGING, len(sizes))

    def _passing(self) -> tuple[str, ...]:
        return (*self.streamed.values(), *self.carried.values())

    @property
    def on_device(self) -> tuple[str, ...]:
        """The ranges that have a place on the device of their own."""
        return tuple(dict.fromkeys((*self.always, *self.residents.values())))

    @property
    def on_host(self) -> tuple[str, ...]:
        """The ranges that stay in host memory."""
        return tuple(dict.fromkeys(self._passing()))

    def host_tables(self, program: LinkedProgram) -> frozenset[str]:
        """The tables that only streamed calls read: they lie where the weights of these do."""
        tables = {port.name for port in program.tables}
        elsewhere = {
            name for call in program.step if call_name(call) not in self.streamed for name in call.inputs
        }
        return frozenset(tables - elsewhere)


def _ranges(calls: Sequence[CallRecord]) -> dict[str, str]:
    return {call_name(call): call.range for call in calls if call.range is not None}
