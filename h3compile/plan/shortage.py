"""Why there is no plan: by how much the smallest is too large, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from h3compile.errors import H3CompileError
from h3compile.plan.amounts import gib
from h3compile.plan.planner import Planner, Question
from h3compile.plan.shapes import SHORTEST
from h3compile.targets import Node

__all__ = ["shortage", "too_slow"]

# A canvas a bit more than half the size of the largest.
_SMALLER = (960, 576)


def shortage(planner: Planner) -> H3CompileError:
    """The error for a question that no plan answers."""
    question, limit = planner.question, planner.question.limit
    least = planner.least()
    if limit is not None and least.device_bytes > limit:
        cause = (
            f"no plan fits {gib(limit)} of a {question.node.target.name}: the smallest takes "
            f"{gib(least.device_bytes)}, {gib(least.device_bytes - limit)} more"
        )
        return H3CompileError(cause, _mend(question, "--hbm"))
    there = question.host or 0
    needed = planner.least_of_host().host_bytes
    cause = (
        f"no plan fits {gib(there)} of the host: the smallest takes {gib(needed)}, {gib(needed - there)} more"
    )
    return H3CompileError(cause, _mend(question, "--host"))


def too_slow(planner: Planner, slowdown: float) -> H3CompileError:
    """The error where plans fit, but none whose steps are longer by at most ``slowdown``, a share."""
    best = planner.fastest()
    assert best is not None
    return H3CompileError(
        f"no plan that fits is within {slowdown * 100:g}% of the time with all weights on the device",
        f"the fastest is {best.slowdown:.1%} slower: --slowdown {best.slowdown * 100 + 0.05:.1f}%",
    )


def _mend(question: Question, short: str) -> str:
    """Changes that make something fit, each by itself; where none does, the one that comes nearest."""
    if question.parallel is not None:
        return f"raise {short}"  # of a program that is being built nothing else may be asked for
    near: list[tuple[int, str]] = []
    good: list[str] = []
    changes = [*_changes(question), *(_more_devices(question) if short == "--hbm" else ())]
    for text, changed in changes:
        if good and text.endswith("GPUs") and good[-1].split(" (")[0].endswith("GPUs"):
            continue  # fewer do
        try:
            planner = Planner(changed)
        except H3CompileError:  # such as FP8 on a device without it
            continue
        least = planner.least() if short == "--hbm" else planner.least_of_host()
        needed = least.device_bytes if short == "--hbm" else least.host_bytes
        told = f"{text} ({gib(needed)})"
        near.append((needed, told))
        if planner.fits():
            good.append(told)
    if good:
        return f"it would with {', or '.join(good)}"
    return f"raise {short}; nearest comes {min(near)[1]}" if near else f"raise {short}"


def _changes(question: Question) -> Iterator[tuple[str, Question]]:
    """What may be asked for instead."""
    if question.components not in (None, "elsewhere"):
        yield "--components elsewhere", replace(question, components="elsewhere")
    named = {item.partition("(")[0].strip() for item in question.passes.split(",")}
    if "fp8" not in named and "fp8" not in question.allow:
        yield "--allow fp8", replace(question, allow=(*question.allow, "fp8"))
    clip = question.clip
    if clip.frames > SHORTEST:
        yield f"--frames {SHORTEST}", replace(question, clip=replace(clip, frames=SHORTEST))
    width, height = _SMALLER
    if clip.width * clip.height > width * height:
        smaller = replace(clip, width=width, height=height)
        yield f"--size {width}x{height}", replace(question, clip=smaller)


def _more_devices(question: Question) -> Iterator[tuple[str, Question]]:
    """More of the same; each of them takes memory of the host for itself."""
    node = question.node
    if node.target.peer is not None:
        for count in (2, 4, 8):
            if count > node.count:
                yield f"{count} GPUs", replace(question, node=Node(node.target, count))
