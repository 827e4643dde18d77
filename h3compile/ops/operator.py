"""What an operator of ours is, and how torch learns of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from h3compile.ops.package import Package

__all__ = ["Cost", "Operand", "Operator", "Outputs", "Provider", "define"]

Operand = torch.Tensor | int | float | bool | str | torch.dtype | None
Outputs = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Cost:
    """What a call costs: floating-point operations by operand type, bytes that must be moved, bytes sent."""

    flop: Mapping[str, int]  # "bfloat16", "float8_e4m3fn", "int8", "float32" -> operations
    bytes: int
    sent: int = 0  # to other ranks, by each of them


def _only(*_: Operand) -> str:
    return ""


def _never(arch: str, *_: Operand) -> str | None:
    return None


@dataclass(frozen=True)
class Provider:
    """One implementation of an operator on a GPU.

    ``illegal(arch, *operands)`` says why it cannot serve a call on an architecture such as ``sm_90a``, or
    returns ``None``; it looks at dtypes and static sizes only. ``launch(run, arch, *operands)`` computes the
    outputs, by a ``package`` of others where one is named. ``reserved(arch, *operands)`` says why the user
    must ask for it by name: it compiles where an engine runs, or rounds more than the reference does.
    """

    name: str
    illegal: Callable[..., str | None]
    launch: Callable[..., Outputs]
    package: Package | None = None
    reserved: Callable[..., str | None] = _never
    # Whether a library computes it, and allocates what it returns.
    library: bool = False

    def refused(self, arch: str, operands: Sequence[Operand], *, named: bool) -> str | None:
        """Why it does not serve a call here, where the user ``named`` it or did not; or None."""
        reason = self.illegal(arch, *operands)
        if reason is None and self.package is not None:
            reason = self.package.unusable()
        if reason is None and not named:
            reason = self.reserved(arch, *operands)
        return reason


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
