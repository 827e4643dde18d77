from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from h3compile.errors import BuildError
from h3compile.passes.canonicalize import Canonicalize
from h3compile.passes.hoist import Hoist
from h3compile.passes.outline import Outline
from h3compile.pipeline.manager import Manager
from h3compile.pipeline.testing import Case, Outcome
from h3compile.program.analysis import execution_stages, mark
from h3compile.program.stages import Stage
from h3compile.targets import find_target

BEFORE = (Canonicalize(), Outline())


def test_exact_and_counted(outcome: Callable[..., Outcome]) -> None:
    found = outcome(Hoist(), BEFORE)
    assert found.run.matches == {"value": 3}


def test_nothing_of_the_request_is_left_in_the_step_but_movement(outcome: Callable[..., Outcome]) -> None:
    after = outcome(Hoist(), BEFORE).after
    stages, marks = execution_stages(after), mark(after).nodes
    free = ("view", "unsqueeze", "slice", "sym_size", "new_zeros", "index_copy", "getitem")
    for call in after.calls:
        if stages[call.name] is not Stage.STEP:
            continue
        for node in after.regions[call.region].graph.nodes:
            if node.op == "call_function" and marks[call.region][node.name] is Stage.REQUEST:
                assert any(word in str(node.target) for word in free), node


def test_the_packed_text_rows_are_not_materialized(outcome: Callable[..., Outcome]) -> None:
    """Hoisting the scatter of text rows would keep a buffer of all rows for the whole request."""
    after = outcome(Hoist(), BEFORE).after
    stages = execution_stages(after)
    for call in after.calls:
        if stages[call.name] is Stage.REQUEST:
            for port in after.regions[call.region].outputs:
                assert port.shape[-1] <= 16 or "rows" not in port.shape, port


def test_regions(outcome: Callable[..., Outcome]) -> None:
    after = outcome(Hoist(), BEFORE).after
    assert [call.name for call in after.calls if call.index == 0] == [
        "request.0", "refiner.0", "request_2.0", "embed.0", "block.0", "head.0",
    ]  # fmt: skip


def test_a_rotary_table_is_cast_once_and_not_in_every_block(outcome: Callable[..., Outcome]) -> None:
    after = outcome(Hoist(), BEFORE).after
    casts = [n for n in after.regions["block"].graph.nodes if n.target is torch.ops.aten.to.dtype]
    marks = mark(after).nodes["block"]
    assert [n.name for n in casts if marks[n.name] is not Stage.SCHEDULE] == []


def test_needs_outline(case: Case) -> None:
    with pytest.raises(BuildError, match="pass 'hoist' needs 'outline': add outline, or take out hoist"):
        Manager((Canonicalize(), Hoist()))


def test_a_model_without_request_work_fails_the_build(case: Case) -> None:
    facts = case.program.facts
    inputs = tuple(replace(fact, stage=Stage.STEP) for fact in facts.inputs)
    expected = {**facts.expected, "hoist": {}}
    program = replace(case.program, facts=replace(facts, inputs=inputs, expected=expected))
    with pytest.raises(BuildError, match="pass 'hoist' matched nothing: take it out, or allow it"):
        Manager((*BEFORE, Hoist())).run(program, find_target("cpu"))
    done, runs = Manager((*BEFORE, Hoist()), allow_unmatched=("hoist",)).run(program, find_target("cpu"))
    assert runs[-1].matches == {}
    assert len(done.calls_of("block")) == 4
