"""From the module Inductor writes to the launch sequence an artifact keeps.

Inductor's module embeds the source of its kernels and compiles them when it is imported. What is kept of
it is the function `call` and what `call` reads; kernels become free names that the loader binds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from h3compile.engine.artifact import OWN_OPERATORS, operator_global
from h3compile.errors import BuildError

__all__ = ["LaunchSequence", "launch_sequence"]

# Bound by the loader, which does not import the compiler: see h3compile.runtime.artifact.
_PROVIDED = frozenset({"assert_tensor_metadata", "device_index"})
_COMPILER = "async_compile"
_EXTERNAL = "extern_kernels"
_DEVICE_CALLS = frozenset({"_DeviceGuard", "set_device", "get_raw_stream", "_cuda_getCurrentRawStream"})


@dataclass(frozen=True)
class LaunchSequence:
    """Python source that defines ``call(args)``, and the kernels it expects as global names.

    ``kernels`` maps each name to the kind of compiler that made it: ``cpp_pybinding`` or ``triton``.
    """

    source: str
    kernels: dict[str, str]


def _names(tree: ast.AST) -> set[str]:
    return {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def _defined(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {(alias.asname or alias.name).partition(".")[0] for alias in names}
        case ast.Assign(targets=targets):
            return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Try(body=body):
            return {name for inner in body for name in _defined(inner)}
    return set()


def _compiled_by(statement: ast.stmt) -> tuple[str, str] | None:
    """The name and the kind of a kernel that this statement compiles."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=name)],
            value=ast.Call(func=ast.Attribute(value=ast.Name(id="async_compile"), attr=kind)),
        ):
            return name, kind
    return None


def _needed(statements: list[ast.stmt]) -> list[ast.stmt]:
    """The statements that `call` depends on, in order."""
    wanted, kept = {"call"}, set[int]()
    grew = True
    while grew:
        grew = False
        for at, statement in enumerate(statements):
            if at not in kept and _defined(statement) & wanted:
                kept.add(at)
                wanted |= _names(statement)
                grew = True
    return [statements[at] for at in sorted(kept)]


def _external(name: str, imports: set[str]) -> str:
    """How to spell `extern_kernels.NAME` without importing the compiler's registry where possible."""
    from torch._inductor.select_algorithm import extern_kernels

    kernel = getattr(extern_kernels, name)
    spelled = getattr(kernel, "__name__", "")
    if getattr(torch, spelled, None) is kernel:
        return f"torch.{spelled}"
    module = getattr(kernel, "__module__", "")
    if module.startswith("torch._inductor") and spelled.isidentifier():
        imports.add(f"from {module} import {spelled}")
        return spelled
    imports.add("from torch._inductor.select_algorithm import extern_kernels")
    return f"{_EXTERNAL}.{name}"


class _Editor:
    """Replacements in a text by the positions of its syntax nodes, so that comments stay."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._edits: list[tuple[int, int, str]] = []

    def _offset(self, line: int, column: int) -> int:
        # Columns count UTF-8 bytes.
        prefix = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(prefix)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def replace(self, node: ast.expr, text: str) -> None:
        self._edits.append((*self.span(node), text))

    def text(self, node: ast.stmt) -> str:
        start, end = self.span(node)
        result = self._text[start:end]
        for first, last, text in sorted(self._edits, reverse=True):
            if start <= first and last <= end:
                result = result[: first - start] + text + result[last - start :]
        return result


def _device_indices(tree: ast.AST) -> Iterator[ast.expr]:
    """The literals that name a CUDA device by index."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _DEVICE_CALLS:
            yield from (argument for argument in node.args if isinstance(argument, ast.Constant))
        elif name == "device":
            yield from (word.value for word in node.keywords if word.arg == "index")


def _own_operator(node: ast.expr) -> str | None:
    """``attention.default`` for the expression ``torch.ops.h3compile.attention.default``."""
    spelled = ast.unparse(node)
    name = spelled.removeprefix(OWN_OPERATORS)
    return name if name != spelled and name.count(".") == 1 else None


def launch_sequence(source: str, bound: Collection[str] = ()) -> LaunchSequence:
    """The launch sequence in the module ``source`` that Inductor wrote.

    Calls of the operators ``bound`` become calls of globals, see `operator_global`; literal device
    indices become the global ``device_index``. Raises `BuildError` when the module has no `call`, or uses
    something that only exists where a compiler runs.
    """
    tree = ast.parse(source)
    editor = _Editor(source)
    imports: set[str] = set()
    kernels = dict(found for statement in tree.body if (found := _compiled_by(statement)) is not None)
    body = [statement for statement in tree.body if _compiled_by(statement) is None]
    kept = _needed(body)
    used = set[str]().union(*map(_names, kept))
    if "call" not in {name for statement in kept for name in _defined(statement)}:
        raise BuildError("Inductor produced no callable for a region", "lower it with --backend eager")
    if _COMPILER in used:
        raise BuildError(
            "a compiled region would compile kernels when it runs", "lower it with --backend eager"
        )
    for statement in kept:
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == _EXTERNAL:
                editor.replace(node, _external(node.attr, imports))
            elif isinstance(node, ast.Attribute) and (name := _own_operator(node)) in bound:
                editor.replace(node, operator_global(str(name)))
        for literal in _device_indices(statement):
            editor.replace(literal, "device_index")
    parts = []
    for statement in kept:
        if isinstance(statement, ast.Import | ast.ImportFrom) and _defined(statement) & (
            _PROVIDED | {_EXTERNAL}
        ):
            continue
        parts.append(editor.text(statement))
    text = "\n".join([*sorted(imports), *parts]) + "\n"
    if re.search(r"['\"]cuda:\d", text):
        raise BuildError("a compiled region names a CUDA device", "report the operator that does")
    return LaunchSequence(text, {name: kind for name, kind in kernels.items() if name in used})
