"""Which variants a step takes: by its lengths and its largest sigma, the first that holds."""

from __future__ import annotations

import pytest

from h3compile.program.conditions import Noisier, Shorter, Variant, choose, largest_sigma

VARIANTS = {
    "block": (
        Variant("block.dense", Shorter("rows", 16)),
        Variant("block.careful", Noisier(0.97)),
        Variant("block.dense", Noisier(0.5)),
    ),
    "head": (Variant("head.fine", Noisier(0.25)),),
}


@pytest.mark.parametrize(
    ("rows", "sigma", "chosen"),
    [
        (15, 1.0, {"block": "block.dense", "head": "head.fine"}),
        (15, 0.0, {"block": "block.dense"}),
        (16, 1.0, {"block": "block.careful", "head": "head.fine"}),
        (16, 0.97, {"block": "block.dense", "head": "head.fine"}),
        (16, 0.5, {"head": "head.fine"}),
        (1000, 0.25, {}),
    ],
)
def test_the_first_that_holds_stands_in(rows: int, sigma: float, chosen: dict[str, str]) -> None:
    assert choose(VARIANTS, {"rows": rows, "text_rows": 1}, sigma) == chosen


def test_the_noisiest_row_decides() -> None:
    # Video at t = 0.25, audio at 0.5, an image condition and an audio reference.
    assert largest_sigma([0.25, 0.5, 0.999, 1.0]) == 0.75
    assert largest_sigma([1.0]) == 0.0


def test_a_condition_reads_as_it_is_written() -> None:
    assert [str(variant.when) for variant in VARIANTS["block"]] == [
        "rows < 16",
        "sigma > 0.97",
        "sigma > 0.5",
    ]
