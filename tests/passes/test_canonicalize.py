from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from h3compile.passes.canonicalize import Canonicalize
from h3compile.pipeline.testing import Case, Outcome
from h3compile.program.printer import count_ops
from h3compile.program.program import Level
from h3compile.program.region import Port, Region
from h3compile.targets import find_target

aten = torch.ops.aten


def test_exact_and_counted(outcome: Callable[..., Outcome]) -> None:
    found = outcome(Canonicalize())
    after = count_ops(found.after)
    assert found.after.level is Level.CANONICAL
    assert found.run.matches["dropout"] == 12
    assert not {"aten.dropout.default", "aten._assert_tensor_metadata.default", "aten.type_as.default"} & set(
        after
    )
    # Work stays: one product a projection, wherever a no-op left.
    assert after["aten.linear.default"] == count_ops(found.before)["aten.linear.default"]


def test_real_casts_and_partial_slices_stay(case: Case) -> None:
    """The negative case: operators of the same kinds that do compute something."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["port"] = Port("x", torch.float32, ("rows", 4))
    cast = graph.call_function(aten.to.dtype, (x, torch.bfloat16))
    cast.meta["port"] = Port("cast", torch.bfloat16, ("rows", 4))
    part = graph.call_function(aten.slice.Tensor, (cast, 1, 0, 2))
    strided = graph.call_function(aten.slice.Tensor, (part, 0, 0, 9223372036854775807, 2))
    drop = graph.call_function(aten.dropout.default, (strided, 0.5, True))
    graph.output((drop,))
    port = Port("drop", torch.bfloat16, ())
    region = Region("main", graph, (x.meta["port"],), (), (port,))
    program = case.program.evolve(regions={"main": region})
    rewrite = Canonicalize().apply(program, find_target("cpu"))
    assert rewrite.matches == ()
    assert sum(count_ops(rewrite.program).values()) == 4


def test_a_copy_to_another_device_is_no_cast(case: Case) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["port"] = Port("x", torch.float32, (4,))
    copy = graph.call_function(aten._to_copy.default, (x,), {"device": torch.device("cuda")})
    copy.meta["port"] = Port("copy", torch.float32, (4,))
    graph.output((copy,))
    region = Region("main", graph, (x.meta["port"],), (), (copy.meta["port"],))
    rewrite = Canonicalize().apply(case.program.evolve(regions={"main": region}), find_target("cpu"))
    assert rewrite.matches == ()
