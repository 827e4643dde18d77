"""Variants and measures of a program: how they are added, what is refused, and who honours them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from h3compile.errors import BuildError
from h3compile.program.analysis import mark
from h3compile.program.conditions import Condition, Noisier, Shorter, Variant
from h3compile.program.interpreter import Interpreter
from h3compile.program.merge import merge_calls, share_equal
from h3compile.program.peel import peel
from h3compile.program.printer import print_program
from h3compile.program.program import Call, Program
from h3compile.program.region import Port, Region
from h3compile.program.stages import Stage
from h3compile.program.variants import add_variant
from h3compile.program.verifier import VerificationError, verify

aten = torch.ops.aten
SHORT, NOISY = Shorter("rows", 4), Noisier(0.9)


@pytest.fixture
def counted(toys: SimpleNamespace) -> Program:
    return toys.counted()


@pytest.fixture
def varied(toys: SimpleNamespace, counted: Program) -> Program:
    return verify(add_variant(counted, "block", toys.dense(counted), SHORT, NOISY))


def test_a_variant_is_added_after_those_that_are_there(toys: SimpleNamespace, varied: Program) -> None:
    more = add_variant(varied, "block", toys.dense(varied, "block.third"), Noisier(0.5))
    assert more.variants == {
        "block": (
            Variant("block.dense", SHORT),
            Variant("block.dense", NOISY),
            Variant("block.third", Noisier(0.5)),
        )
    }
    assert verify(more).forms_of("block") == ("block", "block.dense", "block.third")
    assert more.forms_of("leave") == ("leave",)
    assert [more.base_of(name) for name in ("block", "block.third", "leave")] == ["block", "block", "leave"]
    assert more.calls_of("block.third") == ()
    assert more.weights == varied.weights and more.calls == varied.calls


@pytest.mark.parametrize(
    ("base", "name", "when", "reason"),
    [
        ("block", "leave", (SHORT,), "the variant leave has the name of another region"),
        ("block", "block.dense", (SHORT,), "the variant block.dense has the name of another region"),
        ("blok", "new", (SHORT,), "the variant new is of blok, which is no region"),
        ("block.dense", "new", (SHORT,), "the variant new is of block.dense, which is a variant itself"),
        ("block", "new", (), "the variant new has no condition and would never run"),
    ],
)
def test_a_variant_that_cannot_be_added(
    toys: SimpleNamespace, varied: Program, base: str, name: str, when: tuple[Condition, ...], reason: str
) -> None:
    with pytest.raises(BuildError, match=reason):
        add_variant(varied, base, toys.dense(varied, name), *when)


def refuse(broken: Program, reason: str) -> None:
    with pytest.raises(VerificationError, match=reason):
        verify(broken)


@pytest.mark.parametrize(
    ("variants", "reason"),
    [
        ({"blok": (Variant("block.dense", SHORT),)}, "blok has variants and is no region"),
        ({"block": ()}, "block has an empty list of variants"),
        ({}, "region block.dense is never called"),
        (
            {"block": (Variant("block.dense", SHORT), Variant("nothing", NOISY))},
            "the variant nothing of block is no region",
        ),
        (
            {"block": (Variant("block.dense", SHORT), Variant("leave", NOISY))},
            "the variant leave of block is called by name",
        ),
        (
            {"block": (Variant("block.dense", SHORT),), "leave": (Variant("block.dense", SHORT),)},
            "the variant block.dense is of block and of leave",
        ),
        (
            {
                "block": (Variant("block.dense", SHORT),),
                "block.dense": (Variant("block.dense", SHORT),),
            },
            "the variant block.dense of block has variants itself",
        ),
        (
            {"block": (Variant("block.dense", Shorter("columns", 4)),)},
            "the variant block.dense asks for the length columns, which no input has",
        ),
        (
            {"block": (Variant("block.dense", Shorter("rows", 0)),)},
            "the variant block.dense waits for rows < 0, which never holds",
        ),
        (
            {"block": (Variant("block.dense", Noisier(1.5)),)},
            "the variant block.dense waits for sigma > 1.5, and a sigma lies between 0 and 1",
        ),
        ({"block": (Variant("block.dense", Noisier(float("nan"))),)}, "waits for sigma > nan"),
        ({"block": (Variant("block.dense", Noisier(-0.1)),)}, "waits for sigma > -0.1"),
    ],
)
def test_broken_variants(varied: Program, variants: dict[str, tuple[Variant, ...]], reason: str) -> None:
    refuse(varied.evolve(variants=variants), reason)


Edit = Callable[[Region, dict[str, torch.fx.Node]], Region]


def swapped_weights(region: Region, nodes: dict[str, torch.fx.Node]) -> Region:
    """Two weights of one shape change places: by shape alone nobody could tell."""
    mod, own, up = region.weights
    first, second = nodes["mod_weight"], nodes["own_weight"]
    first.target, second.target = "own_weight", "mod_weight"
    first.name, second.name = "own_weight_", "mod_weight_"
    return replace(region, weights=(own, mod, up))


def without_a_weight(region: Region, nodes: dict[str, torch.fx.Node]) -> Region:
    nodes["up"].replace_all_uses_with(nodes["own_weight"])
    region.graph.erase_node(nodes["up"])
    return replace(region, weights=region.weights[:-1])


def other_input(region: Region, nodes: dict[str, torch.fx.Node]) -> Region:
    return replace(region, inputs=(replace(region.inputs[0], dtype=torch.bfloat16), *region.inputs[1:]))


def other_counts(region: Region, nodes: dict[str, torch.fx.Node]) -> Region:
    for node in nodes.values():
        if node.target is aten.new_full.default:
            node.kwargs = {"dtype": torch.int64}
    return region


def fewer_results(region: Region, nodes: dict[str, torch.fx.Node]) -> Region:
    output = next(iter(reversed(region.graph.nodes)))
    output.args = (output.args[0][:1],)
    return replace(region, outputs=region.outputs[:1])


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (swapped_weights, r"takes own.weight: float32\[8, 8\] where block takes mod.weight: float32\[8, 8\]"),
        (without_a_weight, "the variant block.dense has 2 weights, block has 3"),
        (other_input, "region block.dense does not propagate|takes hidden: bfloat16"),
        (other_counts, r"block.dense returns cat_default: int64\[2\] where block returns cat_default: int32"),
        (fewer_results, "the variant block.dense has 1 outputs, block has 2"),
    ],
)
def test_a_variant_that_does_not_fit(toys: SimpleNamespace, varied: Program, edit: Edit, reason: str) -> None:
    region, nodes = toys.copied(varied.regions["block.dense"])
    refuse(varied.evolve(regions={**varied.regions, "block.dense": edit(region, nodes)}), reason)


def test_a_variant_is_held_to_the_rules_of_every_region(toys: SimpleNamespace, varied: Program) -> None:
    region, nodes = toys.copied(varied.regions["block.dense"])
    (relu,) = (node for node in nodes.values() if node.target is aten.relu.default)
    relu.target = aten.relu_.default
    refuse(varied.evolve(regions={**varied.regions, "block.dense": region}), "relu_.default changes")


def test_only_regions_of_the_step_have_variants(toys: SimpleNamespace) -> None:
    early = toys.region("early", (toys.wide("a"),), (), lambda op, a: (op(aten.relu.default, a),))
    late = toys.region("late", (toys.wide("a"),), (), lambda op, a: (op(aten.neg.default, a),))
    calls = (toys.call("early", 0, "text", "", "u"), toys.call("late", 0, "x", "", "v"))
    program = toys.program((early, late), calls, ("u", "v"))
    assert verify(add_variant(program, "late", late.renamed("late.other"), SHORT))
    refuse(
        add_variant(program, "early", early.renamed("early.other"), SHORT),
        "early.0 runs in the request stage and has variants, which are chosen in the step",
    )


@pytest.mark.parametrize(
    ("measures", "reason"),
    [
        (("nothing",), "the measure nothing is computed by no call of the step"),
        (("x",), "the measure x is computed by no call of the step"),
        (("h1",), "the measure h1 is read by a call"),
        (("result",), "the measure result is an output"),
        (("tiles0", "tiles1", "tiles0"), "the measure tiles0 is named twice"),
    ],
)
def test_broken_measures(counted: Program, measures: tuple[str, ...], reason: str) -> None:
    refuse(counted.evolve(measures=measures), reason)


def test_a_measure_is_two_counts(toys: SimpleNamespace, counted: Program) -> None:
    region, nodes = toys.copied(counted.regions["block"])
    other_counts(region, nodes)
    refuse(
        counted.evolve(regions={**counted.regions, "block": region}),
        r"the measure cat_default: int64\[2\] is not int32\[2\]",
    )


def test_a_request_value_is_no_measure(toys: SimpleNamespace) -> None:
    early = toys.counting(
        toys.region("early", (toys.wide("a"),), (), lambda op, a: (op(aten.relu.default, a),)), "early", 0, 1
    )
    program = toys.program((early,), (toys.call("early", 0, "text", "", "u n"),), ("u",))
    refuse(program.evolve(measures=("n",)), "the measure n is computed by no call of the step")


# --- who honours them ---


def test_a_variant_is_marked_as_the_region_it_stands_in_for(varied: Program) -> None:
    marks = mark(varied)
    nodes = varied.regions["block.dense"].graph.nodes
    stages = [marks.nodes["block.dense"][n.name] for n in nodes if n.target is aten.linear.default]
    assert stages == [Stage.SCHEDULE, Stage.REQUEST, Stage.STEP]


def test_a_value_has_the_latest_stage_of_all_forms(toys: SimpleNamespace) -> None:
    """The base returns a constant where its variant returns what depends on the text."""

    def base(op, a, b):  # type: ignore[no-untyped-def]
        return op(aten.neg.default, a), op(aten.full.default, [2], 0.0)

    def other(op, a, b):  # type: ignore[no-untyped-def]
        return op(aten.neg.default, a), op(aten.sum.dim_IntList, op(aten.slice.Tensor, b, 1, 0, 2), [0])

    ports = (toys.wide("a"), toys.wide("b"))
    program = toys.program(
        (toys.region("f", ports, (), base),), (toys.call("f", 0, "x text", "", "r c"),), ("r",)
    )
    assert mark(program).values["c"] is Stage.BUILD
    varied = verify(add_variant(program, "f", toys.region("f.other", ports, (), other), SHORT))
    assert mark(varied).values["c"] is Stage.REQUEST
    assert mark(varied).call(varied.calls[0]) is Stage.STEP


def test_the_interpreter_takes_the_form_that_a_step_calls_for(
    toys: SimpleNamespace, counted: Program, varied: Program
) -> None:
    weights = toys.tensors(counted)
    dense = counted.evolve(regions={**counted.regions, "block": toys.dense(counted, "block")})
    forms = {
        name: Interpreter(verify(program), toys.Tensors(weights))
        for name, program in (("block", counted), ("dense", dense))
    }
    both = Interpreter(varied, toys.Tensors(weights))
    for rows, first, form in ((5, 0.2, "block"), (3, 0.2, "dense"), (5, 0.05, "dense"), (4, 0.1, "block")):
        given = toys.inputs(rows=rows)
        given["t"] = torch.tensor([first, 0.999])
        other = {"block": "dense", "dense": "block"}[form]
        assert torch.equal(both(given)["result"], forms[form](given)["result"]), (rows, first)
        assert not torch.equal(both(given)["result"], forms[other](given)["result"])


def single(toys: SimpleNamespace) -> Program:
    """Two regions of the step, called once each; the first one counts."""
    f = toys.counting(
        toys.region("f", (toys.wide("a"),), (), lambda op, a: (op(aten.neg.default, a),)), "f", 1, 4
    )
    g = toys.region("g", (toys.wide("a"),), (), lambda op, a: (op(aten.relu.default, a),))
    calls = (toys.call("f", 0, "x", "", "h n"), toys.call("g", 0, "h", "", "result"))
    return verify(toys.program((f, g), calls, ("result",)).evolve(measures=("n",)))


def test_merging_keeps_measures(toys: SimpleNamespace) -> None:
    merged = verify(merge_calls(single(toys)))
    assert [call.outputs for call in merged.calls] == [("n", "result")]
    assert merged.measures == ("n",)


def test_regions_with_variants_are_not_merged(toys: SimpleNamespace) -> None:
    program = single(toys)
    f, g = program.regions["f"], program.regions["g"]
    for base, form in ((f, f.renamed("f.other")), (g, g.renamed("g.other"))):
        varied = verify(add_variant(program, base.name, form, NOISY))
        assert verify(merge_calls(varied)).calls == varied.calls


def test_equal_measures_stay_two(toys: SimpleNamespace) -> None:
    def body(op, a):  # type: ignore[no-untyped-def]
        counts = [op(aten.new_zeros.default, a, [2], dtype=torch.int32) for _ in range(2)]
        return (op(aten.neg.default, a), *counts)

    program = toys.program(
        (toys.region("f", (toys.wide("a"),), (), body),), (toys.call("f", 0, "x", "", "r m n"),), ("r",)
    ).evolve(measures=("m", "n"))
    assert share_equal(program, "f").calls == program.calls
    # Not wanted for themselves, one of them is enough.
    assert share_equal(program.evolve(measures=()), "f").calls[0].outputs == ("r", "m")


def test_work_does_not_leave_a_region_with_variants(varied: Program) -> None:
    with pytest.raises(BuildError, match="the request work of block cannot leave it once there are variants"):
        peel(varied, Stage.REQUEST)


def test_after_peeling_variants_share_tables_and_weights(toys: SimpleNamespace, counted: Program) -> None:
    peeled = peel(counted, Stage.SCHEDULE)
    folded = verify(peeled.program.evolve(tables=peeled.values))
    block = folded.regions["block"]
    varied = verify(add_variant(folded, "block", block.renamed("block.other"), SHORT))
    given = toys.inputs()
    source = toys.Tensors(toys.tensors(counted))
    assert torch.equal(
        Interpreter(varied, source)(given)["result"], Interpreter(folded, source)(given)["result"]
    )
    # What is of no earlier stage is peeled again without complaint.
    assert peel(varied, Stage.SCHEDULE).values == peeled.values


def test_they_are_printed(varied: Program) -> None:
    head, _, _ = print_program(varied).partition("\n\n")
    assert head.splitlines()[-3:] == [
        "  weights 8",
        "  measures 2",
        "  variants of block: block.dense when rows < 4; block.dense when sigma > 0.9",
    ]
    assert "region block.dense\n" in print_program(varied)


def test_a_call_of_a_variant_by_name_is_refused(varied: Program) -> None:
    call = varied.calls[1]
    renamed = Call("block.dense", 0, call.inputs, call.weights, ("other", "tiles"))
    refuse(
        varied.evolve(calls=(*varied.calls, renamed)), "the variant block.dense of block is called by name"
    )
    assert varied.port_of("tiles0") == Port("cat_default", torch.int32, (2,))
