from __future__ import annotations

import math

import pytest
import torch

from h3compile.errors import BuildError
from h3compile.passes.canonicalize import Canonicalize
from h3compile.passes.fold_schedule import FoldSchedule
from h3compile.passes.fp8 import Fp8Linears
from h3compile.passes.fuse import Fuse
from h3compile.passes.hoist import Hoist
from h3compile.passes.outline import Outline
from h3compile.passes.sage import Sage
from h3compile.passes.skip import Skip
from h3compile.pipeline.manager import Manager
from h3compile.pipeline.registry import Registry
from h3compile.pipeline.spelling import resolve
from h3compile.pipeline.testing import Case, check_pass
from h3compile.program.conditions import Noisier, Shorter, Variant
from h3compile.program.printer import print_program
from h3compile.program.program import Program
from h3compile.targets import find_target

ours = torch.ops.h3compile
BEFORE = (Canonicalize(), Outline(), Hoist(), FoldSchedule(), Fuse())


def attention(program: Program, region: str) -> torch.fx.Node:
    """The one attention of a region that counts tiles."""
    nodes = program.regions[region].graph.nodes
    (node,) = (n for n in nodes if n.target in (ours.attention.skip, ours.sage_attention.skip))
    return node


def test_lossy_within_its_bound_and_counted(case: Case) -> None:
    found = check_pass(Skip(), case, after=BEFORE, bound=0.02)
    assert found.run.matches == {"attention": 4}


def test_two_forms_of_the_block_and_a_measure_each_call(case: Case) -> None:
    program, _ = Manager((*BEFORE, Skip(threshold=0.1, until=0.9))).run(case.program, find_target("cpu"))
    assert program.variants == {"block": (Variant("block.unskipped", Noisier(0.9)),)}
    assert attention(program, "block").args[3] == 0.1
    assert attention(program, "block.unskipped").args[3] == 0.0
    assert program.measures == tuple(f"block.{i}.skipped" for i in range(4))
    assert ours.attention.default in {n.target for n in program.regions["refiner"].graph.nodes}


def test_with_sage_in_one_kernel(case: Case) -> None:
    passes = (Skip(threshold=0.1), Sage(k_block=16), Fp8Linears(), *BEFORE)
    program, _ = Manager(passes).run(case.program, find_target("cpu"))
    assert program.variants["block"] == (
        Variant("block.dense", Shorter("rows", 16)),
        Variant("block.unskipped", Noisier(0.97)),
    )
    for region, target, threshold in (
        ("block", ours.sage_attention.skip, 0.1),
        ("block.unskipped", ours.sage_attention.skip, 0.0),
        ("block.dense", ours.attention.skip, 0.0),
    ):
        node = attention(program, region)
        assert node.target is target and node.args[-1] == threshold


def test_any_order_typed_gives_one_program(case: Case) -> None:
    typed = ["skip,sage,fp8", "fp8,sage,skip", "sage,skip,fp8"]
    texts = set()
    for text in typed:
        passes, _ = resolve(text, Registry.default())
        texts.add(print_program(Manager(passes).run(case.program, find_target("b300"))[0]))
    assert len(texts) == 1


def test_until_1_needs_no_second_form(case: Case) -> None:
    program, _ = Manager((*BEFORE, Skip(until=1.0))).run(case.program, find_target("cpu"))
    assert program.variants == {} and "block.unskipped" not in program.regions


def test_threshold_0_is_dense(case: Case) -> None:
    from h3compile.program.interpreter import Interpreter

    dense, _ = Manager(BEFORE).run(case.program, find_target("cpu"))
    zero, _ = Manager((*BEFORE, Skip(threshold=0.0, until=1.0))).run(case.program, find_target("cpu"))
    for inputs in case.inputs[:2]:
        first = Interpreter(dense, case.source, dtype=torch.float64)(inputs)
        second = Interpreter(zero, case.source, dtype=torch.float64)(inputs)
        for name, value in first.items():
            torch.testing.assert_close(second[name], value, rtol=1e-9, atol=1e-9)


def test_the_threshold_of_a_calibrated_fit() -> None:
    item = Skip(sparsity=0.5, fit=(0.01, 4.0))
    assert item.resolved_threshold == pytest.approx(0.01 * math.exp(2))
    assert item.spelled() == "skip(sparsity=0.5,fit=0.01+4.0)"
    passes, _ = resolve(item.spelled(), Registry.default())
    assert item in passes


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("skip(until=1.5)", "until is 1.5, and a sigma lies between 0 and 1"),
        ("skip(threshold=-1)", "threshold is -1.0, and must be a number from 0 on"),
        ("skip(threshold=nan)", "threshold is nan"),
        ("skip(sparsity=0.5)", "sparsity and fit are given together"),
        ("skip(threshold=0.1,sparsity=0.5,fit=1+2)", "threshold and sparsity exclude each other"),
        ("skip(sparsity=0.5,fit=1)", "fit has 1 numbers, not the two"),
        ("skip(sparsity=1.5,fit=1+2)", "sparsity is 1.5, and a share of tiles lies from 0 to below 1"),
        ("skip(sparsity=nan,fit=1+2)", "sparsity is nan"),
        ("skip(sparsity=0.5,fit=nan+2)", "give a threshold of nan, no positive number"),
        ("skip(sparsity=0.5,fit=-1+2)", "give a threshold of -2.7"),
        ("skip(sparsity=0.5,fit=1+5000)", "give a threshold of inf"),
        ("skip(sparsity=0.5,fit=1+-5000)", "give a threshold of 0.0"),
        ("skip(until=nan)", "until is nan"),
    ],
)
def test_bad_options(typed: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        resolve(typed, Registry.default())
