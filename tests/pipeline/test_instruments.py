"""Instruments watch every pass, and what they write is numbered and always the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from h3compile.pipeline.base import Match, Pass, Rewrite, Tier
from h3compile.pipeline.instruments import Dump, Report
from h3compile.pipeline.manager import Manager
from h3compile.program.peel import peel
from h3compile.program.printer import print_program
from h3compile.program.program import Program
from h3compile.program.stages import Stage
from h3compile.targets import Target, find_target


@dataclass(frozen=True)
class First(Pass):
    name: ClassVar[str] = "first"
    tier: ClassVar[Tier] = Tier.EXACT
    stage: ClassVar[Stage] = Stage.REQUEST

    def apply(self, program: Program, target: Target) -> Rewrite:
        peeled = peel(program, self.stage)
        return Rewrite(peeled.program, tuple(Match("value", v) for v in peeled.values))


@dataclass(frozen=True)
class Second(First):
    name: ClassVar[str] = "second"
    stage: ClassVar[Stage] = Stage.SCHEDULE


class Watch:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, str, int]] = []

    def before(self, number: int, item: Pass, program: Program) -> None:
        self.seen.append(("before", number, item.name, len(program.regions)))

    def after(self, number: int, item: Pass, program: Program) -> None:
        self.seen.append(("after", number, item.name, len(program.regions)))


def test_around_every_pass(toys: SimpleNamespace) -> None:
    watch = Watch()
    program, runs = Manager([Second(), First()], instruments=[watch]).run(toys.toy(), find_target("cpu"))
    sizes = [3, runs[0].regions_after, runs[0].regions_after, len(program.regions)]
    assert watch.seen == [
        ("before", 0, "first", sizes[0]),
        ("after", 0, "first", sizes[1]),
        ("before", 1, "second", sizes[2]),
        ("after", 1, "second", sizes[3]),
    ]


def test_dumps(toys: SimpleNamespace, tmp_path: Path) -> None:
    texts = []
    for folder in (tmp_path / "a" / "b", tmp_path / "c"):
        program, _ = Manager([First(), Second()], instruments=[Dump(folder)]).run(
            toys.toy(), find_target("cpu")
        )
        texts.append({path.name: path.read_text("utf-8") for path in folder.iterdir()})
    assert texts[0] == texts[1]
    assert sorted(texts[0]) == [
        "00_first.after.txt",
        "00_first.before.txt",
        "01_second.after.txt",
        "01_second.before.txt",
    ]
    assert texts[0]["00_first.before.txt"] == print_program(toys.toy())
    assert texts[0]["00_first.after.txt"] == texts[0]["01_second.before.txt"]
    assert texts[0]["01_second.after.txt"] == print_program(program)


def test_the_report_advances_once_a_pass(toys: SimpleNamespace) -> None:
    class Counting:
        count = 0

        def phase(self, name: str, total: int | None) -> None: ...

        def advance(self, amount: int = 1) -> None:
            self.count += amount

        def note(self, text: str) -> None: ...

    progress = Counting()
    Manager([First(), Second()], instruments=[Report(progress)]).run(toys.toy(), find_target("cpu"))
    assert progress.count == 2
