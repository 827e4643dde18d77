"""Variants: giving a region another form for some steps, and the rules that hold of the forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from h3compile.errors import BuildError
from h3compile.program.analysis import execution_stages
from h3compile.program.conditions import Condition, Shorter, Variant
from h3compile.program.program import Program
from h3compile.program.region import Port, Region
from h3compile.program.stages import Stage

__all__ = ["add_variant", "measure_problems", "variant_problems"]


def add_variant(program: Program, base: str, region: Region, *when: Condition) -> Program:
    """``program`` in which ``region`` serves the calls of ``base`` in the steps where one of ``when`` holds.

    It comes after the variants that ``base`` has: theirs are asked first. Raises `BuildError` when the name
    is taken, ``base`` is no region or itself a variant, or no condition is given; the verifier sees to the
    rest.
    """
    if region.name in program.regions:
        raise BuildError(f"the variant {region.name} has the name of another region")
    if base not in program.regions:
        raise BuildError(f"the variant {region.name} is of {base}, which is no region")
    if program.base_of(base) != base:
        raise BuildError(f"the variant {region.name} is of {base}, which is a variant itself")
    if not when:
        raise BuildError(f"the variant {region.name} has no condition and would never run")
    known = program.variants.get(base, ())
    added = tuple(Variant(region.name, condition) for condition in when)
    return program.evolve(
        regions={**program.regions, region.name: region},
        variants={**program.variants, base: (*known, *added)},
    )


def variant_problems(program: Program) -> Iterator[str]:
    """What is wrong with the variants of ``program``, whose ports are fresh."""
    seen: dict[str, str] = {}
    lengths = {size for port in program.inputs for size in port.shape}
    for base, variants in program.variants.items():
        if base not in program.regions:
            yield f"{base} has variants and is no region"
            continue
        if not variants:
            yield f"{base} has an empty list of variants"
        for variant in variants:
            name = variant.region
            yield from _condition_problems(variant, lengths)
            if name not in program.regions:
                yield f"the variant {name} of {base} is no region"
            elif name in program.variants:
                yield f"the variant {name} of {base} has variants itself"
            elif program.calls_of(name):
                yield f"the variant {name} of {base} is called by name"
            elif seen.setdefault(name, base) != base:
                yield f"the variant {name} is of {seen[name]} and of {base}"
            else:
                yield from _port_problems(program.regions[base], program.regions[name])


def _condition_problems(variant: Variant, lengths: set[int | str]) -> Iterator[str]:
    when = variant.when
    if isinstance(when, Shorter):
        if when.dim not in lengths:
            yield f"the variant {variant.region} asks for the length {when.dim}, which no input has"
        if when.than <= 0:
            yield f"the variant {variant.region} waits for {when}, which never holds"
    elif not 0.0 <= when.than <= 1.0:
        yield f"the variant {variant.region} waits for {when}, and a sigma lies between 0 and 1"


def _port_problems(base: Region, variant: Region) -> Iterator[str]:
    # What enters is bound by position, so its names must agree: two weights may have one shape. What
    # leaves is named after the node that makes it.
    for port, other in zip(base.placeholders, variant.placeholders, strict=False):
        if port != other:
            yield f"the variant {variant.name} takes {other} where {base.name} takes {port}"
            return
    for kind, ports, others in (
        ("inputs", base.inputs, variant.inputs),
        ("weights", base.weights, variant.weights),
        ("outputs", base.outputs, variant.outputs),
    ):
        if len(ports) != len(others):
            yield f"the variant {variant.name} has {len(others)} {kind}, {base.name} has {len(ports)}"
            return
    for port, other in zip(base.outputs, variant.outputs, strict=True):
        if _type(port) != _type(other):
            yield f"the variant {variant.name} returns {other} where {base.name} returns {port}"


def measure_problems(program: Program) -> Iterator[str]:
    """What is wrong with the measures, and with the stages of regions with variants, in a sound program."""
    stages = execution_stages(program)
    read = {value for call in program.calls for value in call.inputs}
    made = {
        value: call.name
        for call in program.calls
        if stages[call.name] is Stage.STEP
        for value in call.outputs
    }
    for base in program.variants:
        for call in program.calls_of(base):
            if stages[call.name] is not Stage.STEP:
                stage = stages[call.name].value
                yield f"{call.name} runs in the {stage} stage and has variants, which are chosen in the step"
    for value in program.measures:
        if value not in made:
            yield f"the measure {value} is computed by no call of the step"
        elif value in read:
            yield f"the measure {value} is read by a call"
        elif value in program.outputs:
            yield f"the measure {value} is an output"
        elif _type(program.port_of(value)) != (torch.int32, (2,)):
            yield f"the measure {program.port_of(value)} is not int32[2]"
    yield from _twice(program.measures)


def _twice(measures: Sequence[str]) -> Iterator[str]:
    for value in dict.fromkeys(measures):
        if measures.count(value) > 1:
            yield f"the measure {value} is named twice"


def _type(port: Port) -> tuple[torch.dtype, tuple[int | str, ...]]:
    return port.dtype, port.shape
