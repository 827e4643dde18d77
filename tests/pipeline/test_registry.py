"""The registry: installed passes by name, plugins by a real entry point, and each name once."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from h3compile.errors import BuildError
from h3compile.pipeline.base import Pass, Tier
from h3compile.pipeline.registry import ENTRY_POINT, Registry, of
from h3compile.pipeline.spelling import resolve

PLUGIN = """
    from __future__ import annotations

    from dataclasses import dataclass
    from typing import ClassVar

    from h3compile.pipeline.base import Pass, Rewrite, Tier
    from h3compile.program.program import Program
    from h3compile.targets import Target


    @dataclass(frozen=True)
    class Paint(Pass):
        \"\"\"Paint blocks.\"\"\"

        name: ClassVar[str] = "paint"
        tier: ClassVar[Tier] = Tier.EXACT
        after: ClassVar[tuple[str, ...]] = ("outline",)
        coats: int = 1

        def apply(self, program: Program, target: Target) -> Rewrite:
            return Rewrite(program)

    class Bare:
        name = "bare"
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """A function that installs a distribution: its module and its dist-info, as a wheel would."""

    def of_points(distribution: str, points: dict[str, str], source: str = PLUGIN) -> None:
        folder = tmp_path / distribution
        info = folder / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{distribution}_plugin.py").write_text(textwrap.dedent(source), encoding="utf-8")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = "".join(f"{name} = {value}\n" for name, value in points.items())
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT}]\n{lines}")
        monkeypatch.syspath_prepend(str(folder))

    before = set(sys.modules)
    yield of_points
    for name in set(sys.modules) - before:
        if name.endswith("_plugin"):
            del sys.modules[name]


def test_the_shipped_passes() -> None:
    registry = Registry.default()
    default = {"canonicalize", "fold-schedule", "fuse", "hoist", "outline"}
    assert default | {"fp8", "sage", "skip"} <= set(registry.names())
    assert default == set(registry.defaults())
    assert registry.names() == sorted(registry.names())
    for name in registry.names():
        assert registry.get(name).name == name


def test_a_plugin(install: Install) -> None:
    assert "paint" not in Registry.default().names()
    install("painter", {"paint": "painter_plugin:Paint"})
    registry = Registry.default()
    assert "painter_plugin" not in sys.modules, "nothing is imported before it is asked for"
    found = registry.get("paint")
    assert found.__module__ == "painter_plugin"
    passes, _ = resolve("paint(coats=3)", registry)
    (paint,) = (item for item in passes if item.name == "paint")
    assert paint.spelled() == "paint(coats=3)"
    assert "paint" not in registry.defaults()


def test_a_plugin_takes_its_place_in_the_order(install: Install) -> None:
    from h3compile.pipeline.manager import order

    install("painter", {"paint": "painter_plugin:Paint"})
    passes, _ = resolve("paint", Registry.default())
    names = [item.name for item in order(passes)]
    assert names.index("outline") < names.index("paint")


@pytest.mark.parametrize("name", ["hoist", "paint"])
def test_a_name_twice(install: Install, name: str) -> None:
    """Two distributions, or a plugin and a pass of ours: neither wins in silence."""
    install("painter", {name: "painter_plugin:Paint"})
    if name == "paint":
        install("plumber", {name: "plumber_plugin:Paint"})
    with pytest.raises(
        BuildError, match=rf"two passes are called '{name}' \(.*_plugin:Paint.*\): uninstall one"
    ):
        Registry.default()


@pytest.mark.parametrize(
    ("point", "reason"),
    [
        ("no_such_module:Paint", r"pass 'odd' \(no_such_module:Paint\) cannot be imported \(No module named"),
        ("painter_plugin:Pain", r"pass 'odd' \(painter_plugin:Pain\) cannot be imported \(.*'Pain'"),
        ("painter_plugin:Paint", "painter_plugin:Paint is not a pass called 'odd': name the entry point"),
        ("painter_plugin:Bare", "painter_plugin:Bare is not a pass called 'odd'"),
        ("painter_plugin", "painter_plugin is not a pass called 'odd'"),
    ],
)
def test_a_broken_plugin_is_named(install: Install, point: str, reason: str) -> None:
    install("painter", {"odd": point})
    registry = Registry.default()
    assert "odd" in registry.names()
    with pytest.raises(BuildError, match=reason):
        registry.get("odd")


def test_the_nearest_name() -> None:
    with pytest.raises(BuildError, match="unknown pass 'hosit': did you mean 'hoist'"):
        Registry.default().get("hosit")


def test_a_pass_that_is_no_dataclass_or_has_no_tier() -> None:
    class Loose(Pass):
        name: ClassVar[str] = "loose"
        tier: ClassVar[Tier] = Tier.EXACT
        option: int = 1  # would silently be no option

    @dataclass(frozen=True)
    class Tierless(Pass):
        name: ClassVar[str] = "loose"

    for kind in (Loose, Tierless):
        with pytest.raises(
            BuildError, match=r"pass 'loose' \(.*\) is incomplete: make it a frozen dataclass"
        ):
            of({"loose": kind}).get("loose")


def test_a_registry_of_given_classes() -> None:
    @dataclass(frozen=True)
    class One(Pass):
        name: ClassVar[str] = "one"
        tier: ClassVar[Tier] = Tier.EXACT

    @dataclass(frozen=True)
    class Two(One):
        name: ClassVar[str] = "two"
        default: ClassVar[bool] = True

    registry = of({"two": Two, "one": One})
    assert (registry.names(), registry.defaults()) == (["one", "two"], ["two"])
    assert registry.get("one") is One
    with pytest.raises(BuildError, match="two passes are called 'one'"):
        registry.add("one", lambda: One, "elsewhere")
