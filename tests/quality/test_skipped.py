"""The table of skipped tiles: a row a step, a column a call, and one line for a person."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch

from h3compile.engine.manifest import CallRecord
from h3compile.quality.skipped import SkippedTiles, skipped_tiles
from h3compile.runtime.measures import MeasuredStep

# Only these two fields of a manifest are looked at. The order of the measures is that of the columns.
MANIFEST = SimpleNamespace(
    measures=("tiles_0", "tiles_1"),
    calls=[
        CallRecord(region="block", index=i, stage="step", inputs=(), outputs=(f"x_{i}", f"tiles_{i}"))
        for i in (1, 0)
    ],
)


def step(sigma: float, *counts: tuple[int, int], **variants: str) -> MeasuredStep:
    values = {f"tiles_{i}": torch.tensor(pair, dtype=torch.int32) for i, pair in enumerate(counts)}
    return MeasuredStep(sigma, variants, dict(reversed(values.items())))


def table(*steps: MeasuredStep) -> SkippedTiles:
    return skipped_tiles(MANIFEST, steps)  # type: ignore[arg-type]


def test_one_line_for_all_steps() -> None:
    dense = step(1.0, (0, 0), (0, 0), block="block.dense")
    careful = step(0.9, (0, 25), (0, 25), block="block.unskipped")
    sparse = step(0.8, (1, 10), (2, 10)), step(0.4, (5, 10), (9, 20))
    shares = "15.0% in the first of the others and 46.7% in the last"
    assert table(*sparse).summary() == "34.0% of all; 15.0% in the first step and 46.7% in the last"
    assert table(dense, *sparse).summary() == f"34.0% of all; none in 1 of 3 steps, {shares}"
    assert table(dense, careful, *sparse).summary() == f"17.0% of all; none in 2 of 4 steps, {shares}"
    assert table(dense, careful).summary() == "none in 2 steps"


def test_counts_may_exceed_32_bits_together() -> None:
    large = 2**31 - 1
    assert table(step(0.5, (large, large), (large, large))).steps[0].share == 1.0


def test_the_table_as_json_has_a_line_a_step() -> None:
    text = table(step(1.0, (0, 0), (0, 0), block="block.dense"), step(0.5, (1, 10), (2, 30))).encode()
    assert json.loads(text) == {
        "calls": ["block.0", "block.1"],
        "steps": [
            {
                "sigma": 1.0,
                "variants": {"block": "block.dense"},
                "skipped": [0, 0],
                "considered": [0, 0],
                "share": None,
            },
            {"sigma": 0.5, "variants": {}, "skipped": [1, 2], "considered": [10, 30], "share": 0.075},
        ],
    }
    assert sum("sigma" in line for line in text.splitlines()) == 2
