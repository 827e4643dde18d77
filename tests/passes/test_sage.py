from __future__ import annotations

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
from h3compile.pipeline.manager import Manager
from h3compile.pipeline.registry import Registry
from h3compile.pipeline.spelling import resolve
from h3compile.pipeline.testing import Case, check_pass
from h3compile.program.conditions import Shorter, Variant
from h3compile.program.program import Program
from h3compile.targets import find_target

ours = torch.ops.h3compile
BEFORE = (Canonicalize(), Outline(), Hoist(), FoldSchedule(), Fuse())
# Of the whole model's outputs, after four layers; docs/attention.md has the errors of attention alone.
BOUND = 0.05


def targets(program: Program, region: str) -> list[object]:
    """The operators of a region, in order."""
    return [node.target for node in program.regions[region].graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    "item",
    [Sage(qk="fp8_e4m3", k_block=16), Sage(k_block=16), Sage(q_block=0, k_block=0)],
    ids=["fp8", "int8", "one scale a tensor"],
)
def test_lossy_within_its_bound_and_counted(case: Case, item: Sage) -> None:
    found = check_pass(item, case, after=BEFORE, bound=BOUND)
    assert found.run.matches == {"attention": 4}
    was, now = (sum(e[name][i] for e in found.errors for name in e) for i in (0, 1))
    assert now > was, "nothing was quantized"


def test_the_operands_are_made_from_the_joint_projection(case: Case) -> None:
    program, _ = Manager((*BEFORE, Sage())).run(case.program, find_target("cpu"))
    block = targets(program, "block")
    assert block.count(ours.sage_prepare.default) == block.count(ours.sage_attention.default) == 1
    assert ours.qk_norm_rope.default not in block and torch.ops.aten.unflatten.int not in block


def test_the_refiner_stays_dense(case: Case) -> None:
    program, _ = Manager((*BEFORE, Sage())).run(case.program, find_target("cpu"))
    assert ours.attention.default in targets(program, "refiner")
    assert ours.sage_attention.default not in targets(program, "refiner")


def test_a_short_sequence_stays_dense(case: Case) -> None:
    program, _ = Manager((*BEFORE, Sage(k_block=64))).run(case.program, find_target("cpu"))
    assert program.variants == {"block": (Variant("block.dense", Shorter("rows", 64)),)}
    dense = targets(program, "block.dense")
    assert ours.attention.default in dense and ours.sage_attention.default not in dense


def test_one_scale_a_tensor_is_e4m3_on_every_target(case: Case) -> None:
    for target in ("h200", "b300", "cpu"):
        program, _ = Manager((*BEFORE, Sage(q_block=0, k_block=0))).run(case.program, find_target(target))
        (node,) = (n for n in program.regions["block"].graph.nodes if n.target is ours.sage_prepare.default)
        assert node.args[7:] == ("fp8_e4m3", 0, True)
        assert program.variants == {"block": (Variant("block.dense", Shorter("rows", 128)),)}


def test_without_fuse_from_separate_operands(case: Case) -> None:
    program, _ = Manager((*BEFORE[:-1], Sage())).run(case.program, find_target("cpu"))
    block = targets(program, "block")
    assert block.count(ours.sage_prepare.separate) == block.count(ours.sage_attention.default) == 1
    assert ours.attention.default in targets(program, "block.dense")


def test_with_fp8_both_forms_have_fp8_linears(case: Case) -> None:
    program, _ = Manager((Sage(), Fp8Linears(), *BEFORE)).run(case.program, find_target("cpu"))
    for region in ("block", "block.dense"):
        assert targets(program, region).count(ours.linear_fp8.default) == 4


@pytest.mark.parametrize(
    ("target", "arguments"),
    [("h200", ("int8", 128, True)), ("b300", ("fp8_e4m3", 16, True)), ("cpu", ("int8", 128, True))],
)
def test_the_target_decides_what_is_left_out(case: Case, target: str, arguments: tuple[object, ...]) -> None:
    program, _ = Manager((*BEFORE, Sage())).run(case.program, find_target(target))
    (node,) = (n for n in program.regions["block"].graph.nodes if n.target is ours.sage_prepare.default)
    assert node.args[7:] == arguments


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("sage(qk=fp4)", "sage: qk is 'fp4', not fp8_e4m3 or int8"),
        ("sage(q_block=16)", "sage: q_block is 16, and queries have a scale each: 1"),
        ("sage(k_block=48)", "sage: k_block is 48, not one of 16, 64, 128, or 0 with q_block=0"),
        ("sage(k_block=0)", "sage: one scale a tensor is for queries and keys: q_block=0,k_block=0"),
        ("sage(q_block=0)", "sage: one scale a tensor is for queries and keys: q_block=0,k_block=0"),
        (
            "sage(qk=int8,q_block=0,k_block=0)",
            "sage: one scale a tensor is for qk=fp8_e4m3, not int8, which has no exponent",
        ),
        ("sage(smoth=true)", "sage has no option 'smoth'"),
    ],
)
def test_bad_options(typed: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        resolve(typed, Registry.default())


def test_spelled_and_read_back() -> None:
    item = Sage(qk="int8", k_block=64, smooth=False)
    assert item.spelled() == "sage(qk=int8,k_block=64,smooth=false)"
    whole = Sage(q_block=0, k_block=0)
    assert whole.spelled() == "sage(q_block=0,k_block=0)"
    for one in (item, whole):
        passes, _ = resolve(one.spelled(), Registry.default())
        assert one in passes


def test_a_target_without_fp8_is_refused(case: Case) -> None:
    with pytest.raises(BuildError, match=r"a100 \(sm_80\) has no FP8 tensor cores"):
        Manager((*BEFORE, Sage())).run(case.program, find_target("a100"))


def test_int8_keys_are_refused_where_no_tensor_core_takes_them(case: Case) -> None:
    with pytest.raises(BuildError, match=r"b300 \(sm_103a\) multiply no integers: build with sage\(qk=fp8"):
        Manager((*BEFORE, Sage(qk="int8"))).run(case.program, find_target("b300"))
