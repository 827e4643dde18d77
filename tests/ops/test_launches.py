"""Launchers with an unknown number of rows: only grids and arguments of a launch depend on it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from h3compile.ops import OPERATORS
from h3compile.ops.calls import Call, Sizes, calls
from h3compile.ops.launch import Launch
from h3compile.ops.operator import Operand

# No width equals the number of rows, by which dimensions of rows are told apart.
ROWS = 37
SIZES = Sizes(hidden=48, inner=80, heads=2, head_dim=128, turned=96, text=64)
ROW_OPERATORS = {
    "norm_modulate.default",
    "norm_modulate.fp8",
    "gate_norm_modulate.default",
    "gate_norm_modulate.fp8",
    "gate_residual.default",
    "swiglu.default",
    "swiglu.fp8",
    "quantize_rows.default",
    "qk_norm_rope.default",
    "linear_fp8.default",
}
CALLS = [call for call in calls(SIZES, ROWS, torch.bfloat16) if call.operator in ROW_OPERATORS]


def dynamic(operands: tuple[Operand, ...], mode: FakeTensorMode) -> tuple[Operand, ...]:
    """Operands as fake tensors, every dimension of rows a symbol."""

    def faked(operand: Operand) -> Operand:
        if not isinstance(operand, torch.Tensor):
            return operand
        kinds = [DimDynamic.DYNAMIC if size == ROWS else DimDynamic.STATIC for size in operand.shape]
        return mode.from_tensor(operand, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))

    return tuple(map(faked, operands))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.operator} {call.label}".strip())
@pytest.mark.parametrize("arch", ["sm_89", "sm_90a", "sm_100a"])
def test_a_variant_does_not_know_the_rows(call: Call, arch: str) -> None:
    operator = next(operator for operator in OPERATORS if operator.name == call.operator)
    provider = next(provider for provider in operator.providers if provider.name == "triton")
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes) as mode:
        operands = dynamic(call.operands, mode)
        launches: list[Launch] = []
        assert provider.illegal(arch, *operands) is None
        provider.launch(launches.append, arch, *operands)
    assert launches
    assert shapes.guards == []
    for launch in launches:
        assert not any(isinstance(value, torch.SymInt) for _, value in launch.spec.constants)
        assert len(launch.arguments) == len(launch.spec.types)
        # The same variant that a call with these rows launches.
        known: list[Launch] = []
        provider.launch(known.append, arch, *call.operands)
        assert launch.spec in {other.spec for other in known}
