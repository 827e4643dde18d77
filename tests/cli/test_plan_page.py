"""Pages with predictions say what the planner says; rates that change ask for new pages."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "plan.md"


@pytest.fixture(scope="module")
def row() -> Callable[[str, str], str]:
    """What examples/plan.py prints for a node and passes."""
    found: Callable[[str, str], str] = runpy.run_path(str(ROOT / "examples" / "plan.py"))["row"]
    return found


@pytest.mark.parametrize(
    ("node", "passes"), [("rtx-4090", ""), ("rtx-4090", "fp8"), ("gb10", ""), ("h200", ""), ("b300", "fp8")]
)
def test_rows_of_the_table_are_those_of_the_planner(
    node: str, passes: str, row: Callable[[str, str], str]
) -> None:
    assert row(node, passes) in PAGE.read_text("utf-8").splitlines(), "run `python examples/plan.py docs`"


def test_the_plan_that_is_shown_is_what_is_printed(h3compile) -> None:  # type: ignore[no-untyped-def]
    done = h3compile("plan", "--target", "rtx-4090", "--hbm", "12GiB")
    printed = "\n".join(line.rstrip() for line in done.stdout.splitlines()).rstrip()
    assert f"```text\n{printed}\n```" in PAGE.read_text("utf-8")


@pytest.mark.parametrize(
    "options",
    [
        ("--target", "rtx-4090", "--seconds", "15", "--hbm", "6GiB"),
        ("--target", "rtx-4090", "--slowdown", "2%", "--host", "16GiB"),
        ("--target", "b300", "--gpus", "3", "--passes", "sage"),
    ],
)
def test_the_errors_that_are_shown_are_what_is_printed(options: tuple[str, ...], h3compile) -> None:  # type: ignore[no-untyped-def]
    done = h3compile("plan", *options)
    assert done.exit_code == 1
    assert f"$ h3compile plan {' '.join(options)}\n{done.stderr}" in PAGE.read_text("utf-8")


def test_the_steps_of_several_gpus_are_those_of_the_cost_model() -> None:
    names = runpy.run_path(str(ROOT / "examples" / "ranks_plan.py"))
    lines = (ROOT / "docs" / "parallel.md").read_text("utf-8").splitlines()
    for target in names["TARGETS"]:
        for passes in names["PASSES"]:
            assert names["row"](target, passes) in lines, "run `python examples/ranks_plan.py docs`"
