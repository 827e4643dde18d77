"""`h3compile plan`: what fits, how fast, and why; on any machine, in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from h3compile.cli.asked import Frames, Size, Steps
from h3compile.cli.values import check_writable, parse_size
from h3compile.errors import H3CompileError, nearest
from h3compile.plan.amounts import parse_bytes

if TYPE_CHECKING:
    from h3compile.plan.components import Placement
    from h3compile.plan.planner import Planner
    from h3compile.plan.plans import Plan
    from h3compile.plan.shapes import Clip
    from h3compile.targets import Node

__all__ = ["plan"]

_SUFFIXES = (".svg", ".png", ".json")
# Passes that a plan chooses, and why they are not asked for.
_CHOSEN = {
    "dlo": ("dlo is what a plan is for", "leave it out of --passes"),
    "sp": ("sp is how the GPUs of a plan share a clip", "leave it out of --passes and say --gpus N"),
}


def plan(
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="A card, several of one such as 8xb300, or a target file; see `h3compile targets`.  "
            "[default: auto, this machine's]",
        ),
    ] = None,
    gpus: Annotated[int | None, typer.Option(metavar="N", help="How many of it.  [default: 1]")] = None,
    hbm: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="One plan: the fastest in so much of each GPU, such as 24GiB."),
    ] = None,
    slowdown: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT", help="One plan: the smallest that is at most so much slower, such as 2%."
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What it may take of the host.  [default: any]"),
    ] = None,
    passes: Annotated[
        str | None, typer.Option(metavar="LIST", help="As `build` takes them, without dlo and sp.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="PASS", help="A lossy pass that may be added, fp8 or sage; repeat for more."),
    ] = None,
    size: Size = None,
    frames: Frames = None,
    seconds: Annotated[float | None, typer.Option(metavar="S", help="The length instead, 5 to 15.")] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="TASK", help="t2va, fl2va (two key frames) or ref2va.  [default: t2va]"),
    ] = None,
    text_rows: Annotated[
        int | None, typer.Option(metavar="N", help="Rows of the encoded prompt.  [default: 50]")
    ] = None,
    condition_rows: Annotated[
        int | None,
        typer.Option(metavar="N", help="Rows of key frames or references.  [default: the task's]"),
    ] = None,
    steps: Steps = None,
    components: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Where text encoder and VAEs live: resident, moved, streamed or elsewhere.  "
            "[default: what fits]",
        ),
    ] = None,
    throughput: Annotated[
        bool, typer.Option("--throughput", help="Count clips an hour of all GPUs, not one clip's time.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A checkpoint of the released sizes, to name in the command."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write a picture, .svg or .png, or .json."),
    ] = None,
) -> None:
    """Say what fits on which GPU, how fast it will be, and why.

    Nothing is built or measured and no GPU is needed: blocks of weights that do not fit are streamed from
    the host behind the arithmetic, and this finds out how many, by simulating the steps. Without --hbm or
    --slowdown every plan is shown that no smaller one beats. All numbers are predictions.

    \b
    Everything there is for one card:
      h3compile plan --target rtx-4090
    The fastest that leaves half of it free, and the smallest that costs nothing:
      h3compile plan --target rtx-4090 --hbm 12GiB
      h3compile plan --target rtx-4090 --slowdown 0%
    Eight GPUs, 15 seconds, FP8 if it helps, as a picture:
      h3compile plan --target 8xb300 --seconds 15 --allow fp8 -o plan.svg
    """
    from h3compile.cli.plan_text import build_command, build_note, print_plan, sources
    from h3compile.plan.planner import Planner, Question
    from h3compile.plan.shortage import shortage, too_slow

    if hbm is not None and slowdown is not None:
        raise H3CompileError("--hbm and --slowdown are two questions", "give the one or the other")
    if output is not None:
        _check_output(output)
    share = None if slowdown is None else _share(slowdown)
    notes: list[str] = []
    question = Question(
        node=_node(target, gpus),
        clip=_clip(size, frames, seconds, task, text_rows, condition_rows, steps, notes),
        passes=_passes(passes),
        allow=tuple(name.strip() for item in allow or () for name in item.split(",")),
        hbm=None if hbm is None else parse_bytes(hbm),
        host=None if host is None else parse_bytes(host),
        components=_placement(components),
        objective="throughput" if throughput else "latency",
    )
    planner = Planner(question)
    notes += planner.notes
    if hbm is None and share is None:
        _print_all(planner, notes, as_json=as_json, output=output)
        return
    found = planner.fastest() if share is None else planner.smallest(share)
    if found is None:
        raise too_slow(planner, share) if share is not None and planner.fits() else shortage(planner)
    command = build_command(found, model)
    record = {**found.record(), "build": command, "notes": notes}
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        told = [build_note(found), *notes, sources(found)]
        print_plan(found, command, [note for note in told if note])
    if output is not None:
        _write_one(output, found, record)


def _print_all(planner: Planner, notes: list[str], *, as_json: bool, output: Path | None) -> None:
    """Every plan that no smaller one beats."""
    from h3compile.cli.console import facts, stdout
    from h3compile.cli.plan_text import components_note, label, print_frontiers, sources
    from h3compile.plan.pictures import draw_frontier, save
    from h3compile.plan.shortage import shortage

    question = planner.question
    frontiers, resident = planner.frontiers(), planner.resident()
    if not any(frontiers.values()):  # the host is too small for each of them
        raise shortage(planner)
    frontiers = {passes: found for passes, found in frontiers.items() if found}
    record = {
        "predicted": True,
        "frontiers": {passes: [one.record() for one in found] for passes, found in frontiers.items()},
        "all_resident": {passes: one.record() for passes, one in resident.items()},
        "notes": notes,
    }
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        some = next(iter(resident.values()))
        stdout().print(facts([("clip", question.clip.summary), ("on", _where(question.node))]))
        print_frontiers(frontiers, resident)
        told = [*filter(None, [components_note(some)]), *notes, sources(some)]
        if planner.fits():
            told.insert(0, "--hbm SIZE or --slowdown PERCENT explains one plan")
        else:
            told.insert(0, f"nothing fits: {shortage(planner)}")
        stdout().print(facts([("", ""), *(("note", note) for note in told)]))
    if output is None:
        return
    if output.suffix.lower() == ".json":
        output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        return
    clip = question.clip
    title = f"{_where(question.node)}, {clip.width}x{clip.height}, {clip.frames} frames: predicted"
    named = {label(passes): found for passes, found in frontiers.items()}
    whole = {label(passes): one for passes, one in resident.items()}
    save(draw_frontier(named, title, resident=whole), output)


def _write_one(output: Path, found: Plan, record: dict[str, object]) -> None:
    from h3compile.plan.pictures import draw_plan, save

    if output.suffix.lower() == ".json":
        output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        return
    clip = found.space.clip
    what = f"{clip.width}x{clip.height}, {clip.frames} frames, {found.residency}"
    save(draw_plan(found, f"{_where(found.node)}, predicted: {what}"), output)


def _where(node: Node) -> str:
    return node.target.title if node.count == 1 else f"{node.count}x {node.target.title}"


def _check_output(path: Path) -> None:
    if path.suffix.lower() not in _SUFFIXES:
        raise H3CompileError(f"cannot write {path.name}", f"give a name that ends in {', '.join(_SUFFIXES)}")
    check_writable(path)


def _share(text: str) -> float:
    """The share that ``2%`` or ``2`` is."""
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < 1000:
        raise H3CompileError(f"{text!r} is no slowdown", "write a percentage such as 2%")
    return percent / 100


def _node(target: str | None, gpus: int | None) -> Node:
    from h3compile.targets import find_node

    if gpus is not None and gpus < 1:
        raise H3CompileError(f"--gpus {gpus}", "give at least 1")
    node = find_node(target or "auto")
    if (target or "auto").lower() == "auto" and node.target.kind == "cpu":
        raise H3CompileError("there is no GPU here to plan for", "name one, such as --target rtx-4090")
    if gpus is None or gpus == node.count:
        return node
    if node.count > 1:
        raise H3CompileError(f"--target {target} and --gpus {gpus} differ", "give one of them")
    return find_node(f"{gpus}x{target or node.target.name}")


def _clip(
    size: str | None,
    frames: int | None,
    seconds: float | None,
    task: str | None,
    text_rows: int | None,
    condition_rows: int | None,
    steps: int | None,
    notes: list[str],
) -> Clip:
    from h3compile.plan.shapes import (
        FPS,
        LONGEST_RUN,
        LONGEST_SERVED,
        SHORTEST,
        Clip,
        align_frames,
        frames_of,
    )

    if frames is not None and seconds is not None:
        raise H3CompileError("--frames and --seconds are both a length", "give the one or the other")
    options: dict[str, object] = {
        "frames": None if seconds is None else frames_of(seconds),
        "task": task,
        "text_rows": text_rows,
        "condition_rows": condition_rows,
        "steps": steps,
    }
    if size is not None:
        options["width"], options["height"] = parse_size(size)
    if frames is not None:
        aligned = align_frames(frames)
        made = SHORTEST <= aligned <= LONGEST_SERVED
        options["frames"] = aligned if made else frames  # which is refused as it was typed
        if made and aligned != frames:
            notes.append(f"{frames} frames become {aligned} ({aligned / FPS:.2f} s), 17 n + 5")
        if made and aligned > LONGEST_RUN:
            notes.append(f"{aligned} frames are more than Diffusers and `h3compile run` take ({LONGEST_RUN})")
    return Clip(**{name: value for name, value in options.items() if value is not None})  # type: ignore[arg-type]


def _passes(passes: str | None) -> str:
    named = {item.partition("(")[0].strip() for item in (passes or "").split(",")}
    for name, (cause, mend) in _CHOSEN.items():
        if name in named:
            raise H3CompileError(cause, mend)
    return (passes or "").strip()


def _placement(text: str | None) -> Placement | None:
    from h3compile.plan.components import Placement

    if text is None:
        return None
    for known in get_args(Placement):
        if text == known:
            return known  # type: ignore[no-any-return]
    raise H3CompileError(f"components cannot be {text!r}", nearest(text, get_args(Placement)))
