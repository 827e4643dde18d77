"""`build` and `finalize`: what reaches the driver, and what the user reads afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from h3compile.cli.build import build as command
from h3compile.driver import BuildConfig
from h3compile.engine.loader import EngineFolder, open_engine
from h3compile.progress import Progress


class Driver:
    """Stands for `h3compile.build`: keeps what it was called with and hands back an engine."""

    def __init__(self, engine: Path) -> None:
        self.engine = engine
        self.options: dict[str, object] = {}

    def build(self, *, progress: Progress, **options: object) -> EngineFolder:
        self.options = options
        progress.phase("trace", None)
        return open_engine(self.engine)

    def finalize(self, path: Path, *, again: bool, progress: Progress) -> EngineFolder:
        self.again = again
        progress.phase("lower", 1)
        return open_engine(path)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, engine: Path) -> Driver:
    made = Driver(engine)
    monkeypatch.setattr("h3compile.driver.build", made.build)
    monkeypatch.setattr("h3compile.lower.finalize", made.finalize)
    return made


def test_only_what_was_typed_reaches_the_driver(h3compile, driver: Driver) -> None:  # type: ignore[no-untyped-def]
    done = h3compile("build")
    assert done.exit_code == 0, done.stderr
    assert driver.options == {}


def test_every_option_reaches_the_driver(h3compile, driver: Driver) -> None:  # type: ignore[no-untyped-def]
    repeated = (
        "--steps",
        "50",
        "--steps",
        "8",
        "--partition",
        "transformer",
        "--partition",
        "transformer_ref",
    )
    flags = ("--weightless", "--link", "--overwrite", "--allow", "hoist", "--provider", "attention=sdpa")
    names = ("--model", "m", "--passes", "-fold-schedule,fp8", "--target", "b300", "--backend", "eager")
    done = h3compile("build", *repeated, *flags, *names, "--gpus", "4", "--dump", "d", "-o", "x.h3e")
    assert done.exit_code == 0, done.stderr
    assert driver.options == {
        "model": "m",
        "passes": "-fold-schedule,fp8",
        "target": "b300",
        "gpus": 4,
        "backend": "eager",
        "steps": (8, 50),
        "partitions": ("transformer", "transformer_ref"),
        "weightless": True,
        "link": True,
        "overwrite": True,
        "dump": Path("d"),
        "allow": ("hoist",),
        "providers": {"attention": "sdpa"},
        "output": Path("x.h3e"),
    }
    assert set(driver.options) == set(BuildConfig.model_fields)


def test_a_recipe_gives_what_is_not_typed(h3compile, driver: Driver, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    recipe = tmp_path / "h3.yaml"
    recipe.write_text("target: b300\npasses: fp8\nsteps: [8]\noutput: from-recipe.h3e\n", encoding="utf-8")
    done = h3compile("build", "--recipe", recipe, "--target", "h200")
    assert done.exit_code == 0, done.stderr
    assert driver.options == {
        "target": "h200",
        "passes": "fp8",
        "steps": (8,),
        "output": Path("from-recipe.h3e"),
    }


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("taget: b300", "has no option 'taget' to set: did you mean 'target'?"),
        ("steps: many", "error: steps cannot be 'many': Input should be a valid tuple"),
    ],
)
def test_a_bad_recipe_is_one_line(h3compile, driver: Driver, tmp_path: Path, text: str, line: str) -> None:  # type: ignore[no-untyped-def]
    recipe = tmp_path / "h3.yaml"
    recipe.write_text(text, encoding="utf-8")
    done = h3compile("build", "--recipe", recipe)
    assert done.exit_code == 1
    assert line in done.stderr and done.stderr.count("\n") == 1
    assert driver.options == {}


def test_the_user_reads_where_the_engine_is_and_its_digest(h3compile, driver: Driver) -> None:  # type: ignore[no-untyped-def]
    done = h3compile("build")
    words = done.stdout.split()
    assert str(driver.engine) in words and open_engine(driver.engine).digest in words
    assert "trace" in done.stderr and "trace" not in done.stdout


def test_finalize_ends_what_was_pending(h3compile, driver: Driver) -> None:  # type: ignore[no-untyped-def]
    done = h3compile("finalize", driver.engine)
    assert done.exit_code == 0, done.stderr
    assert open_engine(driver.engine).digest in done.stdout
    assert driver.again is False
    assert h3compile("finalize", driver.engine, "--again").exit_code == 0
    assert driver.again is True


def test_the_options_are_fields_of_the_real_config() -> None:
    spelled = {"partition": "partitions", "provider": "providers"}
    # ``--hbm`` is a way to write the pass ``dlo``, and a recipe is where the fields come from.
    annotations = {name for name in command.__annotations__ if name not in ("return", "recipe", "hbm")}
    assert {spelled.get(name, name) for name in annotations} <= set(BuildConfig.model_fields)


def test_providers_are_typed_one_by_one(h3compile, driver: Driver) -> None:  # type: ignore[no-untyped-def]
    done = h3compile("build", "--provider", "attention=cudnn", "--provider", "linear_fp8=triton")
    assert done.exit_code == 0, done.stderr
    assert driver.options == {"providers": {"attention": "cudnn", "linear_fp8": "triton"}}


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (("attention",), "--provider 'attention' names no provider: write OPERATOR=PROVIDER"),
        (("attention=",), "--provider 'attention=' names no provider"),
        (("attention=cudnn", "attention=triton"), "--provider names two for attention: name one"),
    ],
)
def test_a_bad_provider_is_one_line(h3compile, driver: Driver, typed: tuple[str, ...], line: str) -> None:  # type: ignore[no-untyped-def]
    done = h3compile("build", *(word for text in typed for word in ("--provider", text)))
    assert done.exit_code == 1
    assert line in done.stderr and done.stderr.count("\n") == 1
    assert driver.options == {}
