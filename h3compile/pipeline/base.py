"""What a pass is."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from h3compile.program.facts import ModelFacts
from h3compile.program.program import Level, Program
from h3compile.targets import Target

__all__ = ["Match", "Pass", "Rewrite", "Tier"]


class Tier(enum.StrEnum):
    """What a pass may do to the numbers."""

    EXACT = "exact"  # equal bits
    ROUNDING = "rounding"  # no further from float64 than the reference is
    LOSSY = "lossy"  # an error that is measured and stated


@dataclass(frozen=True)
class Match:
    """One place a pass rewrote: what kind of thing, and where it was found."""

    kind: str
    where: str


@dataclass(frozen=True)
class Rewrite:
    """The result of a pass: a new program and what it matched in the old one."""

    program: Program
    matches: tuple[Match, ...] = field(default=())

    def counts(self) -> dict[str, int]:
        """Number of matches by kind."""
        return dict(Counter(match.kind for match in self.matches))


@dataclass(frozen=True)
class Pass:
    """A rewrite of a program with one purpose; subclasses are frozen dataclasses.

    Their fields are the options. ``requires`` must be in the pipeline and run before; ``after`` run
    before where they are present; ``conflicts`` must be absent. ``level`` is the level of the program
    a pass leaves behind, ``None`` when it does not change it.
    """

    name: ClassVar[str]
    tier: ClassVar[Tier]
    requires: ClassVar[tuple[str, ...]] = ()
    conflicts: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()
    level: ClassVar[Level | None] = None
    # Part of every build unless taken out with -NAME.
    default: ClassVar[bool] = False

    def apply(self, program: Program, target: Target) -> Rewrite:
        """Rewrite ``program`` for ``target``; the argument is never changed."""
        raise NotImplementedError

    def check(self, partitions: Sequence[str]) -> None:
        """Raise `BuildError` where the options cannot serve a build of these sets of weights.

        Called before anything is traced; what needs the program is for `apply`.
        """

    def expects(self, facts: ModelFacts) -> Mapping[str, int]:
        """How often each kind must match in a model with these facts; kinds left out are not counted."""
        return facts.expected.get(self.name, {})

    def spelled(self) -> str:
        """The pass as a user would type it: the name, and the options that differ from their defaults.

        Raises `ValueError` when an option has a value that cannot be typed.
        """
        options = [
            f"{option.name}={_spell(getattr(self, option.name))}"
            for option in dataclasses.fields(self)
            if option.init and getattr(self, option.name) != option.default
        ]
        return f"{self.name}({','.join(options)})" if options else self.name


# What a text option may hold: nothing that means something in a list of passes, nor the spelling of None.
_WORD = re.compile(r"(?!none$)[\w.:/-]+", re.ASCII)


def _spell(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value).replace("e+", "e")  # a + parts the items of a tuple
        case None:
            return "none"
        case tuple():
            return "+".join(map(_spell, value))
        case str() if _WORD.fullmatch(value):
            return str(value)
    raise ValueError(f"{value!r} cannot be typed as an option")
