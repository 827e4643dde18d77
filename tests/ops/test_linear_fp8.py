"""The FP8 linear's kernel against its reference, and who may serve it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from h3compile.ops import Operator
from h3compile.ops.numerics import FP8
from h3compile.ops.operator import Operand, Provider

Launched = Callable[..., tuple[torch.Tensor, ...]]
Operands = tuple[Operand, ...]


def operands(
    rows: int, n: int, k: int, *, bias: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Operands:
    """Random operands whose rows and channels differ in scale by orders of magnitude."""
    generator = torch.Generator().manual_seed(rows + n + k)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return (
        (normal(1, rows, k) * 50).to(FP8),
        normal(1, rows, 1).exp() * 1e-3,
        (normal(n, k) * 50).to(FP8),
        normal(n).exp() * 1e-3,
        normal(n).to(dtype) if bias else None,
        dtype,
    )


def assert_close(launched: Launched, reference: Launched, call: Operands) -> None:
    (got,), (expected,) = launched("linear_fp8.default", *call), reference("linear_fp8.default", *call)
    assert got.dtype == expected.dtype
    rtol = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[got.dtype]
    # Sums of the tensor cores keep fewer bits than float32 has: of the largest term, not of the sum.
    x, x_scale, weight, weight_scale = (o.float() for o in call[:4] if isinstance(o, torch.Tensor))
    size = torch.nn.functional.linear((x * x_scale).abs(), (weight * weight_scale[:, None]).abs())
    allowed = rtol * expected.float().abs() + 2**-12 * size
    assert bool(((got.float() - expected.float()).abs() <= allowed).all())


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 63, 127, 129])
def test_odd_lengths(rows: int, launched: Launched, reference: Launched) -> None:
    assert_close(launched, reference, operands(rows, 80, 208))


@pytest.mark.parametrize(("n", "k"), [(16, 16), (272, 144), (520, 400)])
def test_odd_widths(n: int, k: int, launched: Launched, reference: Launched) -> None:
    assert_close(launched, reference, operands(130, n, k))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
def test_bias_and_dtypes(dtype: torch.dtype, launched: Launched, reference: Launched) -> None:
    assert_close(launched, reference, operands(33, 80, 208, bias=True, dtype=dtype))


def test_tiles_in_groups_cover_all(launched: Launched, reference: Launched) -> None:
    assert_close(launched, reference, operands(1300, 528, 16))


def test_leading_dimensions_are_rows(launched: Launched) -> None:
    x, x_scale, *others = operands(24, 80, 208)
    assert isinstance(x, torch.Tensor)
    assert isinstance(x_scale, torch.Tensor)
    (flat,) = launched("linear_fp8.default", x, x_scale, *others)
    shaped = (x.view(2, 3, 4, 208), x_scale.view(2, 3, 4, 1))
    (got,) = launched("linear_fp8.default", *shaped, *others)
    assert got.shape == (2, 3, 4, 80)
    assert torch.equal(got.view_as(flat), flat)


def test_other_rows_are_never_read(launched: Launched) -> None:
    x, x_scale, *others = operands(130, 80, 208)
    assert isinstance(x, torch.Tensor)
    assert isinstance(x_scale, torch.Tensor)
    (clean,) = launched("linear_fp8.default", x, x_scale, *others)
    x.view(torch.uint8)[:, [0, 64, 129]] = 0x7F
    x_scale[:, 7] = torch.nan
    (poisoned,) = launched("linear_fp8.default", x, x_scale, *others)
    kept = [row for row in range(130) if row not in (0, 7, 64, 129)]
    assert torch.equal(clean[:, kept], poisoned[:, kept])
    assert bool(poisoned[:, [0, 7, 64, 129]].isnan().all())


@pytest.fixture
def providers(operator_named: Callable[[str], Operator]) -> dict[str, Provider]:
    return {provider.name: provider for provider in operator_named("linear_fp8.default").providers}


def test_who_is_legal_where(providers: dict[str, Provider]) -> None:
    call = operands(16, 80, 208)
    for arch in ("sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"):
        assert providers["triton"].illegal(arch, *call) is None
        assert providers["scaled_mm"].illegal(arch, *call) is None
    assert providers["triton"].illegal("sm_80", *call) == "it needs sm_89 or later"
    assert providers["scaled_mm"].illegal("sm_86", *call) == "it needs sm_89 or later"


def test_reasons_name_the_operand(providers: dict[str, Provider]) -> None:
    triton, scaled_mm = providers["triton"], providers["scaled_mm"]
    assert "multiples of 16" in str(triton.illegal("sm_90a", *operands(16, 80, 200)))
    assert "multiples of 16" in str(triton.illegal("sm_90a", *operands(16, 84, 208)))
    x, *others = operands(16, 80, 208)
    assert isinstance(x, torch.Tensor)
    assert triton.illegal("sm_90a", x.float(), *others) == "both operands must be E4M3"
    wide = operands(16, 80, 208, dtype=torch.float32)
    assert triton.illegal("sm_90a", *wide) is None
    assert scaled_mm.illegal("sm_90a", *wide) == "torch gives row-wise scaled products in bfloat16 alone"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 129])
def test_scaled_mm(rows: int, providers: dict[str, Provider], reference: Launched) -> None:
    call = operands(rows, 80, 208)

    def provided(name: str, *given: Operand) -> tuple[torch.Tensor, ...]:
        moved = [operand.cuda() if isinstance(operand, torch.Tensor) else operand for operand in given]
        return (providers["scaled_mm"].launch(None, "sm_90a", *moved).cpu(),)  # type: ignore[union-attr]

    assert_close(provided, reference, call)
