"""What an operator of ours is, and how torch learns of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["Cost", "Operand", "Operator", "Outputs", "Provider", "define"]

Operand = torch.Tensor | int | float | bool | str | torch.dtype | None
Outputs = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Cost:
    """What a call costs: floating-point operations by operand type, and bytes that must be moved."""

    flop: Mapping[str, int]  # "bfloat16", "float8_e4m3fn", "int8", "float32" -> operations
    bytes: int


@dataclass(frozen=True)
class Provider:
    """One implementation of an operator on a GPU.

    ``illegal(arch, *operands)`` says why it cannot serve a call on an architecture such as ``sm_90a``, or
    returns ``None``; it looks at dtypes, static sizes and installed packages only. ``launch(run, arch,
    *operands)`` computes the outputs.
    """

    name: str
    illegal: Callable[..., str | None]
    launch: Callable[..., Outputs]


def _only(*_: Operand) -> str:
    return ""


@dataclass(frozen=True)
class Operator:
    """One overload of an operator.

    ``reference`` is the implementation on every device until a backend puts a provider in its place; it
    does the arithmetic of the kernels, quantization included, in float32, or float64 where operands are.
    """

    name: str  # "norm_modulate.fp8"; "swiglu.default"
    target: torch._ops.OpOverload
    reference: Callable[..., Outputs]
    cost: Callable[..., Cost]
    providers: tuple[Provider, ...] = field(default=())
    # A name for the static shape of a call, where shapes of one region may want different providers.
    variant: Callable[..., str] = _only
    # The schema's arguments and their defaults, in order.
    arguments: tuple[tuple[str, Operand], ...] = ()

    def operands(self, given: Sequence[Operand], named: Mapping[str, Operand]) -> tuple[Operand, ...]:
        """All operands of a call in the order of the schema: what is left out has its default."""
        rest = self.arguments[len(given) :]
        return (*given, *(named.get(name, default) for name, default in rest))


def define(
    name: str,
    schema: str,
    *,
    reference: Callable[..., Outputs],
    fake: Callable[..., Outputs],
    cost: Callable[..., Cost],
    providers: tuple[Provider, ...] = (),
    variant: Callable[..., str] = _only,
) -> Operator:
    """Register ``h3compile::name`` (with an overload after a dot, or none) with torch and describe it."""
    qualified = f"h3compile::{name}"
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "default", reference)
    torch.library.register_fake(qualified, fake)
    base, _, overload = name.partition(".")
    target = getattr(getattr(torch.ops.h3compile, base), overload or "default")
    arguments = tuple((argument.name, argument.default_value) for argument in target._schema.arguments)
    name = f"{base}.{overload or 'default'}"
    return Operator(name, target, reference, cost, providers, variant, arguments)
