from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from h3compile.errors import BuildError
from h3compile.models.h3 import FP32_MODULES
from h3compile.passes.canonicalize import Canonicalize
from h3compile.passes.fold_schedule import FoldSchedule
from h3compile.passes.fp8 import Fp8Linears
from h3compile.passes.fuse import Fuse
from h3compile.passes.hoist import Hoist
from h3compile.passes.outline import Outline
from h3compile.pipeline.manager import Manager
from h3compile.pipeline.testing import Case, Outcome, weight_source
from h3compile.program.analysis import execution_stages
from h3compile.program.calibration import Calibration, write_calibration
from h3compile.program.program import Program
from h3compile.program.stages import Stage
from h3compile.program.weights import Fp8, Fp8Scale, Literal, Load
from h3compile.targets import find_target

ours = torch.ops.h3compile
BEFORE = (Canonicalize(), Outline(), Hoist(), FoldSchedule(), Fuse())
# E4M3 has a relative step of 2^-3: a product of two rounded operands is off by about 2^-5 of its size, and
# four layers add up.
BOUND = 0.09


def targets(program: Program, region: str) -> list[object]:
    """The operators of a region, in order."""
    return [node.target for node in program.regions[region].graph.nodes if node.op == "call_function"]


@pytest.fixture(scope="module")
def fused(case: Case) -> Program:
    """What `fp8` gets."""
    return Manager(BEFORE).run(case.program, find_target("cpu"))[0]


@pytest.fixture(scope="module")
def quantized(case: Case) -> Program:
    return Manager((*BEFORE, Fp8Linears())).run(case.program, find_target("cpu"))[0]


def test_lossy_within_its_bound_and_counted(case: Case) -> None:
    from h3compile.pipeline.testing import check_pass

    found = check_pass(Fp8Linears(), case, after=BEFORE, bound=BOUND)
    assert found.run.matches == {"linear": 4 * 6 + 1, "projection": 6 * 6 + 1}


def test_every_linear_of_a_block_is_quantized_where_its_input_is_made(quantized: Program) -> None:
    block = targets(quantized, "block")
    assert torch.ops.aten.linear.default not in block
    assert block.count(ours.linear_fp8.default) == 4
    for target in (ours.norm_modulate.fp8, ours.gate_norm_modulate.fp8, ours.swiglu.fp8):
        assert block.count(target) == 1
    # Attention's result has no operator that could quantize whole rows of it.
    assert block.count(ours.quantize_rows.default) == 1


def test_what_the_model_keeps(quantized: Program) -> None:
    kept = {name for name, weight in quantized.weights.items() if not isinstance(weight, Fp8 | Fp8Scale)}
    matrices = {name for name in kept if len(quantized.weights[name].shape) == 2}
    modules = {name.removesuffix(".weight").split(".")[0] for name in matrices}
    assert modules == {*FP32_MODULES, "norm_out", "transformer_blocks"}
    assert {name for name in matrices if name.startswith("transformer_blocks")} == {
        f"transformer_blocks.{i}.adaln_proj.linear.weight" for i in range(4)
    }


def test_the_schedule_is_left_alone(case: Case, quantized: Program) -> None:
    stages = execution_stages(quantized)
    for call in quantized.calls:
        if stages[call.name] is Stage.SCHEDULE:
            assert ours.linear_fp8.default not in targets(quantized, call.region)


def test_without_fuse_too(case: Case) -> None:
    program, (*_, run) = Manager((*BEFORE[:-1], Fp8Linears())).run(case.program, find_target("cpu"))
    assert run.matches == {"linear": 6 * 6 + 1, "projection": 6 * 6 + 1}
    assert targets(program, "block").count(ours.quantize_rows.default) == 6


def test_weights_by_output_channel() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(48, 32) * torch.logspace(-3, 3, 48)[:, None]
    matrix[7] = 0
    source, load = weight_source({"w": matrix}), Load("w", (48, 32), torch.float32)
    scale, values = Fp8Scale(load).evaluate(source), Fp8(load).evaluate(source)
    assert (scale.shape, values.shape) == (Fp8Scale(load).shape, Fp8(load).shape)
    assert torch.equal(scale[scale > 1e-12], (matrix.abs().amax(1) / 448)[scale > 1e-12])
    back = values.float() * scale[:, None]
    # Half a step of three mantissa bits, and half the smallest number near zero.
    assert ((back - matrix).abs() <= matrix.abs() * 2**-4 + scale[:, None] * 2**-10).all()
    assert torch.equal(back[7], matrix[7])


def test_kept_by_the_user(case: Case) -> None:
    program, runs = Manager((*BEFORE, Fp8Linears(keep=("ff", "context_embedder")))).run(
        case.program, find_target("cpu")
    )
    assert runs[-1].matches == {"linear": 12, "projection": 24}
    assert targets(program, "block").count(torch.ops.aten.linear.default) == 2


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("to_q", "fp8 keeps 'to_q', and would quantize no linear in such a module: did you mean 'to_qkv'?"),
        ("norm1", "fp8 keeps 'norm1', and would quantize no linear"),  # the norm has a weight, no linear
        ("adaln_proj", "fp8 keeps 'adaln_proj', and would quantize no linear"),  # kept by the model's facts
        ("transformer_blocks.0", "fp8 keeps 'transformer_blocks.0', one of 4 blocks that are one region"),
        ("transformer_blocks.3.ff", "fp8 keeps 'transformer_blocks.3.ff', one of 4 blocks"),
    ],
)
def test_a_kept_name_that_cannot_be_kept_is_refused(fused: Program, module: str, message: str) -> None:
    with pytest.raises(BuildError, match=re.escape(message)):
        Fp8Linears(keep=(module,)).apply(fused, find_target("cpu"))


def test_a_pass_that_matches_nothing_fails(case: Case) -> None:
    everything = ("transformer_blocks", "token_refiner", "context_embedder")
    with pytest.raises(BuildError, match="pass 'fp8' matched nothing: take it out, or allow it"):
        Manager((*BEFORE, Fp8Linears(keep=everything))).run(case.program, find_target("cpu"))


def test_a_target_without_fp8_is_refused(fused: Program) -> None:
    with pytest.raises(BuildError, match=r"a100 \(sm_80\) has no FP8 tensor cores: build without fp8"):
        Fp8Linears().apply(fused, find_target("a100"))


@pytest.fixture
def calibrated(case: Case, tmp_path: Path) -> Callable[[float], Path]:
    """A function from an amax to a calibration that gives it to every linear, and twice it to one."""

    def write(amax: float) -> Path:
        names = {key for weight in case.program.weights.values() for key in weight.reads()}
        found = dict.fromkeys(names, amax)
        found["transformer_blocks.0.attn.to_k.weight"] = 2 * amax
        write_calibration(tmp_path / "calibration.json", Calibration(found))
        return tmp_path / "calibration.json"

    return write


def test_calibrated_scales_are_weights(case: Case, calibrated: Callable[[float], Path]) -> None:
    item = Fp8Linears(calibration=str(calibrated(4.48)))
    program, _ = Manager((*BEFORE, item)).run(case.program, find_target("cpu"))
    first = program.weights["transformer_blocks.0.attn.to_qkv.input_scale"]
    other = program.weights["transformer_blocks.1.attn.to_qkv.input_scale"]
    assert isinstance(first, Literal) and first.values == pytest.approx((0.02,))  # the largest of q, k and v
    assert isinstance(other, Literal) and other.values == pytest.approx((0.01,))
    block = program.regions["block"]
    assert sum(port.name.endswith("input_scale") for port in block.weights) == 4
    for node in block.graph.nodes:
        if node.target in (ours.norm_modulate.fp8, ours.swiglu.fp8, ours.quantize_rows.default):
            assert node.args[-1].target.endswith("input_scale")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no calibration at .*: make one with `h3compile calibrate`"),
        ("{", "is no calibration"),
        ('{"format": "h3compile-calibration-1"}', "is no calibration of format"),
        ('{"format": "h3compile-calibration-1", "amax": {}, "partition": 1}', "is no calibration of format"),
        ('{"format": "h3compile-calibration-1", "amax": {"a": -1}}', "is no calibration, with -1 for a"),
        ('{"format": "h3compile-calibration-1", "amax": {"a": NaN}}', "is no calibration, with nan for a"),
        ('{"format": "h3compile-calibration-1", "amax": {"a": true}}', "is no calibration, with True for a"),
        # In float32 the scale would be 0 or infinite, and every value NaN.
        (
            '{"format": "h3compile-calibration-1", "amax": {"a": 1e-44}}',
            "is no calibration, with 1e-44 for a",
        ),
        (
            '{"format": "h3compile-calibration-1", "amax": {"a": 1e300}}',
            r"is no calibration, with 1e\+300 for",
        ),
        (f'{{"format": "h3compile-calibration-1", "amax": {{"a": 1{"0" * 400}}}}}', "with 1000.*0 for a"),
        ("[" * 100_000, "is no calibration"),
        ('{"format": "h3compile-calibration-1", "amax": {}}', "the calibration has nothing for "),
    ],
)
def test_a_bad_calibration_is_refused(
    fused: Program, tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "calibration.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BuildError, match=message):
        Fp8Linears(calibration=str(path)).apply(fused, find_target("cpu"))


def test_a_side_that_is_no_multiple_of_16_is_refused() -> None:
    from h3compile.passes.rewrites.fp8_linear import quantize_linear
    from h3compile.program.edit import Editor
    from h3compile.program.region import Port, Region

    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    graph.output((graph.call_function(torch.ops.aten.linear.default, (x, w)),))
    ports = (Port("x", torch.bfloat16, ("rows", 24)), Port("w", torch.bfloat16, (32, 24)))
    edit = Editor(Region("r", graph, ports[:1], ports[1:], (Port("y", torch.bfloat16, ("rows", 32)),)))
    (linear,) = edit.nodes()
    with pytest.raises(BuildError, match="w is 32 by 24: FP8 needs multiples of 16"):
        quantize_linear(edit, linear, static=False)


def test_the_outcome_is_the_same_for_any_order_typed(case: Case, outcome: Callable[..., Outcome]) -> None:
    from h3compile.program.printer import print_program

    passes = (*BEFORE, Fp8Linears())
    one, _ = Manager(passes).run(case.program, find_target("cpu"))
    other, _ = Manager(passes[::-1]).run(case.program, find_target("cpu"))
    assert print_program(one) == print_program(other)


@pytest.mark.parametrize(
    ("partitions", "message"),
    [
        (("transformer_ref",), "holds the scales of transformer, and transformer_ref are built"),
        (
            ("transformer", "transformer_ref"),
            "and transformer and transformer_ref are built: build one engine",
        ),
    ],
)
def test_a_calibration_of_other_weights_is_refused(
    tmp_path: Path, partitions: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, Calibration({"a.weight": 1.0}, "transformer"))
    item = Fp8Linears(calibration=str(path))
    item.check(("transformer",))
    path.unlink()  # it is read once: what was checked is what is applied
    with pytest.raises(BuildError, match=message):
        item.check(partitions)


def test_a_calibration_of_a_deeper_model_is_refused(fused: Program, tmp_path: Path) -> None:
    names = {key for weight in fused.weights.values() for key in weight.reads()}
    path = tmp_path / "calibration.json"
    write_calibration(path, Calibration(dict.fromkeys([*names, "transformer_blocks.4.ff.net.2.weight"], 1.0)))
    with pytest.raises(BuildError, match=r"the calibration has transformer_blocks.4.ff.net.2.weight, which"):
        Fp8Linears(calibration=str(path)).apply(fused, find_target("cpu"))
