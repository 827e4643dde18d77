"""Pictures of plans: the frontier, where the memory goes, and one step on the device's streams.

Every picture is a prediction and says so. The same plan gives the same SVG to the byte, so that a picture in
the documentation can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h3compile.errors import H3CompileError
from h3compile.plan.schedule import Compute, Stream

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

    from h3compile.plan.block import BlockSpan
    from h3compile.plan.plans import Plan
    from h3compile.plan.simulate import Span

__all__ = ["SUFFIXES", "draw_blocks", "draw_frontier", "draw_memory", "draw_plan", "draw_step", "save"]

SUFFIXES = (".svg", ".png")

_GIB = 2**30
_INK = "#1f2933"
_FAINT = "#7b8794"
_GROUND = "#edf0f3"
_IDLE = "#f5d9d2"
_LIMIT = "#b04a3a"
_RESIDENT = "#52606d"
_OTHER = "#a9b4c0"
_COLORS = ("#2f6f8f", "#e08e36", "#6a994e", "#8a5a9e")
_BLOCK_COLORS = ("#2f6f8f", "#e08e36", "#8a5a9e", "#6a994e", "#52606d", "#d4b73f", "#5f9db8", "#b04a3a")
_LANES: Mapping[Stream, str] = {
    "compute": "kernels",
    "copy": "host to device",
    "collective": "GPU to GPU",
}
# Kinds of memory as they are shown together, with a colour that the device's and the host's bar share.
_KINDS: Mapping[str, tuple[str, str]] = {
    "resident weights": ("resident weights", "#2f6f8f"),
    "slots": ("slots", "#e08e36"),
    "shards": ("slots", "#e08e36"),
    "tables": ("modulation tables", "#d4b73f"),
    "activations": ("activations", "#6a994e"),
    "tenants": ("text encoder, VAEs", "#8a5a9e"),
    "streamed weights": ("streamed weights, pinned", "#5f9db8"),
    "streamed tables": ("streamed weights, pinned", "#5f9db8"),
}
_REST = ("workspace, context, process", "#a9b4c0")
_STYLE: Mapping[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters on every machine
    "font.size": 9,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "svg.hashsalt": "h3compile",
}


def save(figure: Figure, path: Path) -> None:
    """Write a figure as ``.svg`` or ``.png``, by the suffix of ``path``; nothing in it tells the time."""
    from matplotlib import rc_context

    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise H3CompileError(f"cannot draw {path.name}", "give a name that ends in .svg or .png")
    with rc_context(dict(_STYLE)):
        figure.savefig(path, metadata={"Date": None} if suffix == ".svg" else None, dpi=200)


@contextmanager
def _figure(width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches, drawn in the style of all of them."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise H3CompileError("pictures need matplotlib", "pip install matplotlib") from error
    with rc_context(dict(_STYLE)):
        yield Figure(figsize=(width, height), layout="constrained")


def draw_frontier(
    frontiers: Mapping[str, Sequence[Plan]],
    title: str,
    *,
    resident: Mapping[str, Plan] | None = None,
    chosen: Plan | None = None,
) -> Figure:
    """Seconds a step over memory of one GPU: no plan lies to the left of a line and below it.

    One line for each of the frontiers, by what their plans have in common; ``resident`` plans are hollow, the
    ``chosen`` one is ringed.
    """
    everything = [*(plan for one in frontiers.values() for plan in one), *(resident or {}).values()]
    right = max(plan.device_bytes for plan in everything) / _GIB * 1.25
    top = max(plan.step for plan in everything) * 1.25
    with _figure(8, 4.4) as figure:
        axes = figure.add_subplot()
        for color, (label, frontier) in zip(_COLORS, frontiers.items(), strict=False):
            x = [plan.device_bytes / _GIB for plan in frontier]
            y = [plan.step for plan in frontier]
            axes.step([*x, right], [*y, y[-1]], where="post", color=color, linewidth=1.4, alpha=0.5)
            axes.plot(x, y, "o", color=color, markersize=4.5, label=label)
            whole = (resident or {}).get(label)
            if whole is not None:
                place = whole.device_bytes / _GIB, whole.step
                axes.plot(*place, "o", markersize=6.5, mec=color, mew=1.3, mfc="white", zorder=3)
            _note(axes, (x[-1], y[-1]), _kept(frontier[-1]), color, (5, 6))
        _draw_limit(axes, everything[0].limit, right, top)
        if chosen is not None:
            place = chosen.device_bytes / _GIB, chosen.step
            axes.plot(*place, "o", markersize=10, mec=_INK, mew=1.3, mfc="none", zorder=4)
        axes.set(xlim=(0, right), ylim=(0, top), xlabel="GiB on one GPU", ylabel="seconds a step")
        axes.grid(color=_GROUND, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_title(title)
        _frontier_legend(figure, axes, resident=bool(resident), chosen=chosen is not None)
    return figure


def _kept(plan: Plan) -> str:
    kept, blocks = len(plan.residency.resident), len(plan.residency.blocks)
    return "all resident" if kept == blocks else f"{kept} of {blocks} resident"


def _draw_limit(axes: Axes, limit: int | None, right: float, top: float) -> None:
    """What there is of a GPU: a line, or a word at the edge when it lies far beyond."""
    if limit is None:
        return
    text, place = f"there are {limit / _GIB:.1f} GiB", limit / _GIB
    if place > right:
        _note(axes, (right, top), f"{text} →", _LIMIT, (-4, -9), "right")
        return
    axes.axvline(place, color=_LIMIT, linestyle="--", linewidth=1.1)
    offset, align = ((-4, -9), "right") if place > right / 2 else ((4, -9), "left")
    _note(axes, (place, top), text, _LIMIT, offset, align)


def _note(
    axes: Axes,
    place: tuple[float, float],
    text: str,
    color: str,
    offset: tuple[int, int],
    align: str = "left",
) -> None:
    axes.annotate(text, place, offset, textcoords="offset points", color=color, fontsize=8, ha=align)


def _frontier_legend(figure: Figure, axes: Axes, *, resident: bool, chosen: bool) -> None:
    from matplotlib.lines import Line2D

    handles, _ = axes.get_legend_handles_labels()
    if resident:
        handles.append(
            Line2D([], [], marker="o", linestyle="", mec=_INK, mfc="white", label="all blocks resident")
        )
    if chosen:
        handles.append(
            Line2D([], [], marker="o", linestyle="", mec=_INK, mfc="none", markersize=10, label="chosen")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), handlelength=1.2)


def draw_memory(plans: Mapping[str, Plan], title: str) -> Figure:
    """What lies on one GPU in each phase of a request, and on the host, by kind: four bars a plan."""
    with _figure(10, _memory_height(len(plans))) as figure:
        _fill_memory(figure, plans, title)
    return figure


def _memory_height(plans: int) -> float:
    return 1.5 + 1.64 * plans


def _fill_memory(figure: FigureBase, plans: Mapping[str, Plan], title: str) -> None:
    bars: list[tuple[str, Mapping[str, int], int | None]] = []
    for name, plan in plans.items():
        for phase, amounts in plan.memory.device.items():
            bars.append((f"{name}  {phase}" if phase == "encode" else phase, amounts, plan.limit))
        bars.append(("host", plan.host, None))
    longest = max(max(sum(amounts.values()), limit or 0) for _, amounts, limit in bars) / _GIB
    axes = figure.add_subplot()
    shown: dict[str, str] = {}
    rows = [index + index // 4 * 0.6 for index in range(len(bars))]
    for row, (_, amounts, limit) in zip(rows, bars, strict=True):
        left = 0.0
        for kind, (color, amount) in _grouped(amounts, longest / 400).items():
            shown[kind] = color
            width = amount / _GIB
            axes.barh(row, width, left=left, height=0.74, color=color, edgecolor="white", linewidth=0.6)
            if width > longest / 16:
                axes.text(left + width / 2, row, f"{width:.1f}", color="white", ha="center", va="center")
            left += width
        label = left + longest / 150
        if limit is not None:
            there = limit / _GIB
            axes.plot([there] * 2, [row - 0.48, row + 0.48], color=_LIMIT, linewidth=1.4)
            if label - longest / 75 < there < label + longest / 11:  # the line would cross the number
                label = there + longest / 150
        axes.text(label, row, f"{left:.1f} GiB", va="center", fontweight="bold")
    axes.set_ylim(rows[-1] + 0.6, -0.6)
    axes.set_yticks(rows, [label for label, _, _ in bars])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, longest * 1.12)
    axes.set_xlabel("GiB of one GPU by phase of a request, and of the whole host")
    axes.set_title(title)
    _memory_legend(figure, shown, limited=any(limit is not None for _, _, limit in bars))


def _grouped(amounts: Mapping[str, int], visible: float) -> dict[str, tuple[str, int]]:
    """Colour and bytes by the kind that is shown; the rest, with what is below ``visible`` GiB, is last."""
    found: dict[str, tuple[str, int]] = {}
    for kind, amount in amounts.items():
        label, color = _KINDS.get(kind.removeprefix("pinned "), _REST)
        found[label] = color, found.get(label, (color, 0))[1] + amount
    large = {kind: entry for kind, entry in found.items() if entry[1] >= visible * _GIB and kind != _REST[0]}
    rest = sum(amount for kind, (_, amount) in found.items() if kind not in large)
    return {**large, _REST[0]: (_REST[1], rest)}


def _memory_legend(figure: FigureBase, shown: Mapping[str, str], *, limited: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=color, label=kind) for kind, color in shown.items()]
    if limited:
        handles.append(Line2D([], [], color=_LIMIT, label="what there is"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, handlelength=1.2)


def draw_step(plan: Plan, title: str) -> Figure:
    """What every stream does in one step of many: one lane a stream.

    A block is copied, gathered and computed in the colour of its slot; blocks that stay on the device are
    grey; what is pale red is idle.
    """
    with _figure(10, _step_height(plan)) as figure:
        _fill_step(figure, plan, title)
    return figure


def draw_plan(plan: Plan, title: str) -> Figure:
    """One plan: where its memory goes, and one step of it below."""
    upper, lower = _memory_height(1), _step_height(plan)
    with _figure(10, upper + lower) as figure:
        grid = figure.add_gridspec(2, 1, height_ratios=[upper, lower])
        first, second = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
        _fill_memory(first, {"": plan}, title)
        _fill_step(second, plan, "One step of many")
    return figure


def _lanes(plan: Plan) -> list[Stream]:
    return [lane for lane in _LANES if lane == "compute" or plan.timeline.on(lane)]


def _step_height(plan: Plan) -> float:
    return 1.6 + 0.5 * len(_lanes(plan))


def _fill_step(figure: FigureBase, plan: Plan, title: str) -> None:
    timeline, (begin, end) = plan.timeline, plan.window
    lanes = _lanes(plan)
    axes = figure.add_subplot()
    length = end - begin
    factor, unit = (1e3, "milliseconds") if length < 1 else (1, "seconds")
    for row, lane in enumerate(lanes):
        axes.barh(row, length * factor, height=0.72, color=_IDLE, zorder=1)
        spans = [span for span in timeline.on(lane) if span.end > begin and span.start < end]
        cuts = [(max(span.start, begin) - begin, min(span.end, end) - begin) for span in spans]
        for span, (left, right) in zip(spans, cuts, strict=True):
            axes.barh(
                row,
                (right - left) * factor,
                left=left * factor,
                height=0.72,
                color=_span_color(span, plan),
                edgecolor="white",
                linewidth=0.4 if right - left > length / 200 else 0,  # or there would be only edge
                zorder=2,
            )
        busy = sum(right - left for left, right in cuts) / length
        axes.text(1.01, row, f"{busy:.0%} busy", transform=axes.get_yaxis_transform(), va="center")
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), [_LANES[lane] for lane in lanes])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, length * factor)
    axes.set_xlabel(f"{unit} since the step began")
    axes.spines["left"].set_visible(False)
    axes.set_title(title)
    _step_legend(figure, plan)


def _span_color(span: Span, plan: Plan) -> str:
    operation = span.operation
    if operation.slot is not None:
        return _COLORS[operation.slot % len(_COLORS)]
    return _RESIDENT if operation.call in plan.residency.resident else _OTHER


def _step_legend(figure: FigureBase, plan: Plan) -> None:
    from matplotlib.patches import Patch

    slots = {
        span.operation.slot
        for span in plan.timeline.spans
        if isinstance(span.operation, Compute) and span.operation.slot is not None
    }
    entries = [(f"block in slot {slot}", _COLORS[slot % len(_COLORS)]) for slot in sorted(slots)]
    if plan.residency.resident:
        entries.append(("resident block", _RESIDENT))
    entries += [("first and last region", _OTHER), ("idle", _IDLE)]
    handles = [Patch(color=color, label=label) for label, color in entries]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), handlelength=1.2)


def draw_blocks(blocks: Mapping[str, Sequence[BlockSpan]], title: str) -> Figure:
    """One block of one rank under each of several ways to share it: kernels, and what is exchanged."""
    longest = 1e3 * max(span.end for spans in blocks.values() for span in spans)
    with _figure(10, 1.3 + 0.85 * len(blocks)) as figure:
        axes = figure.add_subplot()
        kinds = list(dict.fromkeys(span.what for spans in blocks.values() for span in spans))
        ticks: dict[float, str] = {}
        for place, (name, spans) in enumerate(blocks.items()):
            for row, lane in ((2.5 * place, "kernels"), (2.5 * place + 1, "exchange")):
                ticks[row] = name if lane == "kernels" else "exchange"
                for span in (one for one in spans if one.lane == lane):
                    axes.barh(
                        row,
                        1e3 * (span.end - span.start),
                        left=1e3 * span.start,
                        height=0.8,
                        color=_BLOCK_COLORS[kinds.index(span.what) % len(_BLOCK_COLORS)],
                        edgecolor="white",
                        linewidth=0.5,
                    )
            whole = 1e3 * max(span.end for span in spans)
            axes.text(whole + longest / 150, 2.5 * place, f"{whole:.2f} ms", va="center", fontweight="bold")
        axes.set_ylim(max(ticks) + 0.6, -0.6)
        axes.set_yticks(list(ticks), list(ticks.values()))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlim(0, longest * 1.1)
        axes.set_xlabel("milliseconds since the block began")
        axes.set_title(title)
        _block_legend(figure, kinds)
    return figure


def _block_legend(figure: FigureBase, kinds: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=_BLOCK_COLORS[i % len(_BLOCK_COLORS)], label=kind) for i, kind in enumerate(kinds)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), handlelength=1.2)
