"""One target as a table of TOML: read strictly, and written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn, cast, get_args

from h3compile.errors import H3CompileError, nearest
from h3compile.targets.rates import FLOPS, Link, LinkKind, Rate
from h3compile.targets.target import Target

__all__ = ["read_entry", "write_entry"]

_ARCH = "an architecture such as sm_90a, or cpu"
# Key -> what it must be, in words. A quantity carries its unit in its key.
_TEXT = {"title": "a text", "arch": _ARCH}
_OPTIONAL = {
    "sheet": "a text",
    "memory_gb": "a number of gigabytes",
    "devices": "a list of texts",
    "launch_us": "a number of microseconds",
    "bandwidth": "a table",
    "host": "a table",
    "peer": "a table",
    "flops": "a table",
}
_GIGA, _TERA, _MICRO = 1e9, 1e12, 1e-6
_LARGEST = 1e9  # of any quantity in its unit, far beyond what exists


def read_entry(name: str, entry: object, where: str) -> Target:
    """The target ``name`` from its table.

    Raises `H3CompileError` that begins with ``where`` for a key that is missing or unknown, and for a value
    of the wrong type or out of range.
    """
    return _Reader(where, name).target(entry)


class _Reader:
    """Reads one table; ``path`` of a method is the keys that lead to what it reads."""

    def __init__(self, where: str, name: str) -> None:
        self._where = where
        self._name = name

    def target(self, entry: object) -> Target:
        found = self._table(entry, (), _TEXT, _OPTIONAL)
        arch = self._text(found["arch"], ("arch",))
        cpu = arch == "cpu"
        for key in ("memory_gb", "devices", "launch_us"):
            if not cpu and key not in found:
                self._fail((), f"has no {key}", "add it")
        memory = found.get("memory_gb")
        launch = found.get("launch_us")
        flops = self._table(found.get("flops", {}), ("flops",), {}, dict.fromkeys(FLOPS, "a table"))
        return Target(
            name=self._name,
            title=self._text(found["title"], ("title",)),
            arch=arch,
            memory=None if memory is None else round(self._positive(memory, ("memory_gb",)) * _GIGA),
            devices=self._texts(found.get("devices", []), ("devices",)),
            bandwidth=self._bytes(found["bandwidth"], ("bandwidth",)) if "bandwidth" in found else None,
            flops={
                key: self._rate(value, ("flops", key), "tflop_s", _TERA, {}) for key, value in flops.items()
            },
            host=self._link(found["host"], ("host",)) if "host" in found else None,
            peer=self._link(found["peer"], ("peer",)) if "peer" in found else None,
            launch_seconds=0.0 if launch is None else self._positive(launch, ("launch_us",)) * _MICRO,
            sheet=self._text(found["sheet"], ("sheet",)) if "sheet" in found else "",
        )

    def _bytes(self, value: object, path: Sequence[str]) -> Rate:
        return self._rate(value, path, "gb_s", _GIGA, {})

    def _link(self, value: object, path: Sequence[str]) -> Link:
        kinds: tuple[LinkKind, ...] = get_args(LinkKind)
        rate = self._rate(value, path, "gb_s", _GIGA, {"kind": f"one of {', '.join(kinds)}"})
        named = value["kind"] if isinstance(value, Mapping) else None
        if named not in kinds:
            self._fail((*path, "kind"), f"is {named!r}", f"make it one of {', '.join(kinds)}")
        return Link(cast(LinkKind, named), rate)

    def _rate(
        self, value: object, path: Sequence[str], unit: str, scale: float, more: Mapping[str, str]
    ) -> Rate:
        wanted = {unit: "a number", "share": "a number", "source": "a text", **more}
        table = self._table(value, path, wanted, {})
        share = self._positive(table["share"], (*path, "share"))
        if share > 1:
            self._fail((*path, "share"), f"is {share:g}", "make it at most 1")
        source = self._text(table["source"], (*path, "source"))
        return Rate(self._positive(table[unit], (*path, unit)) * scale, share, source)

    def _table(
        self,
        value: object,
        path: Sequence[str],
        required: Mapping[str, str],
        optional: Mapping[str, str],
    ) -> Mapping[str, object]:
        if not isinstance(value, Mapping):
            self._fail(path, f"is {value!r}", "make it a table")
        for key in value:
            if key not in required and key not in optional:
                self._fail(path, f"has an unknown key {key!r}", nearest(key, {**required, **optional}))
        for key, what in required.items():
            if key not in value:
                self._fail(path, f"has no {key}", f"add it, {what}")
        return value

    def _text(self, value: object, path: Sequence[str]) -> str:
        if not isinstance(value, str) or not value.strip():
            self._fail(path, f"is {value!r}", "make it a text that is not empty")
        return value

    def _texts(self, value: object, path: Sequence[str]) -> tuple[str, ...]:
        if not isinstance(value, list):
            self._fail(path, f"is {value!r}", "make it a list of texts")
        return tuple(self._text(item, path) for item in value)

    def _positive(self, value: object, path: Sequence[str]) -> float:
        # A bool is an int to Python, and no number to anybody else.
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fail(path, f"is {value!r}", "make it a number")
        if not 0 < value < _LARGEST:  # neither is nan
            self._fail(path, f"is {value!r}", f"make it more than 0 and less than {_LARGEST:g}")
        return float(value)

    def _fail(self, path: Sequence[str], cause: str, mend: str) -> NoReturn:
        raise H3CompileError(f"{self._where}: {'.'.join((self._name, *path))} {cause}", mend)


def write_entry(target: Target, comment: str = "") -> str:
    """``target`` as a TOML table that `read_entry` takes, after the lines of ``comment``."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    lines += [*([""] if lines else []), f"[{_key(target.name)}]", *_facts(target)]
    for name, link in (("host", target.host), ("peer", target.peer)):
        if link is not None:
            lines.append(f"{name} = {_inline(link.rate, 'gb_s', _GIGA, link.kind)}")
    if target.flops:
        lines += ["", f"[{_key(target.name)}.flops]"]
        lines += [f"{_text(key)} = {_inline(rate, 'tflop_s', _TERA)}" for key, rate in target.flops.items()]
    return "\n".join(lines) + "\n"


def _facts(target: Target) -> Iterator[str]:
    yield f"title = {_text(target.title)}"
    yield f"arch = {_text(target.arch)}"
    if target.memory is not None:
        yield f"memory_gb = {_number(target.memory / _GIGA)}"
    if target.devices:
        yield f"devices = [{', '.join(map(_text, target.devices))}]"
    if target.launch_seconds:
        yield f"launch_us = {_number(target.launch_seconds / _MICRO)}"
    if target.sheet:
        yield f"sheet = {_text(target.sheet)}"
    if target.bandwidth is not None:
        yield f"bandwidth = {_inline(target.bandwidth, 'gb_s', _GIGA)}"


def _inline(rate: Rate, unit: str, scale: float, kind: str = "") -> str:
    """A rate as an inline table."""
    first = f"kind = {_text(kind)}, " if kind else ""
    amount, share = _number(rate.nominal / scale), _number(rate.share)
    return f"{{ {first}{unit} = {amount}, share = {share}, source = {_text(rate.source)} }}"


def _text(value: str) -> str:
    # JSON's strings are TOML's, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    bare = name and all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in name)
    return name if bare else _text(name)


def _number(value: float) -> str:
    """Nine digits, more than anybody measures."""
    return f"{value:.9g}"
