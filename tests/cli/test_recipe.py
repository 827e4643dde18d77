"""Recipes: what they may say, and what typing overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from h3compile.cli.recipe import merged, read_recipe
from h3compile.driver import build, configured
from h3compile.errors import BuildError, H3CompileError

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


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"steps": ["many"]}, "steps.0 cannot be 'many': Input should be a valid integer"),
        ({"steps": [1]}, "steps: a schedule has at least 2 grid points"),
        ({"taget": "b300"}, "taget cannot be 'b300': Extra inputs are not permitted"),
    ],
)
def test_a_wrong_value_is_one_line(options: dict[str, object], line: str) -> None:
    with pytest.raises(BuildError) as caught:
        configured(options)
    assert str(caught.value).startswith(line)


def test_the_python_api_says_the_same() -> None:
    with pytest.raises(BuildError, match="a schedule has at least 2 grid points"):
        build(steps=(8, 1))
    with pytest.raises(BuildError, match="steps cannot be 8: Input should be a valid tuple"):
        build(steps=8)  # type: ignore[arg-type]
