"""References of the operators against formulas written another way, and what torch asks of an operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from h3compile.ops import OPERATORS, Operator
from h3compile.ops.calls import Call, Sizes, calls
from h3compile.ops.numerics import FP8

Launched = Callable[..., tuple[torch.Tensor, ...]]

EPS = 1e-5
WIDTH, ROWS = 24, 11
TINY = Sizes(hidden=48, inner=80, heads=2, head_dim=32, turned=24, text=64)


@pytest.fixture
def normal() -> Callable[..., torch.Tensor]:
    """A function from a shape to float64 numbers."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def assert_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_norm_modulate(normal: Callable[..., torch.Tensor], reference: Launched) -> None:
    x, weight, table = normal(1, ROWS, WIDTH), normal(WIDTH), normal(5, 6 * WIDTH)
    index = torch.arange(ROWS) % 5
    shift, scale, *_ = table[index].chunk(6, -1)
    (got,) = reference("norm_modulate.default", x, weight, table, index, 0, 1, EPS)
    assert_equal(got, functional.rms_norm(x, (WIDTH,), weight, EPS) * (1 + scale) + shift)


def test_gate_norm_modulate(normal: Callable[..., torch.Tensor], reference: Launched) -> None:
    x, branch, weight = normal(1, ROWS, WIDTH), normal(1, ROWS, WIDTH), normal(WIDTH)
    table, index = normal(5, 6 * WIDTH), torch.arange(ROWS) % 5
    _, _, gate, shift, scale, last = table[index].chunk(6, -1)
    residual, out = reference("gate_norm_modulate.default", x, branch, weight, table, index, 2, 3, 4, EPS)
    assert_equal(residual, x + gate * branch)
    assert_equal(out, functional.rms_norm(x + gate * branch, (WIDTH,), weight, EPS) * (1 + scale) + shift)
    (gated,) = reference("gate_residual.default", x, branch, table, index, 5)
    assert_equal(gated, x + last * branch)


def test_the_norm_reads_the_residual_before_it_is_rounded(reference: Launched) -> None:
    # 256 + 0.5 rounds to 256 in BF16, and the norm of a row of one channel is its sign times a bit less
    # than one; with eps as large as the square the difference shows.
    x, branch = torch.full((1, 1, 1), 256.0).bfloat16(), torch.full((1, 1, 1), 0.5).bfloat16()
    table = torch.tensor([[1.0, 0.0, 0.0]]).bfloat16()
    one, index = torch.ones(1).bfloat16(), torch.zeros(1, dtype=torch.int64)
    call = (x, branch, one, table, index, 0, 1, 2, 0.0)
    residual, values, scales = reference("gate_norm_modulate.fp8", *call[:-1], 65536.0)
    assert residual.item() == 256.0
    assert values.float() * scales == pytest.approx(256.5 / (256.5**2 + 65536) ** 0.5, rel=1e-6)


def test_rotation_is_a_product_of_complex_numbers(
    normal: Callable[..., torch.Tensor], reference: Launched
) -> None:
    heads, width, half = 3, 20, 7
    qkv, q_weight, k_weight = normal(1, ROWS, 3 * heads * width), normal(width), normal(width)
    angles = normal(ROWS, half)
    tables = [torch.cat((part, part), -1) for part in (angles.cos(), angles.sin())]
    got = reference("qk_norm_rope.default", qkv, q_weight, k_weight, *tables, heads, EPS)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    for part, weight, out in zip(
        qkv.view(ROWS, 3, heads, width).unbind(1)[:2], (q_weight, k_weight), got, strict=True
    ):
        normed = functional.rms_norm(part, (width,), weight, EPS)
        turned = torch.complex(normed[..., :half], normed[..., half : 2 * half]) * turn
        assert_equal(out[0], torch.cat((turned.real, turned.imag, normed[..., 2 * half :]), -1))
    plain = reference("qk_norm_rope.default", qkv, q_weight, k_weight, None, None, heads, EPS)
    assert_equal(plain[0][0, ..., 2 * half :], got[0][0, ..., 2 * half :])


def test_swiglu(normal: Callable[..., torch.Tensor], reference: Launched) -> None:
    value, gate = normal(1, ROWS, WIDTH), normal(1, ROWS, WIDTH)
    expected = value * functional.silu(gate)
    assert_equal(reference("swiglu.default", torch.cat((value, gate), -1), False)[0], expected)
    assert_equal(reference("swiglu.default", torch.cat((gate, value), -1), True)[0], expected)


@pytest.mark.parametrize("static", [None, torch.tensor([0.004])], ids=["dynamic", "static"])
def test_quantized_values_are_the_nearest(
    static: torch.Tensor | None, normal: Callable[..., torch.Tensor], reference: Launched
) -> None:
    x = normal(1, ROWS, WIDTH)
    values, scales = reference("quantize_rows.default", x, static)
    if static is None:
        assert_equal(scales.double(), (x.abs().amax(-1, keepdim=True) / 448).float().double())
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    codes = codes[codes.isfinite()]
    scale = x.abs().amax(-1, keepdim=True) / 448 if static is None else scales.double()
    nearest = (x / scale - values.double()).abs()
    best = (x[..., None] / scale[..., None] - codes).abs().amin(-1)
    assert_equal(nearest, best)


@pytest.mark.parametrize("name", ["norm_modulate", "gate_norm_modulate", "swiglu"])
def test_quantizing_is_of_the_unrounded_result(name: str, reference: Launched) -> None:
    made = {call.operator: call for call in reversed(list(calls(TINY, ROWS, torch.float32)))}
    plain = reference(f"{name}.default", *made[f"{name}.default"].operands)
    quantized = reference(f"{name}.fp8", *made[f"{name}.default"].operands)
    expected = reference("quantize_rows.default", plain[-1])
    for got, other in zip(quantized, (*plain[:-1], *expected), strict=True):
        assert torch.equal(got.float(), other.float())


def test_linear_fp8(normal: Callable[..., torch.Tensor], reference: Launched) -> None:
    x, weight = normal(1, ROWS, WIDTH).to(FP8), normal(16, WIDTH).to(FP8)
    x_scale, weight_scale, bias = normal(1, ROWS, 1).float(), normal(16).float(), normal(16)
    (got,) = reference("linear_fp8.default", x, x_scale, weight, weight_scale, bias, torch.float64)
    plain = (weight.double() * weight_scale.double()[:, None], bias)
    assert_equal(got, functional.linear(x.double() * x_scale.double(), *plain))


def _ends(rows: int) -> list[Call]:
    """The first and the last call of every operator."""
    made = list(calls(TINY, rows, torch.bfloat16))
    found: list[Call] = []
    for operator in OPERATORS:
        own = [call for call in made if call.operator == operator.name]
        assert own, f"no call of {operator.name}"
        found += own[:1] if len(own) == 1 else [own[0], own[-1]]
    return found


def _named(call: Call) -> str:
    return f"{call.operator} {call.label}".strip()


@pytest.mark.parametrize("call", _ends(ROWS), ids=_named)
def test_torch_accepts_the_operator(call: Call, operator_named: Callable[[str], Operator]) -> None:
    tensors = [operand for operand in call.operands if isinstance(operand, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(tensor.dtype == FP8 for tensor in tensors):
        # It compares operands with a product that torch has not for E4M3.
        checks.remove("test_schema")
    torch.library.opcheck(operator_named(call.operator).target, call.operands, test_utils=checks)
    for tensor, kept in zip(tensors, before, strict=True):
        assert torch.equal(tensor.float(), kept.float())


@pytest.mark.parametrize("call", _ends(128), ids=_named)
def test_cost_counts_what_is_there(call: Call, operator_named: Callable[[str], Operator]) -> None:
    operator = operator_named(call.operator)
    outputs = operator.reference(*call.operands)
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    cost = operator.cost(*call.operands)
    assert all(count > 0 for count in cost.flop.values())
    # It writes its outputs, whatever it reads; scales and counters are left out.
    assert cost.bytes >= sum(part.nbytes for part in parts if part.numel() >= 128 * 32)
