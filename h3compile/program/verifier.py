"""The verifier: everything that must hold of a program between two passes."""

from __future__ import annotations

from collections.abc import Iterator

from h3compile.errors import BuildError
from h3compile.program.analysis import execution_stages
from h3compile.program.logs import silenced
from h3compile.program.opset import illegal
from h3compile.program.program import Program
from h3compile.program.propagate import DimSpecialized, propagate
from h3compile.program.region import Port, Region
from h3compile.program.stages import Stage
from h3compile.program.variants import measure_problems, variant_problems

__all__ = ["VerificationError", "verify"]


class VerificationError(BuildError):
    """A program that breaks a rule, and which rule."""


def verify(program: Program, device: str = "cpu") -> Program:
    """``program`` with freshly propagated shapes and dtypes, once all of this holds:

    graphs lint, their placeholders are their ports by name and in order, they return values that they
    compute, and their operators are legal at the level; shapes propagate with every length free; every
    call binds values that exist before it, and weights of the right shape and dtype; every value is
    defined once; the outputs are defined; every weight is bound and every region called, or a variant of
    one that is; a folded table is computed before the step and only read there; a variant fits the region
    it stands in for and its condition can hold; measures are counts that steps leave; the residency is
    that of step calls with weights.
    """
    problems = list(_structure(program))
    if problems:
        raise VerificationError(_summary(problems))
    regions = {name: _propagated(program, region, device) for name, region in program.regions.items()}
    program = program.evolve(regions=regions)
    problems = [*variant_problems(program), *_bindings(program)]
    if problems:
        raise VerificationError(_summary(problems))
    # These follow values through the calls, which must be sound for it.
    problems = [*_tables(program), *measure_problems(program), *_residency(program)]
    if problems:
        raise VerificationError(_summary(problems))
    return program


def _summary(problems: list[str]) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"the program is broken: {problems[0]}{more}"


def _structure(program: Program) -> Iterator[str]:
    for name, region in program.regions.items():
        if name != region.name:
            yield f"region {region.name} is filed under {name}"
        try:
            region.graph.lint()
        except (RuntimeError, AssertionError) as error:
            yield f"region {name} does not lint ({error})"
            continue
        yield from _ports(region)
        for node in region.graph.nodes:
            if reason := illegal(node, program.level):
                yield f"{name}/{node.name}: {reason}"


def _ports(region: Region) -> Iterator[str]:
    name = region.name
    labels = [node.target for node in region.graph.nodes if node.op == "placeholder"]
    expected = [port.name.replace(".", "_") for port in region.placeholders]
    if len(labels) != len(expected):
        yield f"region {name} has {len(labels)} placeholders for {len(expected)} ports"
    for label, port in zip(labels, expected, strict=False):
        if label != port:
            yield f"region {name} has placeholder {label} where its port is {port}"
    if len(set(expected)) != len(expected):
        yield f"region {name} has two ports of one name"
    output = next(iter(reversed(region.graph.nodes)))
    if output.op != "output" or not isinstance(output.args[0], tuple):
        yield f"region {name} does not return a tuple"
        return
    results = output.args[0]
    if len(results) != len(region.outputs):
        yield f"region {name} returns {len(results)} values for {len(region.outputs)} ports"
    for result in results:
        # An alias of an input, or two names for one tensor, would be a value defined twice.
        if result.op != "call_function":
            yield f"region {name} returns {result.name}, which it does not compute"
        elif results.count(result) > 1:
            yield f"region {name} returns {result.name} twice"


def _propagated(program: Program, region: Region, device: str) -> Region:
    try:
        with silenced("torch._subclasses.fake_tensor"):
            return propagate(region, program.dims, device)
    except DimSpecialized as error:
        raise VerificationError(f"the program is broken: region {region.name}: {error}") from error
    except Exception as error:
        # Whatever a fake operator raises, shapes or dtypes do not fit; its first line says which.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise VerificationError(
            f"the program is broken: region {region.name} does not propagate ({reason})"
        ) from error


def _bindings(program: Program) -> Iterator[str]:
    defined: dict[str, Port] = {port.name: port for port in program.inputs}
    counts: dict[str, int] = {}
    bound: set[str] = set()
    for call in program.calls:
        region = program.regions.get(call.region)
        if region is None:
            yield f"{call.name} calls a region that is not there"
            continue
        if call.index != counts.get(call.region, 0):
            yield f"{call.name} is call number {counts.get(call.region, 0)} of its region"
        counts[call.region] = counts.get(call.region, 0) + 1
        yield from _arity(call.name, call.inputs, region.inputs, "inputs")
        yield from _arity(call.name, call.weights, region.weights, "weights")
        yield from _arity(call.name, call.outputs, region.outputs, "outputs")
        for value, port in zip(call.inputs, region.inputs, strict=False):
            if value not in defined:
                yield f"{call.name} reads {value} before it is computed"
            elif (defined[value].dtype, defined[value].shape) != (port.dtype, port.shape):
                yield f"{call.name} reads {defined[value]} as {port}"
        for weight, port in zip(call.weights, region.weights, strict=False):
            bound.add(weight)
            entry = program.weights.get(weight)
            if entry is None:
                yield f"{call.name} binds {weight}, which is not in the weight table"
            elif (entry.dtype, tuple(entry.shape)) != (port.dtype, port.shape):
                yield f"{call.name} binds {weight} {entry.dtype} {tuple(entry.shape)} as {port}"
        for value, port in zip(call.outputs, region.outputs, strict=False):
            if value in defined:
                yield f"{call.name} defines {value} a second time"
            defined[value] = port
    used = {form for name in counts for form in program.forms_of(name)}
    for name in program.regions.keys() - used:
        yield f"region {name} is never called"
    for weight in program.weights.keys() - bound:
        yield f"weight {weight} is bound by no call"
    for value in program.outputs:
        if value not in defined:
            yield f"output {value} is never computed"


def _arity(call: str, given: tuple[str, ...], ports: tuple[Port, ...], what: str) -> Iterator[str]:
    if len(given) != len(ports):
        yield f"{call} has {len(given)} {what} for {len(ports)} ports"


def _tables(program: Program) -> Iterator[str]:
    if not program.tables:
        return
    stages = execution_stages(program)
    made = {
        value: call.name
        for call in program.calls
        if stages[call.name] is Stage.SCHEDULE
        for value in call.outputs
    }
    for value in program.tables:
        if value not in made:
            yield f"table {value} is not computed by a schedule call"
    for call in program.calls:
        if stages[call.name] is Stage.SCHEDULE:
            continue
        for value in call.inputs:
            if value in made and value not in program.tables:
                yield f"{call.name} reads {value}, a schedule value that is not a table"


def _residency(program: Program) -> Iterator[str]:
    if program.residency is None:
        return
    stages = execution_stages(program)
    steps = [call.name for call in program.calls if call.weights and stages[call.name] is Stage.STEP]
    blocks = program.residency.blocks
    for name in blocks:
        if name not in steps:
            yield f"the residency is told of {name}, which is no call of the step with weights"
    if tuple(name for name in steps if name in blocks) != blocks:
        yield "the residency lists its blocks in another order than the step"
