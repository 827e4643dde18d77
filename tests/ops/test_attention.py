"""Dense attention in 16 bits and with Skip-Softmax: odd lengths, poisoned padding, what is skipped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from h3compile.ops.online_softmax import Q_TILE

pytestmark = pytest.mark.matrix

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Outputs = tuple[torch.Tensor, ...]
Launched = Callable[..., Outputs]

D = 128
LENGTHS = (1, 15, 16, 17, 63, 127, 128, 129, 191, 255)
# The interpreter multiplies bfloat16 operands as if their bits were integers; the kernel rounds nowhere else.
DTYPE = torch.float16
# Of rounding probabilities and the result to half precision.
BOUND = 1e-3
# Every tile is below the running maximum by less than this, so that only the first one counts.
EVERYTHING = 1e30
LEVELS = torch.tensor([3.0, 0.1, 0.8, 0.4], dtype=DTYPE)


def joint(rows: int, heads: int, valid: int | None = None) -> Parts:
    """Queries, keys and values as views of one projection; rows from ``valid`` on are poison."""
    qkv = torch.randn(1, rows, 3 * heads * D, generator=torch.Generator().manual_seed(rows)).to(DTYPE)
    if valid is not None:
        qkv[:, valid::2] = torch.nan
        qkv[:, valid + 1 :: 2] = torch.inf
    query, key, value = qkv.view(1, rows, 3, heads, D).unbind(2)
    return query, key, value


def fading(rows: int, heads: int) -> Parts:
    """Tiles of keys that matter more and less, each head in another order: what goes depends on lambda."""
    query, key, value = joint(rows, heads)
    tile = torch.arange(rows)[:, None] // 64 + torch.arange(heads)
    return query, key * LEVELS[tile % len(LEVELS), None], value


def exact(parts: Parts, keys: int) -> torch.Tensor:
    """Attention over the first ``keys`` keys in float64."""
    query, key, value = (part.double().transpose(1, 2) for part in parts)
    scores = query @ key[:, :, :keys].mT * D**-0.5
    out: torch.Tensor = scores.softmax(-1) @ value[:, :, :keys]
    return out.transpose(1, 2)


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def tiles(heads: int, valid: int) -> int:
    return heads * -(-valid // Q_TILE) * -(-valid // 64)


@pytest.mark.parametrize("rows", LENGTHS)
def test_odd_lengths(rows: int, interpreted: Launched, reference: Launched) -> None:
    parts = joint(rows, 2)
    (out,) = interpreted("attention.default", *parts)
    assert out.shape == (1, rows, 2, D)
    assert out.is_contiguous()
    assert apart(out, exact(parts, rows)) < BOUND
    assert apart(out, reference("attention.default", *parts)[0]) < BOUND


@pytest.mark.parametrize("valid", [1, 63, 64, 65, 130])
def test_padding_influences_nothing(valid: int, interpreted: Launched) -> None:
    rows = valid + 70
    (out,) = interpreted("attention.default", *joint(rows, 2, valid), valid)
    (skipping, counts) = interpreted("attention.skip", *joint(rows, 2, valid), 1e-6, valid)
    clean = [part[:, :valid] for part in joint(rows, 2)]
    assert apart(out[:, :valid], exact((clean[0], clean[1], clean[2]), valid)) < BOUND
    assert bool((out[:, valid:] == 0).all())
    assert apart(skipping, out) < BOUND
    assert bool((skipping[:, valid:] == 0).all())
    assert counts.tolist() == [0, tiles(2, valid)]


def test_seven_heads(interpreted: Launched) -> None:
    parts = joint(70, 7)
    (out,) = interpreted("attention.default", *parts)
    assert apart(out, exact(parts, 70)) < BOUND


@pytest.mark.parametrize("threshold", [0.0, 1e-6])
def test_nothing_skipped_is_dense(threshold: float, interpreted: Launched) -> None:
    parts = joint(193, 2)
    (dense,) = interpreted("attention.default", *parts)
    out, counts = interpreted("attention.skip", *parts, threshold)
    assert torch.equal(out, dense) if threshold == 0 else apart(out, dense) < BOUND
    assert counts.tolist() == [0, tiles(2, 193)]


@pytest.mark.parametrize("rows", [330, 520])
@pytest.mark.parametrize("share", [0.02, 0.4])
def test_skips_what_the_reference_skips(
    share: float, rows: int, interpreted: Launched, reference: Launched
) -> None:
    parts = fading(rows, 3)
    out, counts = interpreted("attention.skip", *parts, share * rows)
    expected, expected_counts = reference("attention.skip", *parts, share * rows)
    skipped, considered = counts.tolist()
    assert counts.dtype == torch.int32
    assert counts.tolist() == expected_counts.tolist()
    assert considered == tiles(3, rows)
    assert 0.1 < skipped / considered < 0.8
    assert apart(out, expected) < BOUND
    # The tiles were left out: their probabilities are missing, not rounded.
    assert 2 * BOUND < apart(out, exact(parts, rows)) < 0.5


def test_the_first_tile_is_never_skipped(interpreted: Launched, reference: Launched) -> None:
    parts = joint(255, 2)
    out, counts = interpreted("attention.skip", *parts, EVERYTHING)
    assert counts.tolist() == [tiles(2, 255) - 2 * 4, tiles(2, 255)]
    assert bool(out.isfinite().all())
    assert apart(out, exact(parts, 64)) < BOUND
    assert apart(out, reference("attention.skip", *parts, EVERYTHING)[0]) < BOUND


@pytest.mark.parametrize(
    ("operands", "reason"),
    [
        ([torch.zeros(1, 4, 2, D)] * 3, "no kernel for float32"),
        ([torch.zeros(2, 4, 2, D, dtype=DTYPE)] * 3, "it takes one document, not a batch"),
        ([torch.zeros(1, 4, 2, 64, dtype=DTYPE)] * 3, "heads have 64 channels, and the kernel takes 128"),
        ([torch.zeros(1, 4, D, 2, dtype=DTYPE).mT] * 3, "heads of a row must be contiguous"),
    ],
    ids=["dtype", "batch", "width", "strides"],
)
def test_what_it_cannot_serve(
    operands: list[torch.Tensor], reason: str, operator_named: Callable[[str], object]
) -> None:
    for name in ("attention.default", "attention.skip"):
        providers = operator_named(name).providers  # type: ignore[attr-defined]
        illegal = next(provider.illegal for provider in providers if provider.name == "triton")
        assert reason in illegal("sm_90a", *operands)
