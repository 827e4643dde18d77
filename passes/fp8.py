"""`fp8`: linears on E4M3 operands, one scale an output channel and one an activation row."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import fx

import h3compile.ops  # noqa: F401  registers what the rewrite calls
from h3compile.errors import BuildError, nearest
from h3compile.passes.rewrites.fp8_linear import Quantized, quantize_linear
from h3compile.passes.rewrites.fp8_target import require_fp8
from h3compile.pipeline.base import Match, Pass, Rewrite, Tier
from h3compile.program.analysis import execution_stages
from h3compile.program.calibration import Calibration, read_calibration
from h3compile.program.edit import Editor
from h3compile.program.facts import ModelFacts
from h3compile.program.program import Call, Program
from h3compile.program.region import Region
from h3compile.program.stages import Stage
from h3compile.program.weights import Concat, Fp8, Fp8Scale, Literal, Weight
from h3compile.targets import Target

__all__ = ["Fp8Linears"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Fp8Linears(Pass):
    """Quantize the weights of linears to E4M3 at build, and their inputs when they are computed.

    ``keep`` names modules that stay as they are, by any part of their path, besides those the model's facts
    keep. ``calibration`` is a file of `h3compile calibrate`: inputs then take its scales instead of their
    own maxima.
    """

    keep: tuple[str, ...] = ()
    calibration: str | None = None

    name: ClassVar[str] = "fp8"
    tier: ClassVar[Tier] = Tier.LOSSY
    requires: ClassVar[tuple[str, ...]] = ("outline",)
    after: ClassVar[tuple[str, ...]] = ("fold-schedule", "fuse", "hoist")

    @cached_property
    def _calibrated(self) -> Calibration | None:
        """What the file holds, read once: what is checked is what is applied."""
        return None if self.calibration is None else read_calibration(Path(self.calibration))

    def check(self, partitions: Sequence[str]) -> None:
        if self._calibrated is None:
            return
        found = self._calibrated.partition
        if len(partitions) > 1 or (found is not None and found != partitions[0]):
            raise BuildError(
                f"{self.calibration} holds the scales of {found or 'one partition'}, and"
                f" {' and '.join(partitions)} are built",
                "build one engine a partition, each with its own calibration",
            )

    def apply(self, program: Program, target: Target) -> Rewrite:
        require_fp8(target, self.name)
        calibration = self._calibrated
        stages = execution_stages(program)
        matches: list[Match] = []
        weights = dict(program.weights)
        regions = dict(program.regions)
        calls = {call.name: call for call in program.calls}
        used: set[str] = set()
        for name, region in program.regions.items():
            bound = program.calls_of(program.base_of(name))
            if stages[bound[0].name] is Stage.SCHEDULE:
                continue  # cold: evaluated once for each timestep
            edit = Editor(region)
            tables = [_paths(region, call) for call in bound]
            found = []
            for node in edit.nodes():
                paths = _quantizable(edit, node, tables, program.facts.unquantized)
                keeping = self._keeping(paths)
                used |= keeping
                if paths and not keeping:
                    found.append(quantize_linear(edit, node, static=calibration is not None))
            if not found:
                continue
            regions[name] = edit.finish()
            for call in program.calls_of(name):
                calls[call.name] = _rebound(call, region, regions[name], found, weights, calibration)
                matches += _matches(call, region, found, program.weights)
        self._check_kept(program, used)
        if calibration is not None:
            _check_calibrated(calibration, program)
        rewritten = program.evolve(regions=regions, calls=tuple(calls.values()), weights=weights)
        return Rewrite(rewritten, tuple(matches))

    def _keeping(self, paths: Sequence[str]) -> set[str]:
        """The names in ``keep`` for a linear whose weight has these ``paths``, one a call of its region."""
        keeping = set()
        for module in self.keep:
            inside = [_within(path, module) for path in paths]
            if any(inside) and not all(inside):
                raise BuildError(
                    f"fp8 keeps {module!r}, one of {len(paths)} blocks that are one region",
                    "name a module of every block",
                )
            if any(inside):
                keeping.add(module)
        return keeping

    def _check_kept(self, program: Program, used: Collection[str]) -> None:
        """Raise `BuildError` for a name in ``keep`` that keeps nothing: a typing error must not quantize."""
        for module in self.keep:
            if module not in used:
                modules = {step for name in program.weights for step in name.split(".")[:-1]}
                raise BuildError(
                    f"fp8 keeps {module!r}, and would quantize no linear in such a module",
                    nearest(module, modules - {module}),
                )

    def expects(self, facts: ModelFacts) -> Mapping[str, int]:
        # What a user keeps is not in the model's facts; that each name keeps something is checked above.
        return {} if self.keep else super().expects(facts)


def _check_calibrated(calibration: Calibration, program: Program) -> None:
    known = {key for weight in program.weights.values() for key in weight.reads()}
    for name in calibration.amax:
        if name not in known:
            raise BuildError(
                f"the calibration has {name}, which this model lacks", "calibrate the model that is built"
            )


def _paths(region: Region, call: Call) -> dict[str, str]:
    """The weight table's name of every weight port of ``region``, as ``call`` binds them."""
    return dict(zip((port.name for port in region.weights), call.weights, strict=True))


def _quantizable(
    edit: Editor, node: fx.Node, tables: Sequence[Mapping[str, str]], kept: tuple[str, ...]
) -> tuple[str, ...]:
    """The paths of the weight of ``node``, in the ``tables`` of the calls; none where it is not quantized."""
    if node.target is not aten.linear.default:
        return ()
    port = edit.weight_of(node.args[1])
    if port is None or len(node.all_input_nodes[1].users) != 1:
        return ()
    paths = tuple(table[port.name] for table in tables)
    return () if any(_within(path, module) for path in paths for module in kept) else paths


def _within(path: str, module: str) -> bool:
    """Whether ``module`` is one or several whole steps of ``path``."""
    return f".{module}." in f".{path}."


def _rebound(
    call: Call,
    before: Region,
    after: Region,
    found: list[Quantized],
    weights: dict[str, Weight],
    calibration: Calibration | None,
) -> Call:
    names = _paths(before, call)
    for item in found:
        old = names[item.weight.name]
        stem = old.removesuffix(".weight")
        operand = weights.pop(old)
        names[item.values.name], names[item.scales.name] = old, f"{stem}.weight_scale"
        weights[old], weights[names[item.scales.name]] = Fp8(operand), Fp8Scale(operand)
        if item.input_scale is not None:
            assert calibration is not None
            names[item.input_scale.name] = f"{stem}.input_scale"
            scale = calibration.input_scale(_parts(operand))
            weights[f"{stem}.input_scale"] = Literal.of(torch.tensor([scale], dtype=torch.float32))
    return replace(call, weights=tuple(names[port.name] for port in after.weights))


def _parts(weight: Weight) -> tuple[str, ...]:
    """The checkpoint tensors a linear's weight is made of."""
    return weight.reads()


def _matches(call: Call, region: Region, found: list[Quantized], table: Mapping[str, Weight]) -> list[Match]:
    names = _paths(region, call)
    matches = []
    for item in found:
        name = names[item.weight.name]
        weight = table[name]
        parts = len(weight.operands) if isinstance(weight, Concat) else 1
        matches.append(Match("linear", f"{call.name}/{item.weight.name}"))
        matches += [Match("projection", f"{call.name}/{part}") for part in _parts(weight)[:parts]]
    return matches
