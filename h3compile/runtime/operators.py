"""The operators of an artifact, bound to the providers and kernels that its record names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from h3compile.engine.artifact import ArtifactInfo
from h3compile.engine.machine import kernel_arch
from h3compile.errors import EngineError
from h3compile.ops import OPERATORS
from h3compile.ops.cubin import Kernels
from h3compile.ops.launch import Binary, Run
from h3compile.ops.operator import Operand, Operator, Outputs, Provider

__all__ = ["BoundOperator", "bound_operators"]

BoundOperator = Callable[..., Outputs]


def bound_operators(info: ArtifactInfo, folder: Path, device: torch.device) -> dict[str, BoundOperator]:
    """What stands behind every operator name of the launch sequence in ``folder``.

    Raises `EngineError` when an operator or a provider is not known to this version, or what the provider
    calls is not installed.
    """
    binaries = {key: Binary.recorded(variant, folder) for key, variant in info.variants.items()}
    kernels = Kernels(binaries, device)
    known = {operator.name: operator for operator in OPERATORS}
    providers: dict[str, dict[str, Provider]] = defaultdict(dict)
    for entry in info.operators:
        operator = known.get(entry.name)
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
    arch = kernel_arch(device)
    return {name: _bind(known[name], found, kernels, arch) for name, found in providers.items()}


def _bind(operator: Operator, providers: dict[str, Provider], run: Run, arch: str) -> BoundOperator:
    def call(*given: Operand, **named: Operand) -> Outputs:
        operands = operator.operands(given, named)
        return providers[operator.variant(*operands)].launch(run, arch, *operands)

    return call
