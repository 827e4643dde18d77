"""Imports go one way: the arrows of the design, declared once here and read from the source."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAPPED = ("passes", "backends", "models")

# house -> the houses it may import. A house is a package below h3compile or, for a module that lies
# directly in it, that module; "" is `h3compile` itself, which exports two functions lazily.
LOWER: dict[str, set[str]] = {
    "errors": set(),
    "progress": set(),
    "targets": set(),
    "program": set(),
    "ops": {"targets"},
    "models": {"program"},
    "pipeline": {"program", "targets"},
    "plan": {"targets", "program", "ops"},
    "passes": {"pipeline", "program", "targets", "ops", "plan"},
    "backends": {"program", "ops", "targets", "engine"},
    "engine": {"program", "targets"},
    "runtime": {"engine", "program", "ops", "targets", "plan"},
    "quality": {"engine", "program", "pipeline", "runtime", "plan", "ops", "targets"},
}
# The drivers, which see all of them, and the command line, which sees the drivers too.
ARROWS = LOWER | {
    "lower": set(LOWER),
    "driver": {*LOWER, "lower"},
    "cli": {*LOWER, "lower", "driver"},
    "": {"driver", "runtime"},
}

# What everybody may import; "" is the package, for its version.
SHARED = {"errors", "progress", ""}

# What it exports lazily, and where that lies.
EXPORTS = {"build": "driver", "load": "runtime"}

# Libraries that belong to some houses only: an engine runs where no model library is installed.
LIBRARIES: dict[str, set[str]] = {
    "diffusers": {"models"},
    "accelerate": {"models"},
    "transformers": {"models"},
    "modelopt": {"models"},
    "typer": {"cli"},
    "rich": {"cli"},
    "jinja2": {"quality"},
    "matplotlib": {"plan"},
}


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name, and the line that imports it."""

    module: str
    line: int


def imports(source: str) -> Iterator[Import]:
    """Every module that ``source`` imports, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (Import(alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = "." * level + (module or "")
                # Each name may be a module or something in one: the longer name tells both.
                yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in names)
            case ast.Call(
                func=ast.Attribute(attr=called) | ast.Name(id=called),
                args=[ast.Constant(value=str(name)), *_],
            ):
                if called in ("import_module", "__import__"):
                    yield Import(name, node.lineno)


def house_of(module: str) -> str:
    """The house of a module below h3compile, by its full name."""
    parts = module.split(".")
    if len(parts) == 1:
        return ""
    second = parts[1]
    if len(parts) == 2 and second in EXPORTS:
        return EXPORTS[second]
    return second if second in ARROWS or len(parts) > 2 else ""


def against(module: str, source: str) -> list[str]:
    """What ``source``, the text of ``module``, imports against the arrows."""
    own = module.partition(".")[2].partition(".")[0]
    if own not in ARROWS:
        return [f"{module}: declare the arrows of {own}"]
    found: dict[str, None] = {}  # ordered, and a line that imports five names is told once
    for item in imports(source):
        top = item.module.split(".")[0]
        where = f"{module}:{item.line}"
        if item.module.startswith("."):
            found[f"{where} has a relative import"] = None
        elif own not in LIBRARIES.get(top, {own}):
            found[f"{where} imports {top}, a library of {', '.join(sorted(LIBRARIES[top]))} only"] = None
        elif top == "h3compile":
            other = house_of(item.module)
            if other != own and other not in SHARED and other not in ARROWS[own]:
                found[f"{where} enters {other}, and {own or 'h3compile'} may not"] = None
    return list(found)


def modules() -> dict[str, Path]:
    """Every module of the project by its full name."""
    found = {}
    for folder in ("h3compile", *MAPPED):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if folder == "h3compile" else ("h3compile", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


def test_the_arrows_have_no_circle() -> None:
    reached: dict[str, set[str]] = {}

    def reach(house: str, trail: tuple[str, ...]) -> set[str]:
        assert house not in trail, f"a circle: {' -> '.join((*trail, house))}"
        if house not in reached:
            reached[house] = ARROWS[house].union(*(reach(other, (*trail, house)) for other in ARROWS[house]))
        return reached[house]

    for house in ARROWS:
        reach(house, ())
    assert not reached["runtime"] & {"models", "passes", "backends", "pipeline"}


def test_no_import_goes_against_the_arrows() -> None:
    found = [
        line for name, path in modules().items() for line in against(name, path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("h3compile.runtime.load", "from h3compile.passes.hoist import Hoist"),
        ("h3compile.runtime.load", "from h3compile import models"),
        ("h3compile.runtime.load", "import h3compile.backends.inductor as lower"),
        ("h3compile.runtime.load", "def f():\n    from h3compile.models.h3 import facts"),
        ("h3compile.runtime.load", "if TYPE_CHECKING:\n    from h3compile.pipeline.registry import Registry"),
        ("h3compile.runtime.load", "import importlib\nimportlib.import_module('h3compile.passes')"),
        ("h3compile.runtime.load", "from h3compile import build"),
        ("h3compile.engine.loader", "from h3compile import load"),
        ("h3compile.program.region", "from h3compile.engine.manifest import Manifest"),
        ("h3compile.driver", "from h3compile.cli.main import main"),
        ("h3compile.models.h3", "from h3compile.targets import Target"),
        ("h3compile.errors", "from h3compile.program.stages import Stage"),
        ("h3compile.runtime.module", "import diffusers"),
        ("h3compile.program.region", "from .stages import Stage"),
        ("h3compile.program.region", "from . import stages"),
        ("h3compile.new.house", "import os"),
    ],
)
def test_a_planted_import_is_caught(module: str, source: str) -> None:
    assert len(against(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("h3compile.runtime.load", "from h3compile.engine.loader import open_engine"),
        ("h3compile.runtime.load", "from h3compile.errors import EngineError"),
        ("h3compile.engine.writer", "from h3compile import __version__"),
        ("h3compile.passes.hoist", "from h3compile.pipeline.base import Pass"),
        ("h3compile.models.h3", "import diffusers.models"),
        ("h3compile.cli.run", "from h3compile import load"),
        ("h3compile", "from h3compile.driver import build"),
        ("h3compile.program.region", "from h3compile.program.stages import Stage"),
    ],
)
def test_an_import_along_the_arrows_passes(module: str, source: str) -> None:
    assert against(module, source) == []


def test_the_packages_declared_are_the_folders_there_are() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert set(declared["packages"]) == found
    assert declared["package-dir"] == {"h3compile": "h3compile"} | {
        f"h3compile.{name}": name for name in MAPPED
    }
    folders = {path.parent for path in modules().values()}
    bare = sorted(
        str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()
    )
    assert not bare, f"modules in a folder without __init__.py: {bare}"


@pytest.mark.parametrize("name", MAPPED)
def test_a_mapped_package_refuses_another_name(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / name / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.raises(ImportError, match=f"import this package as h3compile.{name}"):
        spec.loader.exec_module(module)
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and f"import this package as h3compile.{name}" in done.stderr
