"""Passes as users type them: ``fp8,sage(qk=fp8_e4m3,k_block=16),-hoist``."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Sequence

from h3compile.errors import BuildError, nearest
from h3compile.pipeline.base import Pass
from h3compile.pipeline.registry import Registry

__all__ = ["resolve", "split_list"]

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
    for item in split_list(text) if isinstance(text, str) else [i for t in text for i in split_list(t)]:
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


def _with_options(found: type[Pass], text: str) -> Pass:
    hints = typing.get_type_hints(found)
    fields = {option.name: hints[option.name] for option in dataclasses.fields(found)}
    values: dict[str, object] = {}
    for item in split_list(text):
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals:
            raise BuildError(f"option {item!r} of {found.name} has no value", "write OPTION=VALUE")
        if key not in fields:
            raise BuildError(f"{found.name} has no option {key!r}", nearest(key, fields))
        values[key] = _parse(found.name, key, fields[key], value.strip())
    try:
        return found(**values)
    except ValueError as error:
        raise BuildError(f"{found.name}: {error}") from error


def _parse(name: str, key: str, kind: object, text: str) -> object:
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(None) in options and text == "none":
        return None
    for option in options:
        try:
            if option is bool:
                return {"true": True, "false": False}[text]
            if option in (int, float, str):
                return option(text)
            if typing.get_origin(option) is tuple:
                item = typing.get_args(option)[0]
                return tuple(item(part) for part in text.split("+"))
        except (ValueError, KeyError):
            continue
    wanted = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise BuildError(f"{text!r} does not fit option {key} of {name}", f"give {wanted}")
