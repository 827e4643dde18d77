"""Plans as text: a frontier as a table and a sketch, and one plan explained."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from h3compile.cli.console import facts, stdout, table
from h3compile.plan.amounts import gib
from h3compile.plan.collectives import split
from h3compile.plan.components import Placement
from h3compile.plan.plans import Plan

__all__ = [
    "build_command",
    "build_note",
    "components_note",
    "label",
    "print_frontiers",
    "print_plan",
    "sources",
]

_GIB = 2**30
_ROWS = 12  # of one frontier, at most
_COLUMNS = (
    "resident",
    "slots",
    "from",
    "GPUs a clip",
    "GiB denoising",
    "GiB at most",
    "GiB of host",
    "s a step",
    "over resident",
    "s a request",
    "fits",
)
_MARKS = "●▲■◆"
_BAR = 28

_STREAMS = {"compute": "kernels", "copy": "copies from the host", "collective": "transfers between GPUs"}


def label(passes: str) -> str:
    """What passes are called in tables and pictures: the lossy ones, or BF16 without any."""
    return passes or "BF16"


def print_frontiers(frontiers: Mapping[str, Sequence[Plan]], resident: Mapping[str, Plan]) -> None:
    """A table of all plans that no smaller one beats, those with all blocks resident below, and a sketch."""
    console = stdout()
    for mark, (passes, frontier) in zip(_MARKS, frontiers.items(), strict=False):
        rows = [_row(plan) for plan in _thinned(frontier)]
        whole = resident[passes]
        if whole.residency != frontier[-1].residency:
            rows.append(_row(whole))
        numbers = [name for name in _COLUMNS if name not in ("from", "fits")]
        console.print(table(f"{mark} {label(passes)}", _COLUMNS, rows, numbers=numbers))
    for line in _sketch(frontiers):
        console.print(line, markup=False)


def _thinned(frontier: Sequence[Plan]) -> list[Plan]:
    """At most `_ROWS` of them, the first and the last among them, evenly."""
    if len(frontier) <= _ROWS:
        return list(frontier)
    last = len(frontier) - 1
    return [frontier[round(index * last / (_ROWS - 1))] for index in range(_ROWS)]


def _row(plan: Plan) -> tuple[str, ...]:
    residency, parallel = plan.residency, plan.space.parallel
    source = "" if not residency.streamed else "own host memory"
    if residency.mode == "allgather" and residency.streamed:
        pieces = f" in {residency.pieces}" if residency.pieces > 1 else ""
        source = f"shards of {parallel.ranks}{pieces}"
    return (
        f"{len(residency.resident)} of {len(residency.blocks)}",
        str(residency.slots),
        source,
        str(parallel.shards),
        f"{plan.memory.total('denoise') / _GIB:.1f}",
        f"{plan.device_bytes / _GIB:.1f}",
        f"{plan.host_bytes / _GIB:.1f}",
        f"{plan.step:.3f}" if plan.step < 1 else f"{plan.step:.2f}",
        f"+{max(0.0, plan.slowdown):.1%}",
        f"{plan.request.total:.0f}",
        "yes" if plan.limit is None or plan.device_bytes <= plan.limit else "no",
    )


def _sketch(frontiers: Mapping[str, Sequence[Plan]], width: int = 64, height: int = 10) -> Iterator[str]:
    """Seconds a step over GiB of a GPU, in characters."""
    plans = [plan for frontier in frontiers.values() for plan in frontier]
    right = max(plan.device_bytes for plan in plans) * 1.15
    top = max(plan.step for plan in plans) * 1.1
    grid = [[" "] * width for _ in range(height)]
    limit = plans[0].limit
    if limit is not None and limit < right:
        for line in grid:
            line[int(limit / right * width)] = "╎"
    for mark, frontier in reversed(list(zip(_MARKS, frontiers.values(), strict=False))):
        for plan in frontier:
            x, y = int(plan.device_bytes / right * width), int(plan.step / top * height)
            grid[height - 1 - y][x] = mark
    yield "seconds a step"
    for index, line in enumerate(grid):
        at = f"{top * (height - index - 0.5) / height:7.2f}" if index % 3 == 0 else " " * 7
        yield f"{at} ┤{''.join(line).rstrip()}"
    yield " " * 8 + "└" + "─" * width
    yield " " * 9 + f"0{f'{right / _GIB:.0f} GiB on one GPU':>{width - 1}}"


def print_plan(plan: Plan, command: str, notes: Sequence[str]) -> None:
    """One plan: what, how long and why, where the memory goes, and what to type."""
    console = stdout()
    space, parallel = plan.space, plan.space.parallel
    gpus = f"{plan.node.count}x {plan.node.target.title}" if plan.node.count > 1 else plan.node.target.title
    shared = ""
    if plan.node.count > 1:
        shared = f"; {_times(parallel.shards, 'GPU')} a clip, {_times(space.replicas, 'clip')} at once"
    rows = [
        ("clip", space.clip.summary),
        ("on", gpus + shared),
        ("passes", f"the default ones, {space.passes}" if space.passes else "the default ones"),
        ("weights", str(plan.residency)),
        ("a step", f"{plan.step:.4g} s, {_against(plan)}"),
        ("bound by", _bound(plan)),
        ("a request", _request(plan)),
        ("components", _components(plan)),
    ]
    console.print(facts(rows))
    console.print()
    console.print("\n".join(_memory(plan)), markup=False)
    console.print()
    console.print(facts([("build", command), *(("note", note) for note in notes)]))


def _times(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")


def _against(plan: Plan) -> str:
    if not plan.residency.streamed:
        return "all weights on the device"
    if plan.slowdown < 5e-4:
        return "as with all weights on the device: the copies hide behind the kernels"
    return f"{plan.slowdown:.1%} longer than with all weights on the device ({plan.resident_step:.4g} s)"


def _bound(plan: Plan) -> str:
    shares = sorted(plan.bounds.items(), key=lambda item: -item[1])
    told = " and ".join(f"{_STREAMS[stream]} ({share:.0%})" for stream, share in shares if share > 0.02)
    link = plan.node.target.host
    if not plan.residency.streamed or link is None:
        return told
    asked = plan.copied_bytes / plan.step
    return f"{told}; copies need {asked / 1e9:.1f} of the {link.rate.reached / 1e9:.1f} GB/s of the link"


def _request(plan: Plan) -> str:
    request, clip = plan.request, plan.space.clip
    parts = [f"{clip.forwards} steps {request.steps:.0f} s", f"refiner {request.request:.2g} s"]
    parts += [f"{name} {seconds:.2g} s" for name, seconds in request.others.items()]
    rate = f"; {plan.clips_an_hour:.3g} clips an hour"
    return f"{request.total:.0f} s: {', '.join(parts)}{rate}"


def _components(plan: Plan) -> str:
    words = {
        "resident": "on the device always",
        "moved": "on the device while working",
        "streamed": "through the device by layers while working",
        "elsewhere": "elsewhere, not on this device",
    }
    placed: dict[str, list[str]] = {}
    for tenant in plan.space.tenants:
        placed.setdefault(words[tenant.placement], []).append(tenant.name)
    return "; ".join(f"{', '.join(names)} {where}" for where, names in placed.items())


def _memory(plan: Plan) -> Iterator[str]:
    """Bars by kind, of the phase that needs the most, and of the host."""
    memory = plan.memory
    limit = f" of {gib(plan.limit)}" if plan.limit is not None else ""
    totals = {phase: gib(memory.total(phase)) for phase in memory.device}
    others = ", ".join(f"{phase} {told}" for phase, told in totals.items() if phase != memory.phase)
    yield f"device   {gib(plan.device_bytes)}{limit} at {memory.phase} ({others})"
    yield from _bars(plan.device)
    if memory.phase != "denoise":
        yield f"         {totals['denoise']} at denoise"
        yield from _bars(memory.device["denoise"])
    yield f"host     {gib(plan.host_bytes)}"
    yield from _bars(plan.host)


def _bars(kinds: Mapping[str, int]) -> Iterator[str]:
    most = max(kinds.values(), default=1)
    for kind, count in kinds.items():
        if count < _GIB // 200:  # 0.00
            continue
        bar = "█" * max(1, round(count / most * _BAR))
        name = "text encoder and VAEs" if kind == "tenants" else kind
        yield f"  {name:<24}{count / _GIB:7.2f} GiB  {bar}"


def build_command(plan: Plan, model: str | None) -> str:
    """What to type to build it."""
    residency = plan.residency
    passes = plan.space.passes
    shards = plan.space.parallel.shards
    if shards > 1:
        degrees = zip(("ulysses", "ring"), split(plan.space.work.heads, shards), strict=True)
        shared = ",".join(f"{name}={degree}" for name, degree in degrees if degree > 1)
        passes = ",".join(filter(None, (passes, f"sp({shared})")))
    if residency.streamed:
        options = [f"resident={len(residency.resident)}", f"slots={residency.slots}"]
        if residency.mode != "local":
            options += [f"mode={residency.mode}", f"pieces={residency.pieces}"]
        passes = ",".join(filter(None, (passes, f"dlo({','.join(options)})")))
    words = ["h3compile", "build"]
    words += ["--model", model] if model else []
    words += ["--passes", passes] if passes else []
    words += ["--target", plan.node.target.name]
    words += ["--steps", str(plan.space.clip.steps)] if plan.space.clip.steps != 50 else []
    return shlex.join([*words, "-o", "h3.h3e"])


def build_note(plan: Plan) -> str:
    """How it is run where that is not as usual: on several GPUs, with components in other places."""
    shards = plan.space.parallel.shards
    options = f" --gpus {shards}" if shards > 1 else ""
    if _placements(plan) == {"streamed"}:
        options += " --components streamed"
    told = f"run it with h3compile run h3.h3e{options} ..." if options else ""
    return "; ".join(filter(None, (told, components_note(plan))))


def components_note(plan: Plan) -> str:
    """What a plan takes for granted of components that `h3compile run` does in another way."""
    if "elsewhere" in _placements(plan):
        return "components elsewhere are for servers: `h3compile run` has them on its GPU"
    if plan.node.count > 1:
        return "components are planned as servers share them: `run` has them on its first GPU"
    return ""


def _placements(plan: Plan) -> set[Placement]:
    return {tenant.placement for tenant in plan.space.tenants}


def sources(plan: Plan) -> str:
    """How the rates that a plan rests on are known, in one line."""
    target = plan.node.target
    rates = [target.bandwidth, *target.flops.values()]
    rates += [link.rate for link in (target.host, target.peer) if link is not None]
    words = dict.fromkeys(rate.source.split()[0].strip(":;,") for rate in rates if rate is not None)
    return (
        f"predicted, not measured; the rates of {target.name} are {', '.join(sorted(words))}: "
        f"h3compile targets {target.name}"
    )
