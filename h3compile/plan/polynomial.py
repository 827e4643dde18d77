"""Polynomials in the free lengths of a model: how work and memory grow with rows and timesteps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["NOTHING", "Polynomial", "Sizes", "total", "undominated"]

# The length of every free dimension, by name: rows, text_rows, video_rows, audio_rows, timesteps.
Sizes = Mapping[str, int | float]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Polynomial:
    """A sum of products of lengths, such as ``28672*rows*rows + 7*text_rows``; all coefficients positive.

    ``terms`` are (names in order, coefficient), sorted, without zeros. Make one with `of`, `constant` or
    `parse`.
    """

    terms: tuple[tuple[tuple[str, ...], float], ...] = ()

    @classmethod
    def of(cls, terms: Mapping[tuple[str, ...], float]) -> Polynomial:
        """The sum of ``terms``: the names multiplied, some more than once, and the coefficient."""
        kept: dict[tuple[str, ...], float] = {}
        for names, value in terms.items():
            key = tuple(sorted(names))
            kept[key] = kept.get(key, 0) + value
        return cls(tuple(sorted((names, _tidy(value)) for names, value in kept.items() if value)))

    @classmethod
    def constant(cls, value: float) -> Polynomial:
        """A number that depends on nothing."""
        return cls.of({(): value})

    @classmethod
    def parse(cls, text: str) -> Polynomial:
        """What `str` printed. Raises `ValueError` on anything else; nothing is evaluated."""
        found: dict[tuple[str, ...], float] = {}
        for term in text.split(" + "):
            names, value = [], 1.0
            for factor in term.split("*"):
                if _NAME.fullmatch(factor):
                    names.append(factor)
                else:
                    value *= float(factor)
            key = tuple(sorted(names))
            found[key] = found.get(key, 0) + value
        return cls.of(found)

    def __str__(self) -> str:
        """Constant last, largest degree first: ``28672*rows*rows + 512``; ``0`` when there is nothing."""
        ordered = sorted(self.terms, key=lambda term: (-len(term[0]), term[0]))
        return " + ".join("*".join((str(value), *names)) for names, value in ordered) or "0"

    def __add__(self, other: Polynomial) -> Polynomial:
        return total((self, other))

    def __mul__(self, factor: float) -> Polynomial:
        return Polynomial.of({names: value * factor for names, value in self.terms})

    def at(self, sizes: Sizes) -> float:
        """The value at ``sizes``; `KeyError` where one of the lengths is not given."""
        return sum(value * math.prod(sizes[name] for name in names) for names, value in self.terms)

    def in_terms_of(self, shares: Mapping[str, tuple[str, float]]) -> Polynomial:
        """The same where some lengths are the share of another one that ``shares`` says."""
        found: dict[tuple[str, ...], float] = {}
        for names, value in self.terms:
            replaced = [shares.get(name, (name, 1.0)) for name in names]
            key = tuple(sorted(name for name, _ in replaced))
            found[key] = found.get(key, 0) + value * math.prod(share for _, share in replaced)
        return Polynomial.of(found)

    def dominates(self, other: Polynomial) -> bool:
        """Whether every coefficient is at least that of ``other``: then the value is, for all lengths."""
        mine = dict(self.terms)
        return all(mine.get(names, 0) >= value for names, value in other.terms)


NOTHING = Polynomial()


def total(polynomials: Iterable[Polynomial]) -> Polynomial:
    """Their sum."""
    terms: dict[tuple[str, ...], float] = {}
    for polynomial in polynomials:
        for names, value in polynomial.terms:
            terms[names] = terms.get(names, 0) + value
    return Polynomial.of(terms)


def undominated(polynomials: Iterable[Polynomial]) -> tuple[Polynomial, ...]:
    """Those that may be the largest for some lengths, each once, in a fixed order."""
    distinct = sorted(set(polynomials), key=str)
    return tuple(
        one for one in distinct if not any(other.dominates(one) for other in distinct if other != one)
    )


def _tidy(value: float) -> float:
    return int(value) if float(value).is_integer() else float(value)
