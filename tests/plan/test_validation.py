"""The cost model against measurement: figures of the H200 within 10 %, published ones of B300 within 15 %.

What does not fit is listed in `benchmarks/cost_model.py` by name, with the reason; the list must be true.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cost_model.py"


@pytest.fixture(scope="module")
def model() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("cost_model", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(SCRIPT.parent))
        for name in set(sys.modules) - before:
            if name.startswith("figure"):
                del sys.modules[name]


def test_every_figure_fits_but_the_outliers(model: ModuleType) -> None:
    found = model.figures()
    outside = {figure.key: f"{figure.off:+.0%}" for figure in found if not figure.fits}
    assert outside.keys() == model.OUTLIERS.keys(), outside
    assert all(len(reason) > 20 for reason in model.OUTLIERS.values())


def test_nothing_is_left_out(model: ModuleType) -> None:
    """Every length and set of passes that was measured, all DLO points and topologies, time and memory."""
    names = [figure.key for figure in model.figures()]
    assert len(set(names)) == len(names)
    assert sum(name.startswith("8x B300, DLO") for name in names) == 16
    assert sum(name.startswith("8x B300, topologies") for name in names) == 6
    for table in ("exact", "fuse", "fp8", "sage", "fp8,sage", "fp8,sage,skip", "diffusers"):
        for rows in ("11,000", "37,760", "73,500"):
            assert f"H200, one block: {table}, {rows} rows" in names
    bars = {figure.group: figure.bar for figure in model.figures()}
    ours = ("H200", "2x H200")
    assert all(bar == (0.10 if group.startswith(ours) else 0.15) for group, bar in bars.items())
    # Two ranks: four blocks and fifty, heads shared and a ring, two lengths; seven plans, ms and GiB.
    assert sum(name.startswith("2x H200, steps") for name in names) == 12
    assert sum(name.startswith("2x H200, streaming") for name in names) == 28


def test_two_ranks_are_held_closer(model: ModuleType) -> None:
    """What was fitted to them is held by them: steps within 4 %, and what a way takes longer than another."""
    found = {figure.name: figure for figure in model.figures() if figure.group.startswith("2x H200")}
    assert all(abs(one.off) < 0.04 for one in found.values() if one.group.endswith("steps"))

    def longer(one: str, other: str) -> tuple[float, float]:
        return (
            found[one].predicted - found[other].predicted,
            found[one].measured - found[other].measured,
        )

    for rows in ("37,760", "73,500"):
        # A block of two ranks over half of one rank's: links, ordering and waiting, to a quarter.
        two, one = (f"fp8, 50 layers, {rows} rows, {way}" for way in ("ulysses=2", "one rank"))
        predicted, measured = (
            getattr(found[two], kind) - getattr(found[one], kind) / 2 for kind in ("predicted", "measured")
        )
        assert predicted == pytest.approx(measured, rel=0.3), rows
        predicted, measured = longer(f"fp8, 50 layers, {rows} rows, ring=2", two)
        assert predicted == pytest.approx(measured, rel=0.25), rows
    for rows in ("37,760", "11,000"):
        predicted, measured = longer(
            f"{rows} rows, allgather, 0 of 50 resident", f"{rows} rows, local, 50 of 50 resident"
        )
        assert 0.7 * measured < predicted < 2 * measured, rows


def test_residents_cost_the_published_order_of_time_and_memory(model: ModuleType) -> None:
    found = {figure.key: figure.predicted for figure in model.figures()}
    points = [f"{count} resident" for count in (50, 40, 35, 30, 20, 10, 0)]
    seconds = [found[f"8x B300, DLO: {point}, request"] for point in points]
    memory = [found[f"8x B300, DLO: {point}, memory"] for point in points]
    assert seconds == sorted(seconds)
    assert memory == sorted(memory, reverse=True)


def test_the_script_prints_and_draws(model: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = model.figures()
    text = model.table(found)
    assert text.count("\n| ") >= len(found)
    model.draw(found, tmp_path / "a.svg")
    model.draw(found, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert json.dumps([figure.off for figure in found])
