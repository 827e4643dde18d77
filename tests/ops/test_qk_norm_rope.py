"""The query and key kernel against its reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

Outputs = tuple[torch.Tensor, ...]
Launched = Callable[..., Outputs]

EPS = 1e-5
# Heads, channels a head, rotated channels: tiny's, ranks of eight and four, odd widths, no rotation.
SHAPES = ((8, 16, 12), (7, 128, 96), (14, 128, 96), (3, 48, 20), (5, 32, 32), (2, 80, 0))


def operands(rows: int, heads: int, width: int, turned: int, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """qkv, both weights, cos and sin, where every head has another size."""
    generator = torch.Generator().manual_seed(rows * heads + width)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    qkv = normal(1, rows, 3 * heads, width) * (1 + torch.arange(3 * heads)[:, None])
    angles = normal(rows, turned // 2) * 10
    angles = torch.cat((angles, angles), -1)
    tables = [angles.cos().to(dtype), angles.sin().to(dtype)] if turned else [None, None]
    return [qkv.flatten(2).to(dtype), normal(width).to(dtype), normal(width).to(dtype), *tables]


def assert_close(got: Outputs, expected: Outputs) -> None:
    """Equal to a step of the last place where sums were taken in another order."""
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.is_contiguous()
        rtol = 2e-6 if one.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(one, other, rtol=rtol, atol=2e-6 * float(other.abs().max()))
        assert one.dtype == torch.float32 or float((one != other).float().mean()) < 0.01


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 63, 127, 129])
def test_odd_lengths(rows: int, launched: Launched, reference: Launched) -> None:
    given = operands(rows, *SHAPES[0], torch.bfloat16)
    call = ("qk_norm_rope.default", *given, SHAPES[0][0], EPS)
    assert_close(launched(*call), reference(*call))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_shapes_of_heads(
    shape: tuple[int, int, int], dtype: torch.dtype, launched: Launched, reference: Launched
) -> None:
    call = ("qk_norm_rope.default", *operands(5, *shape, dtype), shape[0], EPS)
    assert_close(launched(*call), reference(*call))


def test_heads_of_the_release(launched: Launched, reference: Launched) -> None:
    call = ("qk_norm_rope.default", *operands(3, 56, 128, 96, torch.bfloat16), 56, EPS)
    assert_close(launched(*call), reference(*call))


def test_qkv_may_be_a_view_with_longer_rows(launched: Launched, reference: Launched) -> None:
    qkv, *others = operands(5, *SHAPES[1], torch.bfloat16)
    assert qkv is not None
    padded = torch.cat((qkv, torch.full_like(qkv[..., :64], torch.nan)), -1)
    call = ("qk_norm_rope.default", qkv, *others, 7, EPS)
    view = ("qk_norm_rope.default", padded[..., : qkv.shape[-1]], *others, 7, EPS)
    assert_close(launched(*view), reference(*call))


def test_other_heads_and_rows_are_never_read(launched: Launched) -> None:
    qkv, *others = operands(5, *SHAPES[1], torch.bfloat16)
    assert qkv is not None
    clean = launched("qk_norm_rope.default", qkv, *others, 7, EPS)
    poisoned = qkv.clone().view(1, 5, 3, 7, 128)
    poisoned[:, [0, 4]] = torch.nan
    poisoned[:, :, :, 3] = torch.inf
    poisoned[:, :, 2] = torch.nan
    got = launched("qk_norm_rope.default", poisoned.view_as(qkv), *others, 7, EPS)
    for one, other in zip(clean, got, strict=True):
        kept = [0, 1, 2, 4, 5, 6]
        assert torch.equal(one[:, 1:4, kept], other[:, 1:4, kept])
        assert bool(other[:, 0].isnan().any())


def test_a_batch_is_not_legal(operator_named: Callable[..., object]) -> None:
    (provider,) = operator_named("qk_norm_rope.default").providers  # type: ignore[attr-defined]
    qkv, *others = operands(5, *SHAPES[0], torch.bfloat16)
    assert qkv is not None
    reason = provider.illegal("sm_90a", qkv.expand(2, -1, -1), *others, 8, EPS)
    assert reason == "it takes one document, not a batch"
