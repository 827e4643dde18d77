"""The commands that list: targets, passes."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from h3compile.pipeline.base import Pass, Tier
from h3compile.pipeline.registry import Registry, of
from h3compile.targets.detect import CudaDevice


@dataclass(frozen=True)
class Sketch(Pass):
    """Draw blocks
    coarsely.

    At first.
    """

    lines: int = 3
    where: str = dataclasses.field(kw_only=True)
    name: ClassVar[str] = "sketch"
    tier: ClassVar[Tier] = Tier.LOSSY
    requires: ClassVar[tuple[str, ...]] = ("outline",)
    conflicts: ClassVar[tuple[str, ...]] = ("paint",)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "default", classmethod(lambda cls: of({"sketch": Sketch})))


def use(monkeypatch: pytest.MonkeyPatch, device: CudaDevice | None) -> None:
    monkeypatch.setattr(sys.modules["h3compile.targets.detect"], "current_device", lambda: device)


def test_an_unknown_device_is_said_after_the_list(h3compile, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    use(monkeypatch, CudaDevice("NVIDIA GH200 480GB", (9, 0), 0))
    done = h3compile("targets")
    assert done.exit_code == 0
    assert "'NVIDIA GH200 480GB' is no known target" in done.stdout


def test_passes_are_listed_with_what_they_need(h3compile, registry) -> None:  # type: ignore[no-untyped-def]
    done = h3compile("passes")
    assert done.exit_code == 0
    row = next(line for line in done.stdout.splitlines() if "sketch" in line)
    assert " ".join(row.split()) == (
        "sketch lossy Draw blocks coarsely. lines=3, where: str requires outline; conflicts with paint"
    )


def test_one_pass_is_shown_whole(h3compile, registry) -> None:  # type: ignore[no-untyped-def]
    text = h3compile("passes", "sketch").stdout
    assert "Draw blocks coarsely.\n" in text and "At first." in text
    assert ["conflicts", "with", "paint"] in [line.split() for line in text.splitlines()]


def test_an_unknown_pass_names_the_nearest(h3compile, registry) -> None:  # type: ignore[no-untyped-def]
    done = h3compile("passes", "sktech")
    assert (done.exit_code, done.stderr) == (1, "error: unknown pass 'sktech': did you mean 'sketch'?\n")


def test_the_installed_passes_can_be_listed(h3compile) -> None:  # type: ignore[no-untyped-def]
    done = h3compile("passes")
    assert done.exit_code == 0, done.stderr
    assert "fold-schedule" in done.stdout
