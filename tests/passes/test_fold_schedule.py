from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from h3compile.errors import BuildError
from h3compile.passes.canonicalize import Canonicalize
from h3compile.passes.fold_schedule import FoldSchedule
from h3compile.passes.hoist import Hoist
from h3compile.passes.outline import Outline
from h3compile.pipeline.manager import Manager
from h3compile.pipeline.testing import Case, Outcome, check_pass, distance
from h3compile.program.analysis import execution_stages
from h3compile.program.interpreter import Interpreter
from h3compile.program.stages import Stage
from h3compile.targets import find_target

BEFORE = (Canonicalize(), Outline(), Hoist())


def test_bits_of_each_timestep_alone(outcome: Callable[..., Outcome]) -> None:
    found = outcome(FoldSchedule(), BEFORE)
    assert found.run.matches == {"table": 5}


def test_without_hoist(case: Case) -> None:
    short = replace(case, inputs=case.inputs[:1])
    found = check_pass(FoldSchedule(), short, after=BEFORE[:2])
    assert found.run.matches == {"table": 5}


def test_within_one_rounding_of_the_batch(case: Case, outcome: Callable[..., Outcome]) -> None:
    """A GEMM over M rows may round otherwise than M products of one row; by one rounding of the result."""
    after = outcome(FoldSchedule(), BEFORE).after
    for inputs in case.inputs[:3]:
        batch = Interpreter(case.program, case.source)(inputs)
        folded = Interpreter(after, case.source)(inputs)
        for name, value in folded.items():
            assert distance(value, batch[name]) < 2**-8, name


def test_adaln_weights_go_cold(outcome: Callable[..., Outcome]) -> None:
    found = outcome(FoldSchedule(), BEFORE)
    stages = execution_stages(found.after)
    cold = {w for c in found.after.calls if stages[c.name] is Stage.SCHEDULE for w in c.weights}
    warm = {w for c in found.after.calls if stages[c.name] is not Stage.SCHEDULE for w in c.weights}
    assert not cold & warm
    assert {w for w in cold if "adaln_proj" in w} == {w for w in found.after.weights if "adaln_proj" in w}
    assert "norm_out.linear.weight" in cold
    assert "norm_out.norm.weight" in warm


def test_gathers_stay_in_the_step(outcome: Callable[..., Outcome]) -> None:
    block = outcome(FoldSchedule(), BEFORE).after.regions["block"]
    gathers = [n for n in block.graph.nodes if n.target is torch.ops.aten.index_select.default]
    assert len(gathers) == 6
    (table,) = (port for port in block.inputs if port.name == "modulation")
    assert table.shape[0] == "timesteps"


def test_work_that_mixes_timesteps_is_refused(case: Case) -> None:
    """The negative case: a softmax over the timesteps makes row i depend on all of them."""
    region = case.program.regions["main"]
    graph = torch.fx.Graph()
    mapping: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(region.graph, mapping))
    temb = next(node for node in graph.nodes if node.name == "temb")
    with graph.inserting_after(temb):
        mixed = graph.call_function(torch.ops.aten.softmax.int, (temb, 0))
    temb.replace_all_uses_with(mixed, delete_user_cb=lambda user: user is not mixed)
    mixed.meta = dict(temb.meta)
    program = case.program.evolve(regions={"main": replace(region, graph=graph)})
    with pytest.raises(BuildError, match=r"schedule/\w*softmax\w* \(aten.softmax.int\) may mix timesteps"):
        Manager((*BEFORE, FoldSchedule())).run(program, find_target("cpu"))


def test_the_bits_of_diffusers_itself(
    case: Case,
    outcome: Callable[..., Outcome],
    transformers_of: Callable[..., torch.nn.Module],
    diffusers_alone: Callable[..., tuple[torch.Tensor, ...]],
) -> None:
    dtype = case.inputs[0]["encoder_hidden_states"].dtype
    run = Interpreter(outcome(FoldSchedule(), BEFORE).after, case.source)
    for inputs in case.inputs[::3]:
        for ours, theirs in zip(
            run(inputs).values(), diffusers_alone(transformers_of(dtype), inputs), strict=True
        ):
            assert torch.equal(ours, theirs)
