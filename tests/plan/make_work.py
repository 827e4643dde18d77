"""Writes the work tables of the released model: run when operators, passes or their costs change.

Traces two layers and counts fifty: blocks are equal. Takes a minute or two.

    python tests/plan/make_work.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import h3compile.plan
from h3compile.models import h3
from h3compile.models.trace import parameter_shapes, trace
from h3compile.pipeline.manager import Manager
from h3compile.pipeline.registry import Registry
from h3compile.pipeline.spelling import resolve
from h3compile.plan.work import PASS_SETS, ProgramWork
from h3compile.plan.work_of import work_of
from h3compile.program.program import Program
from h3compile.targets import find_target

FILE = Path(h3compile.plan.__file__).parent / "released.json"
_LAYERS = h3.RELEASE_CONFIG["num_layers"]
_TRACED = 2
# Whose defaults the passes take: SAGE has INT8 keys and a scale for 128 of them.
_TARGET = "h200"
_EAGER = "diffusers"
# Python's frames keep what they gave to a block.
_PEERS = (_EAGER, "diffusers-compiled")


def programs() -> Iterator[tuple[str, ProgramWork]]:
    """The work of the released model, by name of the set of passes."""
    assert isinstance(_LAYERS, int)
    config = {**h3.RELEASE_CONFIG, "num_layers": _TRACED}
    traced = trace(config, {weight: h3.release_dtype(weight) for weight in parameter_shapes(config)})
    compiled: dict[str, Program] = {}
    for name, passes in PASS_SETS.items():
        if passes not in compiled:
            chosen, _ = resolve(passes, Registry.default())
            compiled[passes], _ = Manager(chosen).run(traced, find_target(_TARGET))
        work = work_of(compiled[passes], name, fused=name != _EAGER, placed=name not in _PEERS)
        yield name, work.with_blocks(_LAYERS)


def text(found: Iterator[tuple[str, ProgramWork]]) -> str:
    """The file: a piece, a call or a peak a line, so that differences can be read."""
    data = {"format": 1, "programs": {name: work.to_json() for name, work in found}}
    return _lines(data, 0) + "\n"


def _lines(value: object, depth: int) -> str:
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        body = ",\n".join(f"{pad}{json.dumps(key)}: {_lines(item, depth + 1)}" for key, item in value.items())
        return "{\n" + body + "\n" + " " * depth + "}"
    if isinstance(value, list) and any(isinstance(item, list) for item in value):
        body = ",\n".join(f"{pad}{json.dumps(item)}" for item in value)
        return "[\n" + body + "\n" + " " * depth + "]"
    return json.dumps(value)


if __name__ == "__main__":
    FILE.write_text(text(programs()), encoding="utf-8")
    print(f"{FILE}: {FILE.stat().st_size:,} bytes")
