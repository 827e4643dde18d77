"""The kernels of a block as a rank of sequence parallelism calls them, for benchmarks/rank_share.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from attention import BOUNDS
from attention_inputs import EPS, TURNED, D, Inputs, attended, make_inputs, stand_in
from attention_inputs import sampled as sampled_heads
from elementwise import LINEARS, dequantized, distance, exact_of, linear_cases, normal, row_cases, sampled

from h3compile.ops import OPERATORS
from h3compile.ops.launch import Run
from h3compile.ops.operator import Operand, Operator, Outputs, Provider
from h3compile.plan.cost import local_sizes, piece_seconds
from h3compile.plan.polynomial import Sizes
from h3compile.plan.work import Piece, released
from h3compile.targets import Target

HEADS = 56
LOOSE = 1.5  # how many times as far from float64 as the reference a kernel may be
# Hopper's tensor cores sum FP8 products in fewer bits than the reference: 1.7 to 2.5 times as far, by depth,
# and cuBLAS as far as ours (h200_elementwise.json).
LOOSE_FP8 = 3.0
OURS = ("triton", "gluon")


@dataclass(frozen=True)
class Ready:
    """A call with its operands: ``start`` launches it through a `Run`, ``error`` says how wrong a result is.

    ``bound`` is what the error may be.
    """

    start: Callable[[Run], Outputs]
    error: Callable[[Outputs], float]
    bound: float


@dataclass(frozen=True)
class Subject:
    """A kernel, or several in a row: ``places`` are theirs in the blocks that have them, by passes."""

    name: str
    unit: str
    places: Mapping[str, tuple[int, ...]]
    ready: Callable[[int, str, str], Ready]  # of ranks, device ("meta" for none) and architecture
    ours: bool = True  # launched by us, so that it is to be compiled
    dtype: str | None = None  # of an attention's keys, where not as counted

    def seconds(self, target: Target, rows: int, ranks: int) -> float:
        """What the cost model predicts."""
        return sum(piece_seconds(piece, target, _sizes(rows), shards=ranks) for piece in self._pieces())

    def work(self, rows: int, ranks: int) -> float:
        """FLOP, or the bytes of operands and results."""
        return sum(self._counted(piece, rows, ranks) for piece in self._pieces())

    def bytes(self, rows: int, ranks: int) -> float:
        """Of operands and results."""
        return sum(piece.bytes.at(local_sizes(_sizes(rows), ranks)) for piece in self._pieces())

    def _counted(self, piece: Piece, rows: int, ranks: int) -> float:
        if self.unit == "GB/s":
            return piece.bytes.at(local_sizes(_sizes(rows), ranks))
        if piece.kind == "attention":
            return piece.flop.at(_sizes(rows)) / ranks
        return piece.flop.at(local_sizes(_sizes(rows), ranks))

    def _pieces(self) -> Iterator[Piece]:
        passes, places = next(iter(self.places.items()))
        found = released(passes).regions["block"].pieces
        for place in places:
            piece = found[place]
            yield replace(piece, dtype=self.dtype) if self.dtype and piece.kind == "attention" else piece


def _sizes(rows: int) -> Sizes:
    return {"rows": rows, "video_rows": rows, "audio_rows": 0, "text_rows": 0, "timesteps": 2}


@functools.cache
def operator_of(name: str) -> Operator:
    return next(operator for operator in OPERATORS if operator.name == name)


def called(
    operator: Operator,
    provider: Provider,
    operands: tuple[Operand, ...],
    arch: str,
    rows: int,
    bound: float = LOOSE,
) -> Ready:
    """A call of ``operator``; its error at both ends of its rows is in units of the reference's own."""

    def error(outputs: Outputs) -> float:
        parts = outputs if isinstance(outputs, tuple) else (outputs,)
        part = [sampled(operand, rows) for operand in operands]
        exact = exact_of(operator, part)
        found = dequantized(tuple(sampled(one, rows) for one in parts))  # type: ignore[misc]
        return distance(found, exact) / distance(dequantized(operator.reference(*part)), exact)

    return Ready(lambda run: provider.launch(run, arch, *operands), error, bound)


def default_provider(operator: Operator, arch: str, operands: tuple[Operand, ...]) -> Provider:
    """The first that an engine would take here."""
    return next(one for one in operator.providers if one.refused(arch, operands, named=False) is None)


# --- what a block is made of ---


def row_subjects(rows: int) -> Iterator[Subject]:
    """The kernels that see a rank's own rows."""
    places = {
        "norm_modulate.default": {"fuse": (0,)},
        "gate_norm_modulate.default": {"fuse": (5,)},
        "swiglu.default": {"fuse": (7,)},
        "gate_residual.default": {"fuse": (9,), "fp8,sage": (10,)},
        "norm_modulate.fp8": {"fp8,sage": (0,)},
        "quantize_rows.default 7168": {"fp8,sage": (4,)},
        "gate_norm_modulate.fp8": {"fp8,sage": (6,)},
        "swiglu.fp8": {"fp8,sage": (8,)},
    }

    def ready(name: str, ranks: int, device: str, arch: str) -> Ready:
        own = rows // ranks
        case = next(case for case in row_cases(own) if case.operator + case.label == name)
        operator, operands = operator_of(case.operator), case.operands(device)
        return called(operator, default_provider(operator, arch, operands), operands, arch, own)

    for name, found in places.items():
        yield Subject(name, "GB/s", found, functools.partial(ready, name))


def rope_subject(rows: int) -> Subject:
    """The norms of queries and keys: all rows, the heads of a rank."""

    def ready(ranks: int, device: str, arch: str) -> Ready:
        heads = HEADS // ranks
        angles = normal(device, rows, TURNED // 2, dtype=torch.float32) * 10
        angles = torch.cat((angles, angles), -1)
        weights = [normal(device, D) * 0.1 + 1 for _ in range(2)]
        tables = angles.cos().bfloat16(), angles.sin().bfloat16()
        operands = (normal(device, 1, rows, 3 * heads * D), *weights, *tables, heads, EPS)
        operator = operator_of("qk_norm_rope.default")
        return called(operator, default_provider(operator, arch, operands), operands, arch, rows)

    return Subject("qk_norm_rope.default", "GB/s", {"fuse": (2,)}, ready)


def linear_subjects(rows: int) -> Iterator[Subject]:
    """The four linears on a rank's own rows: cuBLAS in BF16, and both providers in FP8."""

    def bf16(name: str, ranks: int, device: str, arch: str) -> Ready:
        own = rows // ranks
        n, k = LINEARS[name]
        x, weight = normal(device, 1, own, k), normal(device, n, k, scale=0.02)

        def error(outputs: Outputs) -> float:
            part, found = sampled(x, own), sampled(_alone(outputs), own)
            assert isinstance(part, torch.Tensor) and isinstance(found, torch.Tensor)
            return distance([found.double()], [torch.nn.functional.linear(part.double(), weight.double())])

        # What rounding a result to BF16 costs is 1.7e-3.
        return Ready(lambda run: torch.nn.functional.linear(x, weight), error, 3e-3)

    def fp8(name: str, by: str, ranks: int, device: str, arch: str) -> Ready:
        own = rows // ranks
        case = next(case for case in linear_cases(own) if case.label.split()[0] == name)
        operator = operator_of(case.operator)
        provider = next(one for one in operator.providers if one.name == by)
        return called(operator, provider, case.operands(device), arch, own, LOOSE_FP8)

    for number, name in enumerate(LINEARS):
        places = {"fuse": ((1, 4, 6, 8)[number],)}
        yield Subject(f"linear BF16 {name}", "TFLOP/s", places, functools.partial(bf16, name), ours=False)
        places = {"fp8,sage": ((1, 5, 7, 9)[number],)}
        for by in ("triton", "scaled_mm"):
            make = functools.partial(fp8, name, by)
            yield Subject(f"linear FP8 {name}, {by}", "TFLOP/s", places, make, ours=by in OURS)


def attention_subjects(rows: int) -> Iterator[Subject]:
    """Attention over all rows of a rank's heads, and what prepares its operands for SAGE."""
    queries = torch.randint(0, rows, (192,), generator=torch.Generator().manual_seed(0))

    @functools.cache
    def inputs(ranks: int, device: str) -> Inputs:
        heads = HEADS // ranks
        return stand_in(heads) if device == "meta" else make_inputs("gaussian", rows, rows, heads, 7)

    @functools.cache
    def truth(ranks: int) -> tuple[list[int], torch.Tensor]:
        heads = [0, HEADS // ranks - 1]
        return heads, attended(inputs(ranks, "cuda"), heads, queries.cuda())

    def error(ranks: int, outputs: Outputs) -> float:
        heads, exact = truth(ranks)
        return sampled_heads(exact, queries.cuda(), heads, _alone(outputs))

    def dense(ranks: int, device: str, arch: str) -> Ready:
        operands = inputs(ranks, device).normed
        provider = default_provider(operator_of("attention.default"), arch, operands)
        bound = BOUNDS["attention"]
        return Ready(
            lambda run: provider.launch(run, arch, *operands), functools.partial(error, ranks), bound
        )

    def sage(qk: str, ranks: int, device: str, arch: str) -> Ready:
        x = inputs(ranks, device)
        made = x.prepared(lambda _: None, arch, qk, 128)
        operator = operator_of("sage_attention.default")
        provider = default_provider(operator, arch, (*made, 128, torch.bfloat16))

        def start(run: Run) -> Outputs:
            return provider.launch(run, arch, *x.prepared(run, arch, qk, 128), 128, torch.bfloat16, x.valid)

        return Ready(start, functools.partial(error, ranks), BOUNDS["sage_attention"])

    def prepare(qk: str, ranks: int, device: str, arch: str) -> Ready:
        x = inputs(ranks, device)
        # Right where what is computed from it is.
        return Ready(lambda run: x.prepared(run, arch, qk, 128), lambda _: 0.0, 0.0)

    yield Subject("attention dense", "TFLOP/s", {"fuse": (3,)}, dense)
    for qk, dtype in (("int8", "int8"), ("fp8_e4m3", "float8_e4m3fn")):
        make = functools.partial(sage, qk)
        yield Subject(f"prepare + SAGE {qk}", "TFLOP/s", {"fp8,sage": (2, 3)}, make, dtype=dtype)
    for qk in ("int8", "fp8_e4m3"):
        yield Subject(f"sage_prepare {qk}", "GB/s", {"fp8,sage": (2,)}, functools.partial(prepare, qk))


def _alone(outputs: Outputs) -> torch.Tensor:
    assert isinstance(outputs, torch.Tensor)
    return outputs


def subjects(rows: int) -> list[Subject]:
    return [*linear_subjects(rows), *attention_subjects(rows), rope_subject(rows), *row_subjects(rows)]
