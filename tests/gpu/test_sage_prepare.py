"""The operands of SAGE at the sizes of the release, against the reference on the same GPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from h3compile.engine.machine import kernel_arch
from h3compile.ops.launch import Binary, Launch, Run
from h3compile.ops.operator import Outputs
from h3compile.ops.sage_prepare import SAGE_PREPARE, SAGE_QUANTIZE
from h3compile.ops.sage_quantized import QK_TYPES
from h3compile.ops.sage_scales import K_BLOCKS, WHOLE

pytestmark = pytest.mark.gpu

D, TURNED, EPS = 128, 96, 1e-5
# Products and sums in another order put a value on the other side of a rounding tie. The values of 16-bit
# operands that are not normed, as V is, lie on ties more often.
TIES = 4e-3
# Rows and heads: a 124-frame clip on one GPU, a longer one on one of eight.
SIZES = pytest.mark.parametrize(("rows", "heads"), [(37_700, 56), (58_758, 7)])
QK = pytest.mark.parametrize("qk", QK_TYPES)
KINDS = pytest.mark.parametrize(
    ("qk", "k_block"), [(qk, block) for qk in QK_TYPES for block in K_BLOCKS] + [("fp8_e4m3", WHOLE)]
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Executes launches, compiling what they ask for."""
    from h3compile.ops.cubin import Kernels
    from h3compile.ops.kernels.compile import compile_spec

    arch = kernel_arch(torch.device("cuda", 0))
    folder: Path = tmp_path_factory.mktemp("cubins")
    binaries: dict[str, Binary] = {}

    def execute(launch: Launch) -> None:
        key = launch.spec.key
        if key not in binaries:
            fields = asdict(compile_spec(launch.spec, arch))
            file = folder / key
            file.write_bytes(fields.pop("code"))
            binaries[key] = Binary(file=file, **fields)
        Kernels(binaries, torch.device("cuda", torch.cuda.current_device()))(launch)

    return execute


def projection(rows: int, heads: int) -> torch.Tensor:
    """qkv [1, rows, 3 * heads * D] whose heads differ in size and have a mean and a larger channel."""
    generator = torch.Generator("cuda").manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    mean, gain = normal(3 * heads * D), 1 + normal(3 * heads * D).abs()
    gain[98::D] *= 10
    qkv = torch.empty(1, rows, 3 * heads * D, dtype=torch.bfloat16, device="cuda")
    for start in range(0, rows, 4096):
        part = qkv[0, start : start + 4096]
        part.copy_((normal(*part.shape) + mean) * gain)
    return qkv


def steps(values: torch.Tensor) -> torch.Tensor:
    """Eight-bit values as integers in their order, one apart where they are neighbours; -0 is 0."""
    if values.dtype == torch.int8:
        return values.int()
    bits = values.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


def assert_same(got: Outputs, expected: Outputs) -> None:
    assert isinstance(got, tuple)
    assert isinstance(expected, tuple)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        if one.dtype == torch.float32:
            # The kernels' square roots and divisions are good to a unit or two in the last place.
            torch.testing.assert_close(one, other, rtol=1e-5, atol=0)
            continue
        for mine, theirs in zip(one, other, strict=True):  # a head at a time: differences are wide
            apart = (steps(mine) - steps(theirs)).abs()
            assert int(apart.max()) <= 1
            assert float((apart > 0).float().mean()) < TIES


@SIZES
@KINDS
def test_from_the_projection(rows: int, heads: int, qk: str, k_block: int, run: Run) -> None:
    qkv = projection(rows, heads)
    valid = rows - 37
    qkv[:, valid:] = torch.nan
    angles = torch.linspace(0, 4000, rows * TURNED, device="cuda").view(rows, TURNED)
    weights = [torch.linspace(0.5, 1.5, D, device="cuda").bfloat16() for _ in range(2)]
    operands = (qkv, *weights, angles.cos().bfloat16(), angles.sin().bfloat16(), heads, EPS)
    options = (qk, k_block, True, valid)
    (provider,) = SAGE_PREPARE.providers
    got = provider.launch(run, "", *operands, *options)
    assert_same(got, SAGE_PREPARE.reference(*operands, *options))


@SIZES
@QK
def test_from_operands_that_are_normed_already(rows: int, heads: int, qk: str, run: Run) -> None:
    parts = projection(rows, heads).view(1, rows, 3, heads, D).unbind(2)
    options = (qk, 128, True, None)
    (provider,) = SAGE_QUANTIZE.providers
    got = provider.launch(run, "", *parts, *options)
    assert_same(got, SAGE_QUANTIZE.reference(*parts, *options))


def test_the_same_bits_every_time(run: Run) -> None:
    qkv = projection(5000, 7)
    parts = qkv.view(1, 5000, 3, 7, D).unbind(2)
    (provider,) = SAGE_QUANTIZE.providers
    first, second = (provider.launch(run, "", *parts, "fp8_e4m3", 64, True, None) for _ in range(2))
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
