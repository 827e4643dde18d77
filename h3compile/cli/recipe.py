"""Recipes: the options of a build kept in a YAML file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import yaml

from h3compile.errors import H3CompileError, nearest

__all__ = ["merged", "named_providers", "read_recipe"]


def read_recipe(path: Path, known: Collection[str]) -> dict[str, object]:
    """The options in a recipe file.

    `H3CompileError` when it cannot be read, is not a YAML mapping, or holds an option not in ``known``.
    """
    try:
        record = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise H3CompileError(f"cannot read the recipe {path}", str(reason).lower()) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it is not YAML"
        raise H3CompileError(f"the recipe {path}{where} is not YAML", str(problem)) from error
    if not isinstance(record, Mapping):
        raise H3CompileError(f"the recipe {path} holds no options", "write one `option: value` a line")
    options = {str(key): value for key, value in record.items()}
    for key in options:
        if key not in known:
            raise H3CompileError(f"the recipe {path} has no option {key!r} to set", nearest(key, known))
    return options


def merged(recipe: Mapping[str, object], typed: Mapping[str, object]) -> dict[str, object]:
    """The recipe's options with those that were typed on top; a typed option of None was not typed."""
    return {**recipe, **{key: value for key, value in typed.items() if value is not None}}


def named_providers(typed: Sequence[str] | None) -> dict[str, str] | None:
    """``{"attention": "cudnn"}`` for ``["attention=cudnn"]``; `H3CompileError` for anything else."""
    if not typed:
        return None
    found: dict[str, str] = {}
    for text in typed:
        operator, equals, provider = text.partition("=")
        if not equals or not operator or not provider:
            raise H3CompileError(f"--provider {text!r} names no provider", "write OPERATOR=PROVIDER")
        if found.setdefault(operator, provider) != provider:
            raise H3CompileError(f"--provider names two for {operator}", "name one")
    return found
