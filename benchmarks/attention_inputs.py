"""Inputs of the attention benchmark, what is measured on them, and float64 attention to compare with."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from h3compile.ops import OPERATORS
from h3compile.ops.launch import Run
from h3compile.ops.operator import Operand, Provider
from h3compile.ops.sage_scales import WHOLE

D, EPS, TURNED = 128, 1e-5, 96
QK_TYPES, BLOCKS = ("fp8_e4m3", "int8"), (128, 64, 16)
# The last: one scale a tensor, which is what other libraries' FP8 attention takes.
KINDS = (*itertools.product(QK_TYPES, BLOCKS), ("fp8_e4m3", WHOLE))
SHARES = (0.1, 0.5, 0.8)  # lambda of Skip-Softmax


@dataclass(frozen=True)
class Case:
    """An operator by one of its providers, with the options that its quantized operands have."""

    operator: str
    provider: str
    qk: str = ""
    block: int = 128
    share: float | None = None

    @property
    def name(self) -> str:
        words = [self.operator.removesuffix(".default"), self.provider, self.qk]
        words += [str(self.block) if self.block else "whole"] if self.qk else []
        words += [f"lambda {self.share}"] if self.share is not None else []
        return " ".join(word for word in words if word)


@functools.cache
def provider(operator: str, name: str) -> Provider:
    known = next(one for one in OPERATORS if one.name == operator)
    return next(one for one in known.providers if one.name == name)


def cases() -> Iterator[Case]:
    """What is measured, wherever it is legal."""
    for operator in OPERATORS:
        for name in (one.name for one in operator.providers):
            if operator.name == "attention.default" and name != "sdpa":
                yield Case(operator.name, name)
            elif operator.name == "sage_attention.default":
                for qk, block in KINDS:
                    yield Case(operator.name, name, qk, block)
            elif operator.name == "attention.skip":
                yield Case(operator.name, name, share=SHARES[-1])
            elif operator.name == "sage_attention.skip":
                for share in SHARES:
                    yield Case(operator.name, name, QK_TYPES[0], 128, share)


@dataclass
class Inputs:
    """A joint projection and what norms and turns it; rows from ``valid`` on are NaN."""

    qkv: torch.Tensor  # [1, rows, 3 * heads * D]
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    valid: int
    heads: int
    quantized: dict[tuple[str, int], tuple[torch.Tensor, ...]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.qkv.shape[1]

    def part(self, index: int) -> torch.Tensor:
        return self.qkv.view(1, self.rows, 3, self.heads, D)[:, :, index]

    def prepared(self, run: Run, arch: str, qk: str, block: int) -> tuple[torch.Tensor, ...]:
        """The operands of SAGE."""
        options = (self.heads, EPS, qk, block, True, self.valid)
        weights = (self.q_weight, self.k_weight, self.cos, self.sin)
        made = provider("sage_prepare.default", "triton").launch(run, arch, self.qkv, *weights, *options)
        assert isinstance(made, tuple)
        return made

    @functools.cached_property
    def normed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normed and turned q, k in BF16, and v as it lies in the projection; [1, rows, heads, D]."""
        shape = (1, self.rows, self.heads, D)
        q, k = (self.qkv.new_full(shape, float("nan")) for _ in range(2))
        # There is nothing to compute without data.
        for head in range(0 if self.qkv.is_meta else self.heads):
            for part, target in enumerate((q, k)):
                target[0, : self.valid, head] = exact(self, part, head).bfloat16()
        return q, k, self.part(2)

    def operands(self, run: Run, arch: str, case: Case, rows: int) -> tuple[Operand, ...]:
        """The operands of ``case``, whose threshold is for a document of ``rows`` rows."""
        made: tuple[Operand, ...] = self.normed
        if case.qk:
            key = case.qk, case.block
            if key not in self.quantized:
                self.quantized[key] = self.prepared(run, arch, *key)
            made = (*self.quantized[key], case.block, torch.bfloat16)
        threshold = () if case.share is None else (case.share * rows,)
        return (*made, *threshold, self.valid)


def make_inputs(kind: str, rows: int, valid: int, heads: int, seed: int) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    qkv = torch.empty(1, rows, 3 * heads * D, dtype=torch.bfloat16, device="cuda")
    for start in range(0, rows, 4096):
        qkv[:, start : start + 4096] = normal(min(4096, rows - start), 3 * heads * D)
    weights = [1 + 0.1 * normal(D) for _ in range(2)]
    if kind == "outlier":
        # Four channels of K ten times as large, and a mean as large as the rest of K.
        k = qkv.view(rows, 3, heads, D)[:, 1]
        k += normal(heads, D).bfloat16()
        k[:, :, 98:102] *= 10
        weights[1][98:102] *= 2
    angles = 6.28 * torch.rand(rows, TURNED, generator=generator, device="cuda")
    qkv[:, valid:] = float("nan")
    q_weight, k_weight, cos, sin = (t.bfloat16() for t in (*weights, angles.cos(), angles.sin()))
    return Inputs(qkv, q_weight, k_weight, cos, sin, valid, heads)


def stand_in(heads: int) -> Inputs:
    """Inputs without data: what is launched on them is what is launched on others with as many heads."""
    bf16 = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")
    return Inputs(
        bf16(1, 128, 3 * heads * D), bf16(D), bf16(D), bf16(128, TURNED), bf16(128, TURNED), 128, heads
    )


def exact(inputs: Inputs, part: int, head: int) -> torch.Tensor:
    """Queries, keys or values of a head in float64, normed and turned."""
    x = inputs.part(part)[0, : inputs.valid, head].double()
    if part == 2:
        return x
    weight = (inputs.q_weight, inputs.k_weight)[part].double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    half = TURNED // 2
    turned = torch.cat([-x[:, half:TURNED], x[:, :half]], -1)
    cos, sin = inputs.cos[: inputs.valid].double(), inputs.sin[: inputs.valid].double()
    return torch.cat([x[:, :TURNED] * cos + turned * sin, x[:, TURNED:]], -1)


def attended(inputs: Inputs, heads: Iterable[int], queries: torch.Tensor) -> torch.Tensor:
    """Float64 attention of some heads and query rows, [queries, heads, D]."""
    out = []
    for head in heads:
        q, k, v = (exact(inputs, part, head) for part in range(3))
        out.append(torch.softmax(q[queries] @ k.T * D**-0.5, -1) @ v)
    return torch.stack(out, 1)


def sampled(truth: torch.Tensor, queries: torch.Tensor, heads: list[int], out: torch.Tensor) -> float:
    """The error of ``out`` [1, rows, heads, D] where the truth is known."""
    return relative(out[0, queries][:, heads], truth)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


# Other packages: from q, k, v [1, rows, heads, D] a function that computes attention of that shape, and the
