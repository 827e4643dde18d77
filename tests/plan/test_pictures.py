"""Pictures: the same bytes every time, all that is promised in them, nothing of it over something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from h3compile.errors import H3CompileError
from h3compile.plan.pictures import draw_frontier, draw_memory, draw_plan, draw_step, save
from h3compile.plan.planner import Planner, Question
from h3compile.plan.plans import Plan
from h3compile.plan.shapes import Clip
from h3compile.targets import find_node

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(Question(find_node("8xb300"), allow=("fp8",)))


@pytest.fixture(scope="module")
def streamed(planner: Planner) -> Plan:
    return next(plan for plan in planner.frontiers()[""] if plan.residency.mode == "allgather")


@pytest.fixture(scope="module")
def figures(planner: Planner, streamed: Plan) -> dict[str, Callable[[], Figure]]:
    card = Planner(Question(find_node("rtx-4090"), Clip(frames=345))).fastest()
    assert card is not None
    frontiers, resident = planner.frontiers(), planner.resident()
    return {
        "frontier": lambda: draw_frontier(frontiers, "F", resident=resident, chosen=planner.fastest()),
        "memory": lambda: draw_memory({"8x B300": streamed, "RTX 4090": card}, "M"),
        "step": lambda: draw_step(streamed, "S"),
        "plan": lambda: draw_plan(card, "P"),
    }


NAMES = ("frontier", "memory", "step", "plan")


@pytest.mark.parametrize("name", NAMES)
def test_the_same_plan_is_the_same_svg(
    name: str, figures: dict[str, Callable[[], Figure]], tmp_path: Path
) -> None:
    for path in ("a.svg", "b.svg"):
        save(figures[name](), tmp_path / path)
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert text == (tmp_path / "b.svg").read_text(encoding="utf-8")
    assert "<dc:date>" not in text


def beyond(axes: Axes) -> Iterator[Text]:
    """Labels of ticks outside of the view, which are not drawn."""
    for axis, view in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        for tick in axis.get_major_ticks():
            if not min(view) <= tick.get_loc() <= max(view):
                yield tick.label1
                yield tick.label2


def texts(figure: Figure) -> Iterator[tuple[Text, tuple[float, float, float, float]]]:
    """Every visible text and its place, in pixels."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    unseen = {label for axes in figure.findobj(Axes) for label in beyond(axes)}
    for found in figure.findobj(Text):
        assert isinstance(found, Text)
        if found not in unseen and found.get_visible() and found.get_text().strip():
            box = found.get_window_extent(canvas.get_renderer())  # type: ignore[no-untyped-call]
            yield found, (box.x0, box.y0, box.x1, box.y1)


@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_over_another_or_outside(name: str, figures: dict[str, Callable[[], Figure]]) -> None:
    figure = figures[name]()
    placed = list(texts(figure))
    width, height = figure.get_size_inches() * figure.dpi
    for index, (text, (left, bottom, right, top)) in enumerate(placed):
        assert left >= -1 and bottom >= -1 and right <= width + 1 and top <= height + 1, text
        for other, (other_left, other_bottom, other_right, other_top) in placed[index + 1 :]:
            apart = (
                right <= other_left + 1
                or other_right <= left + 1
                or top <= other_bottom + 1
                or other_top <= bottom + 1
            )
            assert apart, f"{text.get_text()!r} is over {other.get_text()!r}"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("frontier", ("GiB on one GPU", "seconds a step", "fp8", "all blocks resident", "chosen")),
        ("memory", ("slots", "activations", "text encoder, VAEs", "what there is", "denoise", "host")),
        ("step", ("kernels", "host to device", "GPU to GPU", "block in slot 0", "idle", "milliseconds")),
        ("plan", ("GiB of one GPU", "One step of many", "seconds since the step began")),
    ],
)
def test_what_is_needed_to_read_it_is_there(
    name: str, shown: tuple[str, ...], figures: dict[str, Callable[[], Figure]]
) -> None:
    words = "\n".join(text.get_text() for text, _ in texts(figures[name]()))
    for word in shown:
        assert word in words, words


def test_a_png_is_one(streamed: Plan, tmp_path: Path) -> None:
    save(draw_step(streamed, "S"), tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_another_suffix_is_refused(streamed: Plan, tmp_path: Path) -> None:
    with pytest.raises(H3CompileError, match=r"a name that ends in \.svg or \.png"):
        save(draw_step(streamed, "S"), tmp_path / "s.gif")


def test_without_matplotlib_there_is_one_line(streamed: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(H3CompileError, match="pictures need matplotlib: pip install matplotlib"):
        draw_step(streamed, "S")
