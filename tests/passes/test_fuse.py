from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from h3compile.errors import BuildError
from h3compile.passes.canonicalize import Canonicalize
from h3compile.passes.fold_schedule import FoldSchedule
from h3compile.passes.fuse import Fuse
from h3compile.passes.hoist import Hoist
from h3compile.passes.outline import Outline
from h3compile.pipeline.manager import Manager
from h3compile.pipeline.testing import Case, Outcome
from h3compile.program.program import Program
from h3compile.program.weights import Concat, Load
from h3compile.targets import find_target

aten = torch.ops.aten
BEFORE = (Canonicalize(), Outline(), Hoist(), FoldSchedule())


def ops(program: Program, region: str) -> Counter[str]:
    """The operators of a region by name, tuple parts left out."""
    nodes = program.regions[region].graph.find_nodes
    return (
        Counter(
            str(node.target)
            for node in program.regions[region].graph.nodes
            if node.op == "call_function" and "getitem" not in str(node.target)
        )
        if nodes
        else Counter()
    )


def test_rounding_and_counted(outcome: Callable[..., Outcome]) -> None:
    found = outcome(Fuse(), BEFORE)
    assert found.run.matches == {
        "qkv": 6,
        "attention": 6,
        "qk-norm-rope": 6,
        "modulated-norm": 9,
        "gate": 8,
        "gated-norm": 4,
        "swiglu": 6,
    }


def test_before_and_after(outcome: Callable[..., Outcome]) -> None:
    found = outcome(Fuse(), BEFORE)
    before, after = ops(found.before, "block"), ops(found.after, "block")
    assert before["aten.linear.default"] == 6 and before["aten.index_select.default"] == 6
    assert after == {
        "aten.view.default": 1,
        "h3compile.norm_modulate.default": 1,
        "aten.linear.default": 4,
        "aten.slice.Tensor": 1,
        "aten.unflatten.int": 1,
        "h3compile.qk_norm_rope.default": 1,
        "h3compile.attention.default": 1,
        "aten.flatten.using_ints": 1,
        "h3compile.gate_norm_modulate.default": 1,
        "h3compile.swiglu.default": 1,
        "h3compile.gate_residual.default": 1,
    }


def test_the_refiner_keeps_its_norms_and_sums(outcome: Callable[..., Outcome]) -> None:
    after = ops(outcome(Fuse(), BEFORE).after, "refiner")
    assert after["aten.rms_norm.default"] == 2 and after["aten.add.Tensor"] == 2
    assert after["h3compile.qk_norm_rope.default"] == after["h3compile.swiglu.default"] == 1


def test_q_k_and_v_are_one_weight_in_that_order(outcome: Callable[..., Outcome]) -> None:
    after = outcome(Fuse(), BEFORE).after
    joint = after.weights["transformer_blocks.3.attn.to_qkv.weight"]
    assert isinstance(joint, Concat) and joint.shape == (3 * 128, 80)
    names = [part.key for part in joint.operands if isinstance(part, Load)]
    assert names == [f"transformer_blocks.3.attn.to_{x}.weight" for x in "qkv"]
    assert not {
        name for name in after.weights if name.endswith(("to_q.weight", "to_k.weight", "to_v.weight"))
    }


def test_it_works_without_the_passes_it_follows(case: Case) -> None:
    program, _ = Manager((Canonicalize(), Outline(), Fuse())).run(case.program, find_target("cpu"))
    assert ops(program, "block")["h3compile.gate_norm_modulate.default"] == 1


def test_another_reader_of_an_intermediate_keeps_it(case: Case) -> None:
    """The normed query is read by something else: fusing it away would leave that without a value."""
    program, _ = Manager(BEFORE).run(case.program, find_target("cpu"))
    graph = torch.fx.Graph()
    copies = graph.graph_copy(program.regions["block"].graph, values := {})
    query = next(n for n in graph.nodes if n.target is aten.rms_norm.default and n.args[1] == [16])
    assert isinstance(copies, tuple) and values
    with graph.inserting_after(query):
        tapped = graph.call_function(aten.neg.default, (query,))
    tapped.meta = dict(query.meta)
    graph.output((*copies, tapped))
    region = program.regions["block"]
    from dataclasses import replace

    from h3compile.program.region import Port

    port = query.meta["port"]
    tapped_port = Port("tapped", port.dtype, port.shape)
    broken = replace(region, graph=graph, outputs=(*region.outputs, tapped_port))
    calls = tuple(
        replace(call, outputs=(*call.outputs, f"tapped_{call.index}")) if call.region == "block" else call
        for call in program.calls
    )
    changed = program.evolve(regions={**program.regions, "block": broken}, calls=calls)
    assert Fuse().apply(changed, find_target("cpu")).counts()["qk-norm-rope"] == 2  # the refiner's


def test_a_match_that_is_missing_fails_the_build(case: Case) -> None:
    from dataclasses import replace

    facts = case.program.facts
    expected = {**facts.expected, "fuse": {**facts.expected["fuse"], "swiglu": 7}}
    program = replace(case.program, facts=replace(facts, expected=expected))
    with pytest.raises(BuildError, match="pass 'fuse' matched 6 swiglu, this model has 7"):
        Manager((*BEFORE, Fuse())).run(program, find_target("cpu"))
