"""Dimension expressions: arithmetic over names, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3compile.program.dims import evaluate_dim

SIZES = {"rows": 10, "timesteps": 3}


@pytest.mark.parametrize(
    ("dim", "value"),
    [
        (7, 7),
        (0, 0),
        ("7", 7),
        ("rows", 10),
        ("3*timesteps", 9),
        ("rows + 2*timesteps", 16),
        ("rows - 1", 9),
        ("(rows//4)", 2),
        ("2*(rows + timesteps)", 26),
    ],
)
def test_values(dim: int | str, value: int) -> None:
    assert evaluate_dim(dim, SIZES) == value


@pytest.mark.parametrize(
    "dim",
    [
        "",
        " ",
        "columns",
        "rows.real",
        "rows/2",
        "rows**9",
        "rows//0",
        "-rows",
        "True",
        "1.5",
        "'a'",
        "rows if rows else 1",
        "rows[0]",
        "abs(rows)",
        "__import__('os')",
        "rows; rows",
        "(" * 5000 + "rows" + ")" * 5000,
        "+".join(["1"] * 50_000),
        "rows\x00",
        "9" * 5000,
    ],
)
def test_anything_else_is_refused(dim: str) -> None:
    with pytest.raises(ValueError):
        evaluate_dim(dim, SIZES)


def test_the_known_names_are_told() -> None:
    with pytest.raises(ValueError, match="'row' is not a dimension expression over rows, timesteps"):
        evaluate_dim("row", SIZES)


@given(st.text(alphabet="rowstime0123456789+-*/() .,_=lambda:[]'\"\n"))
def test_any_text_is_a_number_or_refused(text: str) -> None:
    try:
        value = evaluate_dim(text, SIZES)
    except ValueError:
        return
    assert type(value) is int


@given(st.integers(1, 99), st.integers(1, 99), st.integers(1, 9))
def test_evaluated_as_python_does(rows: int, timesteps: int, k: int) -> None:
    sizes = {"rows": rows, "timesteps": timesteps}
    for text in (f"{k}*rows - timesteps", f"(rows + {k}) // timesteps * {k}"):
        assert evaluate_dim(text, sizes) == eval(text, {}, sizes)
