"""The documents say what is true: links, the table of passes, every runnable block, every example."""

from __future__ import annotations

import argparse
import doctest
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import h3compile
from h3compile.cli.recipe import read_recipe
from h3compile.driver import BuildConfig
from h3compile.models.h3 import PARTITIONS
from h3compile.pipeline.registry import Registry

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
PLUGIN = ROOT / "examples" / "plugin"

# A block to run is marked; a text block right after it is what it must print, with ... for anything.
RUNNABLE = re.compile(r"<!-- run -->\n```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
WITH_BLOCKS = [page for page in PAGES if page.exists() and RUNNABLE.search(page.read_text("utf-8"))]


def page_id(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_relative_link_resolves(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    for link in links:
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}"


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def first_columns(page: str, count: int) -> dict[str, tuple[str, ...]]:
    """The rows of a page's tables whose first cell is `code`: that name, and the cells after it."""
    rows = re.findall(r"^\| `([\w-]+)` \|(.*)\|$", (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE)
    return {name: tuple(cell.strip() for cell in rest.split("|"))[:count] for name, rest in rows}


def test_the_table_of_passes_is_the_registry() -> None:
    registry = Registry.default()
    ours = {
        name: (str(registry.get(name).tier),)
        for name in registry.names()
        if registry.get(name).__module__.startswith("h3compile.")
    }
    assert first_columns("passes.md", 1) == ours


def test_the_table_of_partitions_is_that_of_the_model() -> None:
    assert first_columns("checkpoints.md", 1).keys() == PARTITIONS.keys()


def test_the_pass_that_is_shown_is_the_one_that_is_shipped() -> None:
    page = (ROOT / "docs" / "passes.md").read_text("utf-8")
    sources = [path.read_text("utf-8") for path in PLUGIN.rglob("*") if path.suffix in (".py", ".toml")]
    shown = re.findall(r"```(?:python|toml)\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 3
    for block in shown:
        assert any(block in source for source in sources), block


def test_the_example_recipe_is_one() -> None:
    options = read_recipe(ROOT / "examples" / "recipe.yaml", BuildConfig.model_fields)
    assert BuildConfig.model_validate(options).steps == (8, 50)


@pytest.fixture(scope="module")
def workplace(checkpoints: Callable[[torch.dtype], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages assume: `tiny-h3`, and `tiny.h3e` made from it with both partitions."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "tiny-h3").symlink_to(checkpoints(torch.bfloat16))
    h3compile.build(
        str(folder / "tiny-h3"),
        backend="eager",
        target="cpu",
        steps=(4,),
        partitions=tuple(PARTITIONS),
        output=folder / "tiny.h3e",
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=page_id)
def test_every_marked_block_runs_and_prints_what_is_shown(
    page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    names: dict[str, object] = {"__name__": page.stem}  # one namespace a page: blocks build on each other
    checker = doctest.OutputChecker()
    for block, expected in RUNNABLE.findall(page.read_text("utf-8")):
        exec(compile(block, page.name, "exec"), names)
        printed = capsys.readouterr().out
        assert checker.check_output(expected, printed, doctest.ELLIPSIS), printed


# What each example must say. demo.py is `make demo`: it compiles with Inductor, which takes longer.
EXAMPLES = {
    "python_api": ("4 grid points, 3 forwards", "5.17 s in "),
    "two_partitions": ("transformer: 2 forwards", "transformer_ref: 2 forwards"),
    "lossy": (
        "fuse, fp8, sage(k_block=16), skip(",
        "skipped tiles: none in ",
        "mean difference of a pixel: ",
    ),
    "interrupt": ("the forward was stopped after ", "the next request: 2 forwards, 5.17 s"),
    "torchrun": ("2 forwards on 2 ranks, ",),
    "server_ranks": ("'the tide comes in': ", "'': 400 the prompt is empty", "the server ended with 0"),
    "ray_replicas": ("clip-0.mp4\n", "clip-1.mp4\n", "followers computed 4 forwards"),
    "plan": ("| `rtx-4090` | BF16 | ", "| `8xb300` | fp8 | "),
    "ranks_plan": ("| `h200` | BF16 | ", "| `b300` | fp8,sage | "),
}
# What they need besides what is installed for tests.
NEEDS = {
    "ray_replicas": pytest.mark.skipif(
        find_spec("ray") is None, reason="ray is not installed: pip install 'h3compile[ray]'"
    )
}


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES, "demo"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS.get(name, ())) for name in EXAMPLES])
def test_an_example_runs(
    name: str,
    workplace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path), "--model", str(workplace / "tiny-h3")])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for line in EXAMPLES[name]:
        assert line in printed


@pytest.mark.parametrize("name", ["torchrun", "server_ranks", "ray_replicas"])
def test_a_second_run_in_a_folder_makes_nothing_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []

    def build(*_: str, output: Path, **__: object) -> None:
        output.mkdir()
        built.append(output)

    monkeypatch.setattr(h3compile, "build", build)
    example = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    for _ in range(2):
        example["prepare"](argparse.Namespace(folder=tmp_path, model=None))
    assert len(built) == 1 and (tmp_path / "tiny" / "transformer").is_dir()


def test_without_ray_the_example_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(sys, "argv", ["ray_replicas", str(tmp_path / "new")])
    with pytest.raises(SystemExit, match=r"^Ray is not installed: pip install 'h3compile\[ray\]'$"):
        runpy.run_path(str(ROOT / "examples" / "ray_replicas.py"), run_name="__main__")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_plugin_installs_and_passes_its_tests(tmp_path: Path) -> None:
    package = shutil.copytree(PLUGIN, tmp_path / "plugin")  # building leaves files behind
    site = tmp_path / "site"
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--target")
    run("-m", "pip", "install", "-q", *options, site, package)
    settings = ("-q", "-p", "no:logging", "--import-mode=importlib", "--rootdir", tmp_path, "-c", os.devnull)
    run("-m", "pytest", *settings, package / "tests", PYTHONPATH=str(site))


def run(*arguments: str | Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
