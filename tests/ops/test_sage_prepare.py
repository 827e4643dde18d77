"""The operands of SAGE against their reference: eight bits equal to a step, scales to the last place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from h3compile.ops import Operator

pytestmark = pytest.mark.matrix

Outputs = tuple[torch.Tensor, ...]
Launched = Callable[..., Outputs]

D, TURNED, EPS = 128, 96, 1e-5
LARGEST = {"fp8_e4m3": 448.0, "int8": 127.0}
# Products and sums in another order put a value on the other side of a rounding tie. The values of 16-bit
# operands that are not normed lie on ties more often.
TIES, SEPARATE_TIES = 1e-3, 4e-3
QK = pytest.mark.parametrize("qk", ["fp8_e4m3", "int8"])
BLOCKS = pytest.mark.parametrize("k_block", [16, 64, 128])


def joint(
    rows: int, heads: int, dtype: torch.dtype = torch.bfloat16, turned: int = TURNED
) -> list[torch.Tensor | None]:
    """qkv, both weights, cos and sin: heads of different size, with a mean and two larger channels."""
    generator = torch.Generator().manual_seed(rows + heads)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    qkv = (normal(1, rows, 3 * heads, D) + normal(3 * heads, D)) * (1 + torch.arange(3 * heads)[:, None])
    qkv[..., 40:42] *= 10
    tables = [(normal(rows, turned) * 3).cos().to(dtype), (normal(rows, turned) * 3).sin().to(dtype)]
    weights = [(1 + 0.2 * normal(D)).to(dtype) for _ in range(2)]
    return [qkv.flatten(2).to(dtype), *weights, *(tables if turned else (None, None))]


def separate(rows: int, heads: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Query, key and value, views of one projection."""
    qkv = joint(rows, heads, dtype)[0]
    assert qkv is not None
    return list(qkv.view(1, rows, 3, heads, D).unbind(2))


def steps(values: torch.Tensor) -> torch.Tensor:
    """Eight-bit values as integers in their order, one apart where they are neighbours; -0 is 0."""
    if values.dtype == torch.int8:
        return values.int()
    bits = values.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


def assert_same(got: Outputs, expected: Outputs, ties: float) -> None:
    assert len(got) == len(expected) == 6
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.is_contiguous()
        if one.dtype == torch.float32:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
            continue
        apart = (steps(one) - steps(other)).abs()
        assert int(apart.max()) <= 1
        # One value of a tiny operand may be a tie.
        assert int(apart.count_nonzero()) <= 1 + ties * apart.numel()


@QK
@BLOCKS
@pytest.mark.parametrize("rows", [17, 270])
def test_equals_the_reference(
    rows: int, qk: str, k_block: int, interpreted: Launched, reference: Launched
) -> None:
    call = ("sage_prepare.default", *joint(rows, 2), 2, EPS, qk, k_block, True)
    assert_same(interpreted(*call), reference(*call), TIES)


@pytest.mark.parametrize(
    ("rows", "k_block"),
    [
        (1, 16),
        (15, 64),
        (16, 16),
        (63, 64),
        (127, 128),
        (128, 128),
        (129, 16),
        (191, 64),
        (255, 128),
        (257, 128),
    ],
)
def test_odd_lengths(rows: int, k_block: int, interpreted: Launched, reference: Launched) -> None:
    call = ("sage_prepare.default", *joint(rows, 1), 1, EPS, "fp8_e4m3", k_block, True)
    assert_same(interpreted(*call), reference(*call), TIES)


@BLOCKS
@pytest.mark.parametrize("valid", [1, 129, 255])
def test_padding_influences_nothing(
    valid: int, k_block: int, interpreted: Launched, reference: Launched
) -> None:
    qkv, *others = joint(300, 1)
    assert qkv is not None
    for number, poison in enumerate((torch.nan, torch.inf)):
        qkv[:, valid + 11 * number :] = poison
    options = (1, EPS, "fp8_e4m3", k_block, True, valid)
    q, q_scale, k, k_scale, v, v_scale = got = interpreted("sage_prepare.default", qkv, *others, *options)
    assert_same(got, reference("sage_prepare.default", qkv, *others, *options), TIES)
    assert not bool(q.float()[:, valid:].any() | k.float()[:, valid:].any())
    assert not bool(v.float()[:, :, -(-valid // 16) * 16 :].any())
    assert bool(torch.cat([scale.flatten() for scale in (q_scale, k_scale, v_scale)]).isfinite().all())


@pytest.mark.parametrize(("k_block", "smooth"), [(16, True), (64, False), (128, True)])
def test_heads_of_a_rank(k_block: int, smooth: bool, interpreted: Launched, reference: Launched) -> None:
    call = ("sage_prepare.default", *joint(50, 7), 7, EPS, "int8", k_block, smooth, 41)
    assert_same(interpreted(*call), reference(*call), TIES)


@pytest.mark.parametrize("turned", [0, 64, 128])
@pytest.mark.parametrize("k_block", [16, 64])
def test_other_rotations(turned: int, k_block: int, interpreted: Launched, reference: Launched) -> None:
    operands = joint(70, 2, turned=turned)
    call = ("sage_prepare.default", *operands, 2, EPS, "fp8_e4m3", k_block, True)
    assert_same(interpreted(*call), reference(*call), TIES)


@QK
@pytest.mark.parametrize(("k_block", "smooth"), [(16, True), (16, False), (64, False), (128, True)])
def test_operands_that_are_normed_already(
    qk: str, k_block: int, smooth: bool, interpreted: Launched, reference: Launched
) -> None:
    call = ("sage_prepare.separate", *separate(140, 3), qk, k_block, smooth, 130)
    assert_same(interpreted(*call), reference(*call), SEPARATE_TIES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_other_dtypes(dtype: torch.dtype, interpreted: Launched, reference: Launched) -> None:
    options = ("fp8_e4m3", 64, True, 60)
    call = ("sage_prepare.default", *joint(65, 2, dtype), 2, EPS, *options)
    assert_same(interpreted(*call), reference(*call), TIES)
    call = ("sage_prepare.separate", *separate(65, 2, dtype), *options)
    assert_same(interpreted(*call), reference(*call), SEPARATE_TIES)


def test_qkv_may_be_a_view_with_longer_rows(interpreted: Launched) -> None:
    qkv, *others = joint(40, 2)
    assert qkv is not None
    padded = torch.cat((qkv, torch.full_like(qkv[..., :64], torch.nan)), -1)
    options = (2, EPS, "fp8_e4m3", 64, True)
    expected = interpreted("sage_prepare.default", qkv, *others, *options)
    got = interpreted("sage_prepare.default", padded[..., : qkv.shape[-1]], *others, *options)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(("rows", "valid"), [(1, None), (17, 16), (129, None), (270, 200)])
def test_one_scale_a_tensor(rows: int, valid: int | None, interpreted: Launched, reference: Launched) -> None:
    qkv, *others = joint(rows, 3)
    assert qkv is not None
    inside = qkv[:, :valid].clone()
    qkv[:, valid or rows :] = torch.nan
    call = ("sage_prepare.default", qkv, *others, 3, EPS, "fp8_e4m3", 0, True, valid)
    q, q_scale, k, k_scale, _, v_scale = got = interpreted(*call)
    assert_same(got, reference(*call), TIES)
    assert q_scale.shape == k_scale.shape == (1, 1)
    assert float(q.float().abs().max()) == LARGEST["fp8_e4m3"]
    # One key is its own mean.
    assert float(k.float().abs().max()) == (0 if rows == 1 else LARGEST["fp8_e4m3"])
    # The largest scale of a row, or of a block, is that of the tensor; values have theirs as ever.
    tables = [others[0], others[1], *(table[:valid] for table in others[2:] if table is not None)]
    finer = reference("sage_prepare.default", inside, *tables, 3, EPS, "fp8_e4m3", 16, True)
    for scale, parts in ((q_scale, finer[1]), (k_scale, finer[3])):
        torch.testing.assert_close(scale.view(()), parts.amax(), rtol=1e-6, atol=0)
    torch.testing.assert_close(v_scale, finer[5], rtol=1e-6, atol=0)


def test_one_scale_a_tensor_of_operands_that_are_normed(interpreted: Launched, reference: Launched) -> None:
    for smooth in (True, False):
        call = ("sage_prepare.separate", *separate(140, 3), "fp8_e4m3", 0, smooth, 130)
        assert_same(interpreted(*call), reference(*call), SEPARATE_TIES)


@QK
@BLOCKS
def test_a_scale_uses_the_whole_range(qk: str, k_block: int, interpreted: Launched) -> None:
    operands = (*joint(128, 1), 1, EPS, qk, k_block, True)
    q, _, k, _, v, _ = interpreted("sage_prepare.default", *operands)
    assert bool((q.float().abs().amax(-1) == LARGEST[qk]).all())
    assert bool((k.float().abs().view(1, -1, k_block * D).amax(-1) == LARGEST[qk]).all())
    assert bool((v.float().abs().amax(-1) == LARGEST["fp8_e4m3"]).all())


def test_zeros_have_the_smallest_scale(interpreted: Launched) -> None:
    qkv, *others = joint(33, 1)
    assert qkv is not None
    outputs = interpreted("sage_prepare.default", torch.zeros_like(qkv), *others, 1, EPS, "int8", 64, True)
    for part in outputs:
        if part.dtype != torch.float32:
            assert not bool(part.float().any())
    for scale, largest in zip(outputs[1::2], (127.0, 127.0, 448.0), strict=True):
        torch.testing.assert_close(scale, torch.full_like(scale, 1e-3 / largest), rtol=1e-6, atol=0)


def test_what_is_not_legal(operator_named: Callable[[str], Operator]) -> None:
    (provider,) = operator_named("sage_prepare.default").providers
    qkv, *others = joint(8, 2)
    assert qkv is not None

    def reason(*operands: torch.Tensor | None, k_block: int = 64, heads: int = 2) -> str:
        found = provider.illegal("sm_90a", *operands, heads, EPS, "int8", k_block, True)
        assert found is not None
        return found

    assert reason(qkv.expand(2, -1, -1), *others) == "it takes one document, not a batch"
    assert reason(qkv, *others, k_block=32) == "no kernel for 32 keys a scale"
    assert reason(qkv, *others, k_block=0) == "one scale a tensor is for fp8_e4m3, not int8"
    assert reason(qkv, *others, heads=4) == "heads have 64 channels, and the kernel takes 128"
    assert reason(*joint(8, 2, turned=90)) == "the kernel turns a multiple of 4 channels, not 90"
    shifted = torch.empty(1, 8, 3 * 2 * D + 2, dtype=torch.bfloat16)[..., : 3 * 2 * D]
    assert reason(shifted, *others) == "rows of the projection must start on 16 bytes"
