"""Our operators in a region: who computes each, and the kernels that takes.

A provider's launch code is run on the fake values of the region's graph: what it would launch is what
has to be compiled. Among several legal providers the fastest is taken, by measurement on the device.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from h3compile.engine.artifact import OperatorInfo, VariantInfo
from h3compile.errors import BuildError, H3CompileError
from h3compile.ops import OPERATORS
from h3compile.ops.cubin import Kernels
from h3compile.ops.exchange_groups import standing_in
from h3compile.ops.launch import Binary, Launch, Run, Spec
from h3compile.ops.operator import Operand, Operator, Provider

__all__ = ["Bound", "Times", "bind_operators", "check_named", "specs_of"]

_ROUNDS = 5


@dataclass(frozen=True)
class Bound:
    """Who computes which operator of a region, and the compiled variants they launch, by key."""

    operators: tuple[OperatorInfo, ...]
    variants: Mapping[str, VariantInfo]


@dataclass(frozen=True)
class _Use:
    """One static shape of an operator in a region, with the operands of every place where it stands."""

    operator: Operator
    variant: str
    places: tuple[tuple[Operand, ...], ...]

    @property
    def base(self) -> str:
        """What a user calls the operator: ``attention`` for all its overloads."""
        return self.operator.name.partition(".")[0]

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The operands of the first place, which are measured."""
        return self.places[0]

    def specs(self, provider: Provider, arch: str) -> list[Spec]:
        """The variants that ``provider`` launches in any of the places."""
        with _fake_mode(self.operands):
            found = [specs_of(self.operator, provider, arch, operands) for operands in self.places]
        return list(dict.fromkeys(spec for specs in found for spec in specs))

    def illegal(self, provider: Provider, arch: str) -> str | None:
        """Why ``provider`` cannot serve one of the places on any machine with ``arch``, or None."""
        with _fake_mode(self.operands):
            reasons = [provider.illegal(arch, *operands) for operands in self.places]
        return next((reason for reason in reasons if reason is not None), None)

    def refused(self, provider: Provider, arch: str, *, named: bool) -> str | None:
        """Why ``provider`` does not serve one of the places, or None."""
        with _fake_mode(self.operands):
            reasons = [provider.refused(arch, operands, named=named) for operands in self.places]
        return next((reason for reason in reasons if reason is not None), None)


def specs_of(operator: Operator, provider: Provider, arch: str, operands: Sequence[Operand]) -> list[Spec]:
    """The variants that ``provider`` launches for ``operands``, which may be fake."""
    found: dict[Spec, None] = {}

    def note(launch: Launch) -> None:
        names = {name for name, _ in launch.spec.types}
        if len(launch.arguments) != len(names):
            raise BuildError(
                f"{operator.name} passes {len(launch.arguments)} arguments to {launch.spec.kernel}"
            )
        for name, value in launch.spec.constants:
            if isinstance(value, torch.SymInt):
                raise BuildError(f"{name} of {launch.spec.kernel} depends on a row count")
        found[launch.spec] = None

    provider.launch(note, arch, *operands)
    return list(found)


# Shapes and strides of the tensors among the operands, at the lengths that are measured.
_Sizes = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
# (operator, static shape, sizes, providers) -> milliseconds by provider. The sizes matter: who is the
# fastest for the few rows of a text need not be for those of a video.
Times = dict[tuple[str, str, _Sizes, tuple[str, ...]], dict[str, float | None]]


def bind_operators(
    module: fx.GraphModule,
    *,
    arch: str,
    named: Mapping[str, str],
    times: Times,
    device: torch.device,
    output: Path,
) -> Bound:
    """Choose a provider for every operator of ours in ``module`` and compile its kernels into ``output``.

    The nodes carry fake values in ``meta["val"]``. ``named`` maps an operator (``attention``) to the
    provider it must have; ``times`` holds what was measured for other regions, and is added to. Raises
    `BuildError` when a named provider is not legal, and when none is.
    """
    variants: dict[str, VariantInfo] = {}
    kept: dict[str, None] = {}
    infos = []
    for use in _uses(module):
        candidates = {provider.name: provider for provider in _legal(use, arch, named)}
        key = (use.operator.name, use.variant, _sizes(use.operands), tuple(candidates))
        if len(candidates) == 1:
            times[key] = dict.fromkeys(candidates)
        elif key not in times:
            for provider in candidates.values():
                _compile(use.specs(provider, arch), variants, arch, output)
            times[key] = _measured(use, list(candidates.values()), variants, arch, device, output)
        found = times[key]
        chosen = min(found, key=lambda name: found[name] or 0.0)
        package = candidates[chosen].package
        infos.append(
            OperatorInfo(
                name=use.operator.name,
                variant=use.variant,
                provider=chosen,
                ms=found,
                package=package.pinned if package else "",
            )
        )
        specs = use.specs(candidates[chosen], arch)
        _compile(specs, variants, arch, output)
        kept.update((spec.key, None) for spec in specs)
    for loser in variants.keys() - kept.keys():
        (output / variants[loser].file).unlink()
    return Bound(tuple(infos), {winner: variants[winner] for winner in kept})


def check_named(module: fx.GraphModule, arch: str, named: Mapping[str, str]) -> set[str]:
    """Which operators of ``named`` stand in ``module``.

    Raises `BuildError` when the provider that one of them must have cannot serve it on ``arch``. What is
    installed here does not matter: the engine may be finalized elsewhere.
    """
    found = set()
    for use in _uses(module):
        wanted = named.get(use.base)
        if wanted is None:
            continue
        found.add(use.base)
        reasons = {provider.name: use.illegal(provider, arch) for provider in use.operator.providers}
        if wanted not in reasons or reasons[wanted] is not None:
            raise _cannot_serve(use, wanted, arch, reasons.get(wanted))
    return found


def _cannot_serve(use: _Use, wanted: str, arch: str, reason: str | None) -> BuildError:
    return BuildError(
        f"provider {wanted!r} cannot serve {use.operator.name} on {arch}:"
        f" {reason or f'it does not implement {use.operator.name}'}",
        f"leave out --provider {use.base}={wanted}, or name another",
    )


def _compile(specs: Sequence[Spec], variants: dict[str, VariantInfo], arch: str, output: Path) -> None:
    """Add to ``variants`` what ``specs`` need and it lacks."""
    for spec in specs:
        if spec.key not in variants:
            variants[spec.key] = _compiled(spec, arch, output)


def _uses(module: fx.GraphModule) -> list[_Use]:
    by_target = {operator.target: operator for operator in OPERATORS}
    places: dict[tuple[str, str], list[tuple[Operand, ...]]] = {}
    operators: dict[str, Operator] = {}
    for node in module.graph.nodes:
        operator = by_target.get(node.target)
        if operator is None:
            continue
        given = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        operands = operator.operands(given[0], given[1])
        operators[operator.name] = operator
        places.setdefault((operator.name, operator.variant(*operands)), []).append(operands)
    return [_Use(operators[name], variant, tuple(found)) for (name, variant), found in places.items()]


def _legal(use: _Use, arch: str, named: Mapping[str, str]) -> list[Provider]:
    wanted = named.get(use.base)
    reasons = {p.name: use.refused(p, arch, named=p.name == wanted) for p in use.operator.providers}
    legal = [p for p in use.operator.providers if reasons[p.name] is None]
    if wanted is not None:
        legal = [p for p in legal if p.name == wanted]
        if not legal:
            raise _cannot_serve(use, wanted, arch, reasons.get(wanted))
    if not legal:
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "it has none"
        raise BuildError(
            f"no provider can serve {use.operator.name} on {arch} ({told})",
            "take out the pass that asks for it",
        )
    return legal


def _compiled(spec: Spec, arch: str, output: Path) -> VariantInfo:
    # Here and not above: a region without our operators needs no Triton.
    from h3compile.ops.kernels.compile import compile_spec, usage

    cubin = compile_spec(spec, arch)
    file = f"{spec.key}.cubin"
    (output / file).write_bytes(cubin.code)
    used = usage(cubin.code)
    return VariantInfo(
        file=file,
        kernel=spec.kernel,
        entry=cubin.entry,
        warps=cubin.warps,
        shared=cubin.shared,
        scratch=cubin.scratch,
        scratch_alignment=cubin.scratch_alignment,
        scratch_arguments=cubin.scratch_arguments,
        registers=used.registers,
        stack=used.stack,
    )


def _fake_mode(operands: Sequence[Operand]) -> torch._subclasses.fake_tensor.FakeTensorMode:
    return next(operand.fake_mode for operand in operands if isinstance(operand, FakeTensor))


def _at_hints(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(size.node.hint) if isinstance(size, torch.SymInt) else size for size in sizes)


def _sizes(operands: Sequence[Operand]) -> _Sizes:
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    return tuple((_at_hints(tensor.shape), _at_hints(tensor.stride())) for tensor in tensors)


def _real(operand: Operand, device: torch.device) -> Operand:
    """A random operand of the type of a fake one, at the hints of its sizes."""
    if isinstance(operand, torch.SymInt):
        return int(operand.node.hint)
    if not isinstance(operand, FakeTensor):
        return operand
    shape, stride = _at_hints(operand.shape), _at_hints(operand.stride())
    real = torch.empty_strided(shape, stride, dtype=operand.dtype, device=device)
    if operand.dtype == torch.int8:
        return real.random_(-127, 128)
    if not operand.dtype.is_floating_point:
        return real.zero_()
    return real.copy_(torch.randn(shape, device=device, dtype=torch.bfloat16))


def _measured(
    use: _Use,
    candidates: Sequence[Provider],
    variants: Mapping[str, VariantInfo],
    arch: str,
    device: torch.device,
    output: Path,
) -> dict[str, float | None]:
    """Milliseconds by provider, medians of runs that take turns on ``device``."""
    kernels = Kernels({key: Binary.recorded(info, output) for key, info in variants.items()}, device)
    try:
        # Exchanges take a rank's own part for that of every other: a build has no ranks.
        with torch.no_grad(), torch.cuda.device(device), standing_in():
            operands = [_real(operand, device) for operand in use.operands]
            samples: dict[str, list[float]] = {provider.name: [] for provider in candidates}
            for turn in range(_ROUNDS + 1):
                for provider in candidates:
                    start, end = _event(), _event()
                    start.record()
                    _launch(use, provider, kernels, arch, operands)
                    end.record()
                    end.synchronize()
                    if turn:
                        samples[provider.name].append(start.elapsed_time(end))
    except torch.cuda.OutOfMemoryError as error:
        raise BuildError(
            f"the device has no room to measure {use.operator.name}", "free device memory, or name a provider"
        ) from error
    return {name: round(statistics.median(times), 4) for name, times in samples.items()}


def _launch(use: _Use, provider: Provider, run: Run, arch: str, operands: Sequence[Operand]) -> None:
    try:
        provider.launch(run, arch, *operands)
    except (H3CompileError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        if provider.package is None:
            raise
        # Whatever a package of others raises.
        told = next(iter(str(error).splitlines()), type(error).__name__)
        raise BuildError(
            f"{provider.package.pinned} cannot compute {use.operator.name} on {arch} ({told[:200]})",
            f"name another provider with --provider {use.base}=NAME",
        ) from error


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
