"""Recipes: what they may say, and what typing overrides."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from h3compile.cli.recipe import invalid, merged, read_recipe
from h3compile.errors import H3CompileError

KNOWN = ("model", "passes", "steps", "target", "weightless")


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_options_are_read_with_their_types(tmp_path: Path) -> None:
    path = recipe(tmp_path, "target: b300\nsteps: [50, 8]\nweightless: true\n")
    assert read_recipe(path, KNOWN) == {"target": "b300", "steps": [50, 8], "weightless": True}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("taget: b300", r"has no option 'taget' to set: did you mean 'target'\?"),
        ("a: [1, 2", r"line \d+ is not YAML: "),
        ("- target", "holds no options: write one `option: value` a line"),
        ("", "holds no options"),
        ("!!python/object/apply:os.system [echo]", "is not YAML: could not determine a constructor"),
    ],
)
def test_a_bad_recipe_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(H3CompileError, match=line) as caught:
        read_recipe(recipe(tmp_path, text), KNOWN)
    assert "\n" not in str(caught.value)


def test_an_unreadable_recipe_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        H3CompileError, match=r"cannot read the recipe .*none.yaml: no such file or directory"
    ):
        read_recipe(tmp_path / "none.yaml", KNOWN)
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(H3CompileError, match="it is not utf-8 text"):
        read_recipe(tmp_path / "r.yaml", KNOWN)


def test_what_is_typed_goes_before_the_recipe() -> None:
    typed = {"target": "h200", "passes": None, "weightless": None}
    assert merged({"target": "b300", "passes": "fp8"}, typed) == {"target": "h200", "passes": "fp8"}


class Config(BaseModel):
    steps: list[int]

    @field_validator("steps")
    @classmethod
    def _steps(cls, steps: list[int]) -> list[int]:
        if min(steps) < 2:
            raise ValueError("a schedule has at least 2 grid points")
        return steps


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        (["many"], "steps.0 cannot be 'many': Input should be a valid integer"),
        ([1], "steps: a schedule has at least 2 grid points"),
    ],
)
def test_a_wrong_value_is_one_line(steps: list[object], line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate({"steps": steps})
    assert str(invalid(caught.value)).startswith(line)
