"""Kernels that give every row a program, against their references: odd lengths, odd widths, poisoned rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from h3compile.ops.numerics import FP8
from h3compile.ops.operator import Operand

pytestmark = pytest.mark.matrix

Operands = tuple[Operand, ...]
Outputs = tuple[torch.Tensor, ...]
Launched = Callable[..., Outputs]

EPS = 1e-5
ROWS = (1, 15, 16, 17, 63, 127, 129)
# Tiny's, one just over a part of a row, one with many parts.
WIDTHS = (80, 272, 1104)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)


class Inputs:
    """Operands of every row kernel at one size, with the outlier channels that residual streams have."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, lead: tuple[int, ...] = (1,)) -> None:
        self.generator = torch.Generator().manual_seed(rows + width)
        self.width = width
        self.x = self.normal(*lead, rows, width).to(dtype)
        self.x[..., 3::61] *= 20
        self.branch = self.normal(*lead, rows, width).to(dtype)
        self.weight = self.normal(width).to(dtype)
        self.table = self.normal(7, 6 * width).to(dtype)
        self.index = torch.randint(0, 7, (rows,), generator=self.generator)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def of(self, name: str) -> Operands:
        """The operands of the operator ``name``."""
        modulation = (self.weight, self.table, self.index)
        calls: dict[str, Operands] = {
            "norm_modulate": (self.x, *modulation, 1, 0, EPS),
            "gate_norm_modulate": (self.x, self.branch, *modulation, 2, 3, 4, EPS),
            "gate_residual": (self.x, self.branch, self.table, self.index, 5),
            "swiglu": (self.x, False),
            "quantize_rows": (self.x,),
        }
        return calls[name.partition(".")[0]]


PLAIN = ("norm_modulate.default", "gate_norm_modulate.default", "gate_residual.default", "swiglu.default")
QUANTIZED = ("norm_modulate.fp8", "gate_norm_modulate.fp8", "swiglu.fp8", "quantize_rows.default")
NAMES = pytest.mark.parametrize("name", PLAIN + QUANTIZED)


def steps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many representable numbers lie between the 8- or 16-bit floats ``a`` and ``b``."""
    bits = {1: torch.int8, 2: torch.int16}[a.element_size()]
    largest = torch.iinfo(bits).max

    def ordered(x: torch.Tensor) -> torch.Tensor:
        number = x.view(bits).int()
        return torch.where(number < 0, -(number & largest), number)

    return (ordered(a) - ordered(b)).abs()


def assert_close(got: Outputs, expected: Outputs) -> None:
    """Equal but for sums taken in another order: a step of the last place where a value is at a tie."""
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        if one.dtype == torch.float32:
            # The norms of a value near zero: absolute against the size of the row.
            torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6 * float(other.abs().max()))
        else:
            apart = steps(one, other)
            assert int(apart.max()) <= 1 or close_to_zero(one, other, apart)
            assert float((apart > 0).float().mean()) < 0.01


def close_to_zero(one: torch.Tensor, other: torch.Tensor, apart: torch.Tensor) -> bool:
    """Where they differ by more than a step, a difference of large terms has cancelled."""
    error = (one.double() - other.double()).abs()[apart > 1]
    return bool((error < 1e-5 * float(other.double().abs().max())).all())


@NAMES
@pytest.mark.parametrize("rows", ROWS)
def test_odd_lengths(name: str, rows: int, launched: Launched, reference: Launched) -> None:
    operands = Inputs(rows, WIDTHS[0], torch.bfloat16).of(name)
    assert_close(launched(name, *operands), reference(name, *operands))


@NAMES
@DTYPES
@pytest.mark.parametrize("width", [16, *WIDTHS[1:]])
def test_odd_widths(
    name: str, dtype: torch.dtype, width: int, launched: Launched, reference: Launched
) -> None:
    operands = Inputs(5, width, dtype).of(name)
    assert_close(launched(name, *operands), reference(name, *operands))


@pytest.mark.parametrize(
    ("name", "width"),
    [(name, 5376) for name in PLAIN[:3] + QUANTIZED[:2]]
    + [("swiglu.default", 2 * 14336), ("swiglu.fp8", 2 * 14336), ("quantize_rows.default", 7168)],
)
def test_widths_of_the_release(name: str, width: int, launched: Launched, reference: Launched) -> None:
    operands = Inputs(3, width, torch.bfloat16).of(name)
    assert_close(launched(name, *operands), reference(name, *operands))


def test_swiglu_of_either_order(launched: Launched, reference: Launched) -> None:
    x = Inputs(5, 272, torch.float32).x
    (value_first,) = launched("swiglu.default", x, False)
    (gate_first,) = launched("swiglu.default", x.roll(136, -1), True)
    torch.testing.assert_close(gate_first, value_first, rtol=0, atol=0)
    assert_close((gate_first,), reference("swiglu.default", x, False))


@NAMES
def test_leading_dimensions_share_the_index(name: str, launched: Launched, reference: Launched) -> None:
    operands = Inputs(5, 80, torch.bfloat16, lead=(2, 3)).of(name)
    assert_close(launched(name, *operands), reference(name, *operands))


@NAMES
def test_other_rows_are_never_read(name: str, launched: Launched) -> None:
    inputs = Inputs(17, 272, torch.bfloat16)
    clean = launched(name, *inputs.of(name))
    inputs.x[:, [0, 1, 3, 16]] = torch.nan
    inputs.branch[:, [0, 1, 3, 16]] = torch.inf
    poisoned = launched(name, *inputs.of(name))
    kept = [row for row in range(17) if row not in (0, 1, 3, 16)]
    for one, other in zip(clean, poisoned, strict=True):
        assert torch.equal(one[:, kept].float(), other[:, kept].float())
        assert not torch.equal(one[:, 3].float(), other[:, 3].float())


@DTYPES
@pytest.mark.parametrize("static", [(), (torch.tensor([0.013]),)], ids=["dynamic", "static"])
def test_rows_are_quantized_to_the_same_bits(
    static: Operands, dtype: torch.dtype, launched: Launched, reference: Launched
) -> None:
    operands = (Inputs(129, 1104, dtype).x, *static)
    got, expected = (
        launched("quantize_rows.default", *operands),
        reference("quantize_rows.default", *operands),
    )
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@DTYPES
@pytest.mark.parametrize("static", [(), (torch.tensor([0.013]),)], ids=["dynamic", "static"])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (257, 16), (33, 128), (31, 512), (3, 1024)])
def test_short_rows_are_quantized_together_to_the_same_bits(
    rows: int, width: int, static: Operands, dtype: torch.dtype, launched: Launched, reference: Launched
) -> None:
    x = Inputs(3 * rows, width, dtype).x.view(1, rows, 3, width)
    got, expected = (run("quantize_rows.default", x, *static) for run in (launched, reference))
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    # What is no number is seen, and by its row alone.
    x[0, -1, -1, 1] = torch.nan
    poisoned = launched("quantize_rows.default", x, *static)
    assert bool(poisoned[0][0, -1, -1].float().isnan().any())
    for one, other in zip(poisoned, got, strict=True):
        rest = (part.view(-1, part.shape[-1])[:-1].view(torch.uint8) for part in (one, other))
        assert torch.equal(*rest)


@pytest.mark.parametrize("name", QUANTIZED)
def test_static_scale_saturates(name: str, launched: Launched, reference: Launched) -> None:
    inputs = Inputs(5, 272, torch.bfloat16)
    operands = (*inputs.of(name), torch.tensor([1e-3]))
    got, expected = launched(name, *operands), reference(name, *operands)
    assert_close(got, expected)
    values, scales = got[-2:]
    assert torch.equal(scales, torch.full_like(scales, 1e-3))
    assert float(values.float().abs().max()) == 448
    assert float((values.float().abs() == 448).float().mean()) > 0.1


@pytest.mark.parametrize("name", QUANTIZED)
def test_values_that_are_no_number_stay_visible(name: str, launched: Launched) -> None:
    inputs = Inputs(3, 80, torch.bfloat16)
    # A pair of halves for SwiGLU, so that neither hides it.
    inputs.x[0, 1, 5] = inputs.x[0, 1, 45] = torch.nan
    for scale in ((), (torch.tensor([0.5]),)):
        values = launched(name, *inputs.of(name), *scale)[-2]
        assert bool(values[0, 1].float().isnan().any())
        assert not bool(values[0, [0, 2]].float().isnan().any())


def test_rows_of_zeros_have_a_scale(launched: Launched) -> None:
    values, scales = launched("quantize_rows.default", torch.zeros(1, 3, 80, dtype=torch.bfloat16))
    assert values.dtype == FP8
    assert bool((values.float() == 0).all())
    assert bool((scales > 0).all())


@NAMES
def test_strided_operands_are_refused(name: str, launched: Launched) -> None:
    inputs = Inputs(4, 80, torch.bfloat16)
    inputs.x = inputs.x.repeat(1, 1, 2)[..., :80]
    with pytest.raises(ValueError, match="needs x contiguous"):
        launched(name, *inputs.of(name))
