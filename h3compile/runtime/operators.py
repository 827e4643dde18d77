"""The operators of an artifact, bound to the providers and kernels that its record names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from h3compile.engine.artifact import ArtifactInfo
from h3compile.engine.machine import kernel_arch
from h3compile.errors import EngineError
from h3compile.ops import OPERATORS
from h3compile.ops.cubin import Kernels
from h3compile.ops.launch import Binary, Launch, Run
from h3compile.ops.operator import Operand, Operator, Outputs, Provider

__all__ = ["BoundOperator", "bound_operators", "rehearsed_operators"]

BoundOperator = Callable[..., Outputs]

_KNOWN: Mapping[str, Operator] = {operator.name: operator for operator in OPERATORS}


def bound_operators(info: ArtifactInfo, folder: Path, device: torch.device) -> dict[str, BoundOperator]:
    """What stands behind every operator name of the launch sequence in ``folder``.

    Raises `EngineError` when an operator or a provider is not known to this version, or what the provider
    calls is not installed.
    """
    binaries = {key: Binary.recorded(variant, folder) for key, variant in info.variants.items()}
    kernels, found = Kernels(binaries, device), _providers(info, folder)
    arch = kernel_arch(device)
    return {name: _bind(_KNOWN[name], providers, kernels, arch) for name, providers in found.items()}


def rehearsed_operators(info: ArtifactInfo, folder: Path, device: torch.device) -> dict[str, BoundOperator]:
    """The same for operands on the meta device: they allocate what they allocate, and launch nothing.

    What a library computes it allocates itself: in its place stands what the operator is for fake operands.
    """
    found = {
        name: {variant: _rehearsed(_KNOWN[name], one) for variant, one in providers.items()}
        for name, providers in _providers(info, folder).items()
    }
    arch = kernel_arch(device)
    return {name: _bind(_KNOWN[name], providers, _nothing, arch) for name, providers in found.items()}


def _providers(info: ArtifactInfo, folder: Path) -> dict[str, dict[str, Provider]]:
    providers: dict[str, dict[str, Provider]] = defaultdict(dict)
    for entry in info.operators:
        operator = _KNOWN.get(entry.name)
        found = [p for p in operator.providers if p.name == entry.provider] if operator else []
        if not found:
            raise EngineError(
                f"region {folder.name} needs {entry.name} by {entry.provider}, which this version lacks",
                "run `h3compile finalize --again`, or install the version that built the engine",
            )
        package = found[0].package
        missing = package.unusable() if package else None
        if missing is not None:
            raise EngineError(
                f"region {folder.name} has {entry.name} computed by {entry.provider}, and {missing}",
                f"install {entry.package}, or run `h3compile finalize --again`",
            )
        providers[entry.name][entry.variant] = found[0]
    return providers


def _bind(operator: Operator, providers: dict[str, Provider], run: Run, arch: str) -> BoundOperator:
    def call(*given: Operand, **named: Operand) -> Outputs:
        operands = operator.operands(given, named)
        return providers[operator.variant(*operands)].launch(run, arch, *operands)

    return call


def _rehearsed(operator: Operator, provider: Provider) -> Provider:
    if provider.package is None and not provider.library:
        return provider

    def launch(run: Run, arch: str, *operands: Operand) -> Outputs:
        outputs: Outputs = operator.target(*operands)
        return outputs

    return replace(provider, launch=launch)


def _nothing(launch: Launch) -> None:
    pass
