"""SAGE on quantized operands against its reference: the same rounding, the same tiles skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from h3compile.ops import Operator
from h3compile.ops.launch import Launch
from h3compile.ops.numerics import FP8
from h3compile.ops.online_softmax import K_TILE, Q_TILE

pytestmark = pytest.mark.matrix

Outputs = tuple[torch.Tensor, ...]
Launched = Callable[..., Outputs]

D = 128
# A probability near a tie may round to the other side, by an eighth of one key's weight. With int8 keys
# and one scale a tile, the kernel's exponents are good to 2^-14, which is often near enough.
BOUND = 3e-3
ROW_BOUND = 0.13
EVERYTHING = 1e30
LEVELS = torch.tensor([3.0, 0.1, 0.8, 0.4])
QK = pytest.mark.parametrize("qk", ["fp8_e4m3", "int8"])
BLOCKS = pytest.mark.parametrize("k_block", [16, 64, 128])


def quantized(
    rows: int, heads: int, qk: str, k_block: int, valid: int | None = None, fade: bool = False
) -> Outputs:
    """Operands from random ones; with ``fade`` some tiles of keys matter more than others."""
    generator = torch.Generator().manual_seed(rows)
    query, key, value = (torch.randn(1, rows, heads, D, generator=generator) for _ in range(3))
    if fade:
        tile = torch.arange(rows)[:, None] // K_TILE + torch.arange(heads)
        key = key * LEVELS[tile % len(LEVELS), None]
    operands: Outputs = torch.ops.h3compile.sage_prepare.separate(query, key, value, qk, k_block, True, valid)
    return operands


def poisoned(operands: Outputs, k_block: int, valid: int) -> Outputs:
    """The same where whatever belongs to no valid row is NaN, or as large as it can be."""
    q, q_scale, k, k_scale, v, v_scale = (part.clone() for part in operands)
    for values in (q, k):
        values[:, valid:] = torch.nan if values.dtype == FP8 else 127
    q_scale[:, valid:] = torch.nan
    k_scale[:, -(-valid // k_block) :] = torch.nan
    return q, q_scale, k, k_scale, v, v_scale


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def assert_equal_but_for_ties(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert apart(got, expected) < BOUND
    difference, size = (x.double().norm(dim=-1) for x in (got.double() - expected.double(), expected))
    assert bool((difference <= ROW_BOUND * size).all())


def tiles(heads: int, valid: int) -> int:
    return heads * -(-valid // Q_TILE) * -(-valid // K_TILE)


@QK
@BLOCKS
@pytest.mark.parametrize("rows", [1, 17, 129, 255])
def test_equals_the_reference(
    rows: int, qk: str, k_block: int, interpreted: Launched, reference: Launched
) -> None:
    operands = (*quantized(rows, 2, qk, k_block), k_block, torch.float32)
    (out,) = interpreted("sage_attention.default", *operands)
    assert out.shape == (1, rows, 2, D)
    assert_equal_but_for_ties(out, reference("sage_attention.default", *operands)[0])


@pytest.mark.parametrize("rows", [15, 16, 63, 127, 128, 191])
def test_odd_lengths(rows: int, interpreted: Launched, reference: Launched) -> None:
    operands = (*quantized(rows, 2, "int8", 64), 64, torch.float32)
    (out,) = interpreted("sage_attention.default", *operands)
    assert_equal_but_for_ties(out, reference("sage_attention.default", *operands)[0])


@pytest.mark.parametrize(("rows", "valid"), [(1, None), (129, 70), (255, None)])
def test_one_scale_a_tensor(rows: int, valid: int | None, interpreted: Launched, reference: Launched) -> None:
    q, q_scale, k, k_scale, v, v_scale = quantized(rows, 2, "fp8_e4m3", 0, valid)
    assert q_scale.shape == k_scale.shape == (1, 1)
    for values in (q, k):
        values[:, valid or rows :] = torch.nan
    operands = (q, q_scale, k, k_scale, v, v_scale, 0, torch.float32)
    (out,) = interpreted("sage_attention.default", *operands, valid)
    assert_equal_but_for_ties(out, reference("sage_attention.default", *operands, valid)[0])
    assert bool((out[:, valid or rows :] == 0).all())
    # What the kernels read is a scale a row and a block: the same number everywhere.
    finer = (
        q,
        q_scale.repeat(2, rows),
        k,
        k_scale.repeat(2, -(-rows // 128)),
        v,
        v_scale,
        128,
        torch.float32,
    )
    assert torch.equal(out, interpreted("sage_attention.default", *finer, valid)[0])
    skipping, counts = interpreted("sage_attention.skip", *operands, 0.02 * rows, valid)
    expected, expected_counts = reference("sage_attention.skip", *operands, 0.02 * rows, valid)
    assert_equal_but_for_ties(skipping, expected)
    assert counts.tolist() == expected_counts.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_seven_heads_and_narrow_results(
    dtype: torch.dtype, interpreted: Launched, reference: Launched
) -> None:
    operands = (*quantized(70, 7, "fp8_e4m3", 128), 128, dtype)
    (out,) = interpreted("sage_attention.default", *operands)
    assert out.dtype == dtype
    assert_equal_but_for_ties(out, reference("sage_attention.default", *operands)[0])


@QK
@BLOCKS
@pytest.mark.parametrize("valid", [1, 130])
def test_padding_influences_nothing(valid: int, qk: str, k_block: int, interpreted: Launched) -> None:
    operands = quantized(valid + 140, 2, qk, k_block, valid)
    options = (k_block, torch.bfloat16)
    (clean,) = interpreted("sage_attention.default", *operands, *options, valid)
    poison = poisoned(operands, k_block, valid)
    (out,) = interpreted("sage_attention.default", *poison, *options, valid)
    skipping, counts = interpreted("sage_attention.skip", *poison, *options, 1e-6, valid)
    assert bool((out[:, valid:] == 0).all())
    assert bool((out[:, :valid] != 0).any())
    assert torch.equal(out, clean)
    assert_equal_but_for_ties(skipping, clean)
    assert bool((skipping[:, valid:] == 0).all())
    assert counts.tolist() == [0, tiles(2, valid)]


@QK
@pytest.mark.parametrize("threshold", [0.0, 1e-6])
def test_nothing_skipped_is_dense(threshold: float, qk: str, interpreted: Launched) -> None:
    operands = (*quantized(255, 2, qk, 16), 16, torch.float32)
    (dense,) = interpreted("sage_attention.default", *operands)
    out, counts = interpreted("sage_attention.skip", *operands, threshold)
    assert_equal_but_for_ties(out, dense)
    if threshold == 0:
        assert torch.equal(out, dense)
    assert counts.tolist() == [0, tiles(2, 255)]


@QK
@pytest.mark.parametrize("k_block", [16, 128])
@pytest.mark.parametrize("share", [0.02, 0.4])
def test_skips_what_the_reference_skips(
    share: float, qk: str, k_block: int, interpreted: Launched, reference: Launched
) -> None:
    operands = (*quantized(520, 2, qk, k_block, fade=True), k_block, torch.float32)
    out, counts = interpreted("sage_attention.skip", *operands, share * 520)
    expected, expected_counts = reference("sage_attention.skip", *operands, share * 520)
    skipped, considered = counts.tolist()
    assert counts.dtype == torch.int32
    assert counts.tolist() == expected_counts.tolist()
    assert considered == tiles(2, 520)
    assert 0.1 < skipped / considered < 0.8
    assert_equal_but_for_ties(out, expected)
    (dense,) = interpreted("sage_attention.default", *operands)
    assert apart(out, dense) > 2 * BOUND


@QK
def test_the_first_tile_is_never_skipped(qk: str, interpreted: Launched, reference: Launched) -> None:
    operands = (*quantized(255, 2, qk, 64), 64, torch.float32)
    out, counts = interpreted("sage_attention.skip", *operands, EVERYTHING)
    assert counts.tolist() == [tiles(2, 255) - 2 * 4, tiles(2, 255)]
    assert bool(out.isfinite().all())
    assert_equal_but_for_ties(out, reference("sage_attention.skip", *operands, EVERYTHING)[0])


def reasons(operator: Operator, arch: str, *operands: object) -> Iterator[tuple[str, str | None]]:
    """By those of our own; tests/ops/test_sage_libraries.py has the others."""
    for provider in operator.providers:
        if provider.package is None:
            yield provider.name, provider.illegal(arch, *operands)


@pytest.mark.parametrize("name", ["sage_attention.default", "sage_attention.skip"])
def test_who_serves_what(name: str, operator_named: Callable[[str], Operator]) -> None:
    operator = operator_named(name)
    fp8 = (*quantized(4, 1, "fp8_e4m3", 64), 64, torch.bfloat16)
    int8 = (*quantized(4, 1, "int8", 64), 64, torch.bfloat16)
    assert dict(reasons(operator, "sm_90a", *int8)) == {"gluon": None, "triton": None}
    assert dict(reasons(operator, "sm_103a", *fp8)) == {"gluon": "it is written for sm_90a", "triton": None}
    for arch, reason in (
        ("sm_80", "it needs sm_89 or later"),
        ("sm_103a", "its tensor cores multiply no integers"),
    ):
        assert dict(reasons(operator, arch, *int8))["triton"] == reason
    for arch in ("sm_89", "sm_100a", "sm_120a", "sm_121a"):
        assert dict(reasons(operator, arch, *int8))["triton"] is None


def test_the_gluon_kernel_has_whole_query_tiles(operator_named: Callable[[str], Operator]) -> None:
    operator = operator_named("sage_attention.skip")
    launches: list[Launch] = []
    operands = (*quantized(500, 2, "int8", 64), 64, torch.bfloat16, 1.0)
    next(p for p in operator.providers if p.name == "gluon").launch(launches.append, "sm_90a", *operands)
    (launch,) = launches
    constants = dict(launch.spec.constants)
    assert launch.spec.gluon
    assert launch.grid == (3, 2, 1)
    assert (constants["Q_TILE"], constants["K_TILE"]) == (3 * Q_TILE, K_TILE)
