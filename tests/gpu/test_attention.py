"""Every provider of attention on a CUDA device: lengths, padding, skipping, and errors against float64."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context

import pytest
import torch

from h3compile.engine.machine import kernel_arch
from h3compile.ops import OPERATORS, Operator
from h3compile.ops.cubin import Kernels
from h3compile.ops.launch import Binary, Launch, Run
from h3compile.ops.numerics import FP8
from h3compile.ops.online_softmax import K_TILE, Q_TILE
from h3compile.ops.operator import Operand, Outputs
from h3compile.ops.sage_scales import K_BLOCKS, WHOLE

pytestmark = pytest.mark.gpu

D = 128
SHORT = (1, 15, 16, 17, 63, 127, 128, 129, 191, 255)
LONG = (37_700, 58_758)
LONGEST = 198_000
# Heads of the release, of one of eight GPUs, and few enough to be quick.
ALL, SHARE, FEW = 56, 7, 2
QK_TYPES = ("fp8_e4m3", "int8")
KINDS = [(qk, block) for qk in QK_TYPES for block in K_BLOCKS] + [("fp8_e4m3", WHOLE)]
TESTED = {operator.name: operator for operator in OPERATORS if "attention" in operator.name}
SAGE = [provider.name for provider in TESTED["sage_attention.default"].providers]
DENSE = [provider.name for provider in TESTED["attention.default"].providers]
# Relative to float64: 16-bit attention; SAGE on normal inputs and on ones with outlying key channels.
DENSE_BOUND = 0.006
BOUNDS = {("fp8_e4m3", "normal"): 0.065, ("int8", "normal"): 0.05} | {
    ("fp8_e4m3", "outlying"): 0.11,
    ("int8", "outlying"): 0.08,
}
# A probability near a tie may round to the other side, by an eighth of one key's weight. Hopper's tensor
# cores sum E4M3 products with fewer bits than FP32, which moves more of them, and the sums of values too.
TIES, FP8_TIES, ROW_TIES = 3e-3, 2e-2, 0.2
# Other libraries round probabilities of their own, and cuDNN its result to E4M3 on some architectures.
OTHERS = 6e-2
# Thresholds of Skip-Softmax: some tiles of `fading` keys, and all but the first.
SOME, EVERYTHING = 80.0, 1e30
ROWS_SKIPPING = 4001

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Quantized = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Call:
    """What decides which kernel a provider launches."""

    operator: str
    heads: int
    qk: str = ""
    k_block: int = K_TILE
    threshold: float | None = None

    def operands(self, made: tuple[torch.Tensor, ...], valid: int) -> tuple[Operand, ...]:
        options: tuple[Operand, ...] = (self.k_block, torch.bfloat16) if self.qk else ()
        skip = () if self.threshold is None else (self.threshold,)
        return (*made, *options, *skip, valid)


def calls() -> Iterator[Call]:
    """Every kind of call below."""
    for heads in (ALL, SHARE, FEW):
        yield Call("attention.default", heads)
        for qk, k_block in KINDS:
            if heads == ALL or k_block in (K_TILE, WHOLE):
                yield Call("sage_attention.default", heads, qk, k_block)
    for threshold in (0.0, SOME, EVERYTHING):
        yield Call("attention.skip", FEW, threshold=threshold)
        for qk in QK_TYPES:
            yield Call("sage_attention.skip", FEW, qk, K_TILE, threshold)


def architecture() -> str:
    return kernel_arch(torch.device("cuda", 0))


def normal(rows: int, heads: int, kind: str = "normal", device: str = "cuda") -> Parts:
    """Queries and keys of unit variance, of which some channels are larger and have a mean when outlying."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(rows)
    parts = [
        torch.randn(1, rows, heads, D, generator=generator, device=device, dtype=torch.bfloat16)
        for _ in range(3)
    ]
    if kind == "outlying":
        parts[1][..., 98:102] *= 6
        parts[1] += 4 * torch.randn(heads, D, generator=generator, device=device).bfloat16()
    return parts[0], parts[1], parts[2]


def fading(rows: int, heads: int) -> Parts:
    """Tiles of keys that matter more and less, each head in another order: what goes depends on lambda."""
    query, key, value = normal(rows, heads)
    tile = torch.arange(rows, device="cuda")[:, None] // K_TILE + torch.arange(heads, device="cuda")
    levels = torch.tensor([3.0, 0.1, 0.8, 0.4], device="cuda", dtype=key.dtype)
    return query, key * levels[tile % len(levels), None], value


def quantized(parts: Parts, qk: str, k_block: int, valid: int, smooth: bool = True) -> Quantized:
    """The operands of SAGE by the reference, and poison where nothing may be read."""
    made = torch.ops.h3compile.sage_prepare.separate(*parts, qk, k_block, smooth, valid)
    q, q_scale, k, k_scale, v, v_scale = made
    for values in (q, k):
        values[:, valid:] = torch.nan if values.dtype == FP8 else 127
    if k_block != WHOLE:
        q_scale[:, valid:] = torch.nan
        k_scale[:, -(-valid // k_block) :] = torch.nan
    return q, q_scale, k, k_scale, v, v_scale


def exact(parts: Parts, queries: torch.Tensor, keys: int) -> torch.Tensor:
    """Float64 attention of some queries over the first ``keys`` keys, [queries, heads, D]."""
    out = []
    for head in range(parts[0].shape[2]):
        q, k, v = (part[0, :, head].double() for part in parts)
        out.append(torch.softmax(q[queries] @ k[:keys].T * D**-0.5, -1) @ v[:keys])
    return torch.stack(out, 1)


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def assert_equal_but_for_ties(got: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    distance = apart(got, expected)
    print(f"kernel and reference: {distance:.2e} apart")
    assert distance < bound
    difference, size = (x.double().norm(dim=-1) for x in (got.double() - expected.double(), expected))
    assert bool((difference <= ROW_TIES * size).all())


def tiles(heads: int, valid: int, keys: int) -> int:
    return heads * -(-valid // Q_TILE) * -(-valid // keys)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Executes launches with kernels that were compiled together, in as many processes as there are cores."""
    from h3compile.ops.kernels.compile import compile_spec

    arch = architecture()
    launches: list[Launch] = []
    for call in calls():
        made: tuple[torch.Tensor, ...] = normal(K_TILE, call.heads, device="meta")
        if call.qk:
            made = torch.ops.h3compile.sage_prepare.separate(*made, call.qk, call.k_block, True, None)
        operands = call.operands(made, K_TILE)
        for provider in TESTED[call.operator].providers:
            # The others are functions of torch.
            own = provider.name in ("gluon", "triton") or provider.package is not None
            if own and provider.refused(arch, operands, named=True) is None:
                provider.launch(launches.append, arch, *operands)
    specs = list(dict.fromkeys(launch.spec for launch in launches))
    folder = tmp_path_factory.mktemp("cubins")
    binaries: dict[str, Binary] = {}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for spec, cubin in zip(specs, pool.map(partial(compile_spec, arch=arch), specs), strict=True):
            fields = asdict(cubin)
            file = folder / spec.key
            file.write_bytes(fields.pop("code"))
            binaries[spec.key] = Binary(file=file, **fields)
    return Kernels(binaries, torch.device("cuda", torch.cuda.current_device()))


def by(run: Run, name: str, call: Call, made: tuple[torch.Tensor, ...], valid: int) -> Outputs:
    """The outputs of ``call`` by the provider ``name``, or a skipped test where it is not legal."""
    operator: Operator = TESTED[call.operator]
    provider = next(one for one in operator.providers if one.name == name)
    operands = call.operands(made, valid)
    reason = provider.refused(architecture(), operands, named=True)
    if reason is not None:
        pytest.skip(reason)
    return provider.launch(run, architecture(), *operands)


def ties(name: str, own: float) -> float:
    """How far SAGE by ``name`` may be from the reference, where ours may be ``own``."""
    return own if name in ("gluon", "triton") else OTHERS


def attended(run: Run, name: str, call: Call, made: tuple[torch.Tensor, ...], valid: int) -> torch.Tensor:
    """The result of a call that skips nothing."""
    out = by(run, name, call, made, valid)
    assert isinstance(out, torch.Tensor)
    return out


def reference(call: Call, made: tuple[torch.Tensor, ...], valid: int) -> Outputs:
    return TESTED[call.operator].reference(*call.operands(made, valid))


@pytest.mark.parametrize(("qk", "k_block"), KINDS)
@pytest.mark.parametrize("name", SAGE)
def test_sage_equals_the_reference_at_odd_lengths(name: str, qk: str, k_block: int, run: Run) -> None:
    call = Call("sage_attention.default", ALL, qk, k_block)
    for valid in SHORT:
        made = quantized(normal(valid + 130, ALL), qk, k_block, valid)
        out = attended(run, name, call, made, valid)
        expected = reference(call, made, valid)
        assert isinstance(expected, torch.Tensor)
        assert out.shape == (1, valid + 130, ALL, D)
        assert bool((out[:, valid:] == 0).all())
        # With integers the scores of one tile of keys are exact.
        exact_scores = qk == "int8" and valid <= K_TILE
        bound = ties(name, TIES if exact_scores else FP8_TIES)
        assert_equal_but_for_ties(out[:, :valid], expected[:, :valid], bound)


@pytest.mark.parametrize(("qk", "k_block"), [kind for kind in KINDS if kind[1] in (K_TILE, WHOLE)])
@pytest.mark.parametrize("name", SAGE)
def test_sage_equals_the_reference_over_many_tiles(name: str, qk: str, k_block: int, run: Run) -> None:
    call, rows = Call("sage_attention.default", SHARE, qk, k_block), 2_500
    made = quantized(normal(rows, SHARE, "outlying"), qk, k_block, rows)
    expected = reference(call, made, rows)
    assert isinstance(expected, torch.Tensor)
    assert_equal_but_for_ties(attended(run, name, call, made, rows), expected, ties(name, FP8_TIES))


@pytest.mark.parametrize("name", DENSE)
def test_dense_at_odd_lengths(name: str, run: Run) -> None:
    call = Call("attention.default", ALL)
    for valid in SHORT:
        parts = normal(valid + 130, ALL)
        for part in parts:
            part[:, valid::2] = torch.nan
            part[:, valid + 1 :: 2] = torch.inf
        out = attended(run, name, call, parts, valid)
        assert bool((out[:, valid:] == 0).all())
        assert apart(out[0, :valid], exact(parts, torch.arange(valid, device="cuda"), valid)) < DENSE_BOUND


@pytest.mark.parametrize(("valid", "heads"), [*((rows, SHARE) for rows in LONG), (LONGEST, FEW)])
def test_long_documents(valid: int, heads: int, run: Run) -> None:
    parts = normal(valid + 60, heads)
    queries = torch.cat([torch.arange(3), torch.randint(valid, (90,)), torch.arange(valid - 3, valid)]).cuda()
    truth = exact(parts, queries, valid)
    for qk, k_block in (("fp8_e4m3", K_TILE), ("int8", K_TILE), ("fp8_e4m3", WHOLE)):
        call, results = Call("sage_attention.default", heads, qk, k_block), {}
        made = quantized(parts, qk, k_block, valid)
        for provider in TESTED[call.operator].providers:
            if provider.refused(architecture(), call.operands(made, valid), named=True) is None:
                out = attended(run, provider.name, call, made, valid)
                assert bool((out[:, valid:] == 0).all())
                assert bool(out.isfinite().all())
                error = apart(out[0, queries], truth)
                print(f"{valid} rows, {qk}, {k_block}, {provider.name}: {error:.4f} from float64")
                assert error < BOUNDS[qk, "normal"]
                results[provider.name] = out
        for name, out in results.items():
            assert apart(out, results["triton"]) < ties(name, FP8_TIES)


@pytest.mark.parametrize("name", DENSE)
def test_dense_long_document(name: str, run: Run) -> None:
    valid = LONG[0]
    parts = normal(valid + 60, SHARE)
    for part in parts:
        part[:, valid:] = torch.nan
    queries = torch.randint(valid, (90,), device="cuda")
    out = attended(run, name, Call("attention.default", SHARE), parts, valid)
    assert bool((out[:, valid:] == 0).all())
    assert apart(out[0, queries], exact(parts, queries, valid)) < DENSE_BOUND


@pytest.mark.parametrize("qk", QK_TYPES)
@pytest.mark.parametrize("name", SAGE)
def test_errors_with_and_without_the_mean_of_keys(name: str, qk: str, run: Run) -> None:
    call, rows = Call("sage_attention.default", SHARE, qk), 6_000
    queries = torch.randint(rows, (200,), device="cuda")
    errors: dict[tuple[str, bool], float] = {}
    for kind in ("normal", "outlying"):
        parts = normal(rows, SHARE, kind)
        truth = exact(parts, queries, rows)
        for smooth in (True, False):
            made = quantized(parts, qk, K_TILE, rows, smooth)
            errors[kind, smooth] = apart(attended(run, name, call, made, rows)[0, queries], truth)
        assert errors[kind, True] < BOUNDS[qk, kind]
    assert errors["outlying", True] < 0.95 * errors["outlying", False]
    assert abs(errors["normal", True] - errors["normal", False]) < 0.1 * errors["normal", True]


SKIPPING = [("attention.skip", "triton", "")] + [
    ("sage_attention.skip", name, qk) for name in ("gluon", "triton") for qk in QK_TYPES
]


@pytest.mark.parametrize(("operator", "name", "qk"), SKIPPING)
def test_skipping(operator: str, name: str, qk: str, run: Run) -> None:
    rows = ROWS_SKIPPING
    parts = fading(rows + 70, FEW)
    made: tuple[torch.Tensor, ...] = quantized(parts, qk, K_TILE, rows) if qk else parts
    keys = K_TILE if qk else 64
    considered = tiles(FEW, rows, keys)
    dense = attended(run, name, Call(operator.replace("skip", "default"), FEW, qk), made, rows)
    for threshold in (0.0, SOME, EVERYTHING):
        call = Call(operator, FEW, qk, threshold=threshold)
        out, counts = by(run, name, call, made, rows)
        expected, expected_counts = reference(call, made, rows)
        assert bool(out.isfinite().all())
        assert bool((out[:, rows:] == 0).all())
        assert int(counts[1]) == considered == int(expected_counts[1])
        # A sum of E4M3 products may fall on the other side of the threshold.
        slack = considered // 100 if qk == "fp8_e4m3" else 0
        assert abs(int(counts[0]) - int(expected_counts[0])) <= slack
        if qk:
            assert_equal_but_for_ties(out, expected, FP8_TIES)
        else:
            assert apart(out, expected) < DENSE_BOUND
        if threshold == 0:
            assert torch.equal(out, dense)
            assert int(counts[0]) == 0
        elif threshold == SOME:
            assert 0.1 < int(counts[0]) / considered < 0.8
            assert apart(out, dense) > TIES
        else:
            assert int(counts[0]) == considered - FEW * -(-rows // Q_TILE)
