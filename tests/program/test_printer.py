"""The printed program: readable, complete and always the same."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from h3compile.program.peel import peel
from h3compile.program.printer import count_ops, print_program, print_region
from h3compile.program.program import Program
from h3compile.program.stages import Stage

aten = torch.ops.aten


def test_a_program(toys: SimpleNamespace) -> None:
    text = print_program(toys.toy())
    head, _, rest = text.partition("\n\n")
    assert head.splitlines() == [
        "program Toy level=outlined",
        "  input  step     x: float32[rows, 8]",
        "  input  schedule t: float32[timesteps]",
        "  input  request  text: float32[rows, 8]",
        "  input  step     index: int64[rows]",
        "  output result",
        "  tables 0",
        "  weights 8",
    ]
    calls, *regions = rest.rstrip("\n").split("\n\n")
    assert calls.splitlines() == [
        "step     entry.0(x, t, text) -> h0, emb, context",
        "step     block.0..1(h0, emb, context, index) -> h2",
        "step     leave.0(h2) -> result",
    ]
    assert [region.splitlines()[0] for region in regions] == ["region entry", "region block", "region leave"]
    assert "  weight mod.weight: float32[8, 8]" in regions[1]
    assert (
        "  schedule linear_default: float32[timesteps, 8] = aten.linear.default(%silu_default, %mod_weight)"
        in (regions[1].splitlines())
    )


def test_the_same_text_every_time(toys: SimpleNamespace) -> None:
    assert print_program(toys.toy()) == print_program(toys.toy())


def test_a_pass_is_seen_in_the_text(toys: SimpleNamespace) -> None:
    before = toys.toy()
    after = peel(before, Stage.SCHEDULE)
    folded = after.program.evolve(tables=after.values)
    assert "\n  tables 2\n" in print_program(folded)
    assert "schedule block.schedule.0..1(" in print_program(folded)


def test_a_region_without_stages_has_origins_and_constants(toys: SimpleNamespace) -> None:
    def body(op, x):  # type: ignore[no-untyped-def]
        cut = op(aten.slice.Tensor, x, 1, 2, 2**63 - 1)
        both = op(aten.cat.default, [cut, cut], 1)
        return (op(aten.to.dtype, both, torch.bfloat16),)

    region = toys.region("r", (toys.wide("x"),), (), body)
    for node in region.graph.nodes:
        node.meta["origin"] = "blocks.3"
    assert print_region(region).splitlines()[3:] == [
        "           slice_tensor = aten.slice.Tensor(%x, 1, 2, end)  # blocks.3",
        "           cat_default = aten.cat.default([%slice_tensor, %slice_tensor], 1)  # blocks.3",
        "           to_dtype = aten.to.dtype(%cat_default, bfloat16)  # blocks.3",
    ]


def test_counts_take_each_region_once(toys: SimpleNamespace) -> None:
    counts = count_ops(toys.toy())
    assert counts["aten.linear.default"] == 1 + 3 + 1
    assert counts["aten.neg.default"] == 1
    empty = toys.toy()
    assert count_ops(Program(empty.facts, {}, (), (), {})) == {}
