"""Passes as users type them: ``fp8,sage(qk=fp8_e4m3,k_block=16),-hoist``."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Sequence

from h3compile.errors import BuildError, nearest
from h3compile.pipeline.base import Pass
from h3compile.pipeline.registry import Registry

__all__ = ["resolve", "split_list", "taken_out"]

_ITEM = re.compile(r"^(?P<out>-?)(?P<name>[A-Za-z0-9_-]+)(?:\((?P<options>.*)\))?$")


def split_list(text: str) -> list[str]:
    """The items of a comma-separated list, where commas inside parentheses belong to the item."""
    items: list[str] = []
    depth, start = 0, 0
    for i, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            break
        if character == "," and depth == 0:
            items.append(text[start:i].strip())
            start = i + 1
    if depth != 0:
        raise BuildError(f"the parentheses in {text!r} do not match", "write NAME(OPTION=VALUE,...)")
    items.append(text[start:].strip())
    return [item for item in items if item]


def resolve(text: str | Sequence[str], registry: Registry) -> tuple[list[Pass], frozenset[str]]:
    """The passes that ``text`` asks for, and the names the user typed.

    The default set is always there; ``NAME`` adds a pass or gives a default one options, ``-NAME`` takes
    one out. Raises `BuildError` on an unknown name or option, a value that does not fit, or a name
    both asked for and taken out.
    """
    chosen: dict[str, Pass] = {name: registry.get(name)() for name in registry.defaults()}
    typed: set[str] = set()
    removed: set[str] = set()
    for item in _items(text):
        match = _ITEM.match(item)
        if match is None:
            raise BuildError(f"{item!r} is not a pass", "write NAME, NAME(OPTION=VALUE,...) or -NAME")
        name = match["name"]
        found = registry.get(name)
        if name in typed | removed:
            raise BuildError(f"pass {name!r} is named twice", "name it once")
        if match["out"]:
            if match["options"]:
                raise BuildError(f"-{name} takes no options", f"write -{name}")
            removed.add(name)
            chosen.pop(name, None)
            continue
        typed.add(name)
        chosen[name] = _with_options(found, match["options"] or "")
    return list(chosen.values()), frozenset(typed)


def taken_out(text: str | Sequence[str]) -> frozenset[str]:
    """The passes that ``text`` takes out, ``-NAME``."""
    return frozenset(item[1:] for item in _items(text) if item.startswith("-"))


def _items(text: str | Sequence[str]) -> list[str]:
    return split_list(text) if isinstance(text, str) else [item for part in text for item in split_list(part)]


def _with_options(found: type[Pass], text: str) -> Pass:
    hints = typing.get_type_hints(found)
    options = [option for option in dataclasses.fields(found) if option.init]
    fields = {option.name: hints[option.name] for option in options}
    values: dict[str, object] = {}
    for item in split_list(text):
        key, equals, value = item.partition("=")
        key = key.strip()
        if key not in fields:
            raise BuildError(f"{found.name} has no option {key!r}", nearest(key, fields))
        if not equals and fields[key] is bool:
            value = "true"  # a switch
        elif not equals:
            raise BuildError(f"option {item!r} of {found.name} has no value", "write OPTION=VALUE")
        if key in values:
            raise BuildError(f"option {key} of {found.name} is given twice", "give it once")
        values[key] = _parse(found.name, key, fields[key], value.strip())
    for option in options:
        optional = (option.default, option.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        if not optional and option.name not in values:
            raise BuildError(
                f"{found.name} needs option {option.name}", f"write {found.name}({option.name}=...)"
            )
    try:
        return found(**values)
    except ValueError as error:
        raise BuildError(f"{found.name}: {error}") from error


def _parse(name: str, key: str, kind: object, text: str) -> object:
    try:
        return _value(kind, text)
    except ValueError as error:
        raise BuildError(f"{text!r} does not fit option {key} of {name}", f"give {_wanted(kind)}") from error


def _value(kind: object, text: str) -> object:
    """``text`` as a value of the type ``kind``; `ValueError` when it is none."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        # Text last: every other value is text too.
        for option in sorted(arguments, key=lambda option: option is str):
            with contextlib.suppress(ValueError):
                return _value(option, text)
    elif origin is tuple:
        parts = text.split("+") if text else []
        kinds = arguments[:1] * len(parts) if arguments[-1] is Ellipsis else arguments
        return tuple(_value(item, part) for item, part in zip(kinds, parts, strict=True))
    elif kind is bool and text in ("true", "false"):
        return text == "true"
    elif kind in (None, type(None)) and text == "none":
        return None
    elif kind is int or kind is float:
        return int(text) if kind is int else float(text)
    elif kind is str and text:
        return text
    raise ValueError(text)


def _wanted(kind: object) -> str:
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(_wanted(option) for option in arguments)
    if typing.get_origin(kind) is tuple:
        return "+".join("..." if item is Ellipsis else _wanted(item) for item in arguments)
    if kind is bool:
        return "true or false"
    return "none" if kind is type(None) else str(getattr(kind, "__name__", kind))
