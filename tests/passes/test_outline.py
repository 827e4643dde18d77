from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from h3compile.errors import BuildError
from h3compile.passes.canonicalize import Canonicalize
from h3compile.passes.outline import Outline
from h3compile.pipeline.manager import Manager
from h3compile.pipeline.testing import Case, Outcome
from h3compile.program.analysis import execution_stages
from h3compile.program.facts import Repeat
from h3compile.program.program import Program
from h3compile.program.region import Region
from h3compile.program.stages import Stage
from h3compile.targets import find_target

BEFORE = (Canonicalize(),)


def test_exact_and_counted(outcome: Callable[..., Outcome]) -> None:
    found = outcome(Outline(), BEFORE)
    assert found.run.matches == {"refiner": 2, "block": 4}
    assert set(found.after.regions) == {"input", "refiner", "embed", "block", "head"}
    assert [len(found.after.calls_of(name)) for name in ("refiner", "block")] == [2, 4]


def test_every_weight_is_bound_once(case: Case, outcome: Callable[..., Outcome]) -> None:
    after = outcome(Outline(), BEFORE).after
    bound = [weight for call in after.calls for weight in call.weights]
    shared = {weight for weight in bound if bound.count(weight) > 1}
    assert shared == set()
    assert set(bound) == set(case.program.weights)


def test_blocks_are_chained(outcome: Callable[..., Outcome]) -> None:
    after = outcome(Outline(), BEFORE).after
    calls = after.calls_of("block")
    for earlier, later in itertools.pairwise(calls):
        assert set(earlier.outputs) <= set(later.inputs)


def test_the_refiner_is_request_work(outcome: Callable[..., Outcome]) -> None:
    after = outcome(Outline(), BEFORE).after
    stages = execution_stages(after)
    assert stages["refiner.0"] is Stage.REQUEST
    assert stages["block.0"] is Stage.STEP


def _canonical(case: Case) -> Program:
    return Manager(BEFORE).run(case.program, find_target("cpu"))[0]


def _edited(program: Program, edit: object) -> Program:
    region = program.regions["main"]
    # A copy, as a pass makes one; metadata carries over.
    graph = torch.fx.Graph()
    mapping: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(region.graph, mapping))
    edit(graph)  # type: ignore[operator]
    copy = Region("main", graph, region.inputs, region.weights, region.outputs)
    return program.evolve(regions={"main": copy})


def _node(graph: torch.fx.Graph, origin: str, op: object) -> torch.fx.Node:
    return next(n for n in graph.nodes if n.meta.get("origin") == origin and n.target is op)


def test_a_block_with_another_constant_is_not_outlined(case: Case) -> None:
    def edit(graph: torch.fx.Graph) -> None:
        norm = _node(graph, "transformer_blocks.2.norm1", torch.ops.aten.rms_norm.default)
        norm.args = (*norm.args[:3], 1e-6)

    with pytest.raises(
        BuildError, match=r"transformer_blocks\.2 is not the same .* constant 1e-05 against 1e-06"
    ):
        Outline().apply(_edited(_canonical(case), edit), find_target("cpu"))


def test_a_block_with_another_operator_is_not_outlined(case: Case) -> None:
    def edit(graph: torch.fx.Graph) -> None:
        silu = _node(graph, "transformer_blocks.3.ff.net.0.activation", torch.ops.aten.silu.default)
        silu.target = torch.ops.aten.relu.default

    with pytest.raises(
        BuildError, match=r"transformer_blocks\.3 .* operator aten.silu.default against aten.relu"
    ):
        Outline().apply(_edited(_canonical(case), edit), find_target("cpu"))


def test_a_block_that_reads_swapped_operands_is_not_outlined(case: Case) -> None:
    def edit(graph: torch.fx.Graph) -> None:
        # Keys and values exchanged: same operators, same shapes, another computation.
        sdpa = _node(graph, "transformer_blocks.1.attn", torch.ops.aten.scaled_dot_product_attention.default)
        q, k, v = sdpa.args
        sdpa.args = (q, v, k)

    with pytest.raises(BuildError, match=r"transformer_blocks\.1 is not the same .* already corresponds"):
        Outline().apply(_edited(_canonical(case), edit), find_target("cpu"))


def test_a_claim_of_too_few_blocks_fails_the_count(case: Case) -> None:
    program = _canonical(case)
    wrong = replace(
        program.facts, repeats=(program.facts.repeats[0], Repeat("block", "transformer_blocks", 3))
    )
    with pytest.raises((BuildError, IndexError)):
        Manager((*BEFORE, Outline())).run(replace(case.program, facts=wrong), find_target("cpu"))
