"""Compile one region with Inductor, once, into an artifact that loads anywhere without a compiler.

`torch._inductor.compile_fx` is driven with fake inputs: no weight is needed and none is kept. Of what it
returns, the artifact keeps the launch sequence (Python) and the kernel binaries; see
h3compile.runtime.artifact for the other half.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.fx.experimental._config as symbolic_config
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor.async_compile import shutdown_compile_workers
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.exc import InductorError, InvalidCxxCompiler
from torch._inductor.output_code import CompiledFxGraph, OutputCode
from torch.nn.attention import SDPBackend, sdpa_kernel

from h3compile.backends.inductor_kernels import collect_kernels, needs_tuning
from h3compile.backends.inductor_options import PORTABLE_FEATURES, InductorOptions, settings_for
from h3compile.backends.inductor_shapes import Length, SymbolicInputs, at_largest, fake_values, lengths_of
from h3compile.backends.inductor_source import launch_sequence
from h3compile.backends.operators import Bound, Times, bind_operators
from h3compile.engine.artifact import (
    INFO_FILE,
    SOURCE_FILE,
    ArtifactInfo,
    CubinInfo,
    InputInfo,
    LengthInfo,
    LibraryInfo,
)
from h3compile.engine.machine import cpu_features, device_arch, kernel_arch, python_abi, torch_release
from h3compile.errors import BuildError
from h3compile.ops.exchange_groups import standing_in

__all__ = ["LARGEST_LENGTH", "CompiledRegion", "InductorOptions", "compile_region"]

# Rows. The longest clip of the release is about 109,000; reports go to 198,000.
LARGEST_LENGTH = 1 << 18


@dataclass(frozen=True)
class CompiledRegion:
    """What was written: the folder, its record, the size of its files in bytes, the time in seconds."""

    path: Path
    info: ArtifactInfo
    size: int
    seconds: float


def _prepared(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A copy on ``device`` without metadata: it would carry paths and symbols of the program."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise BuildError(f"the region holds {node.op} {node.target}", "make it an input of the region")
        copy = graph.node_copy(node, copies.__getitem__)
        copy.meta.clear()
        moved = fx.node.map_aggregate(
            (copy.args, copy.kwargs), lambda value: device if isinstance(value, torch.device) else value
        )
        copy.args, copy.kwargs = moved
        copies[node] = copy
    return fx.GraphModule(torch.nn.Module(), graph)


@contextlib.contextmanager
def _tracing(
    inputs: SymbolicInputs, settings: Mapping[str, object], attention: tuple[str, ...]
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(tracing(TracingContext(inputs.mode)))
        stack.enter_context(inductor_config.patch(dict(settings)))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        # Decides layout questions as for a size that may be 1, without fixing the answer.
        stack.enter_context(symbolic_config.patch(backed_size_oblivious=True))  # type: ignore[attr-defined]
        if attention:
            names = [name.upper() for name in attention]
            stack.enter_context(
                sdpa_kernel([SDPBackend.__members__[name] for name in names], set_priority=True)
            )
        yield


def _compile(module: fx.GraphModule, inputs: SymbolicInputs) -> CompiledFxGraph:
    compiled: list[CompiledFxGraph] = []

    inner: Callable[..., OutputCode] = compile_fx_inner

    def record(graph: fx.GraphModule, values: object, **options: object) -> OutputCode:
        code = inner(graph, values, **options)
        if not isinstance(code, CompiledFxGraph):
            raise BuildError(
                f"Inductor returned {type(code).__name__} for a region", "lower with --backend eager"
            )
        compiled.append(code)
        return code

    try:
        compile_fx(module, list(inputs.tensors), inner_compile=record)
    except InductorError as error:
        raise _explained(error.inner_exception) from error
    if len(compiled) != 1:
        raise BuildError(f"Inductor split a region into {len(compiled)} graphs", "lower with --backend eager")
    return compiled[0]


def _explained(error: Exception) -> BuildError:
    if isinstance(error, InvalidCxxCompiler):
        return BuildError("no C++ compiler was found", "install g++, or build with --backend eager")
    reason = next(iter(str(error).splitlines()), "")
    return BuildError(
        f"Inductor cannot compile the region ({type(error).__name__}: {reason})", "build with --backend eager"
    )


def _check(code: CompiledFxGraph, inputs: SymbolicInputs) -> None:
    if code.constants:
        raise BuildError(f"the region holds the constant {next(iter(code.constants))}", "make it an input")
    if code.mutated_input_idxs:
        raise BuildError("the region changes one of its inputs", "make it functional")


def _globals_of(code: CompiledFxGraph) -> Mapping[str, object]:
    for loaded in reversed(PyCodeCache.modules):
        if getattr(loaded, "key", None) == code.cache_key:
            return vars(loaded)
    raise BuildError("Inductor did not load the code of a region", "lower with --backend eager")


def _tune(code: CompiledFxGraph, inputs: SymbolicInputs, lengths: tuple[Length, ...]) -> None:
    """One run on the device at the lengths to tune for, in which kernels choose their configuration."""
    try:
        with torch.no_grad(), standing_in():
            code(inputs.real(lengths))
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError as error:
        raise BuildError(
            f"the device has no room to tune a region at {', '.join(f'{x.hint} {x.name}' for x in lengths)}",
            "free device memory",
        ) from error


def _info(
    code: CompiledFxGraph,
    inputs: SymbolicInputs,
    graph: fx.Graph,
    options: InductorOptions,
    kernels: dict[str, LibraryInfo | CubinInfo],
    own: Bound,
    device: torch.device,
) -> ArtifactInfo:
    aligned = set(code.inputs_to_check)
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    (result,) = graph.find_nodes(op="output")
    features = cpu_features() & PORTABLE_FEATURES if options.portable else cpu_features()
    return ArtifactInfo(
        device="cuda" if device.type == "cuda" else "cpu",
        arch=device_arch(device),
        cpu_features=tuple(sorted(features)) if device.type == "cpu" else (),
        torch=torch_release(device),
        python=python_abi(),
        inputs=tuple(
            InputInfo(
                name=name,
                dtype=str(value.dtype).removeprefix("torch."),
                shape=inputs.spelled(value.shape),
                stride=inputs.spelled(value.stride()),
                aligned=at in aligned,
            )
            for at, (name, value) in enumerate(zip(names, inputs.tensors, strict=True))
        ),
        outputs=len(result.args[0]),
        lengths=tuple(LengthInfo(name=length.name, largest=length.largest) for length in inputs.lengths),
        assumptions=inputs.assumptions(),
        # How many processes compiled it says nothing about the code.
        options={key: value for key, value in dataclasses.asdict(options).items() if key != "workers"},
        kernels=kernels,
        operators=own.operators,
        variants=dict(own.variants),
    )


def compile_region(
    graph_module: fx.GraphModule,
    *,
    device: str,
    output: Path,
    largest: Mapping[str, int] | None = None,
    options: InductorOptions | None = None,
    providers: Mapping[str, str] | None = None,
    times: Times | None = None,
) -> CompiledRegion:
    """Compile ``graph_module`` for ``device`` into the new folder ``output``.

    The placeholders carry fake tensors in ``meta["val"]``; their dtypes, strides and symbolic sizes are
    those of the inputs, weights included. The output is a tuple of tensors. Every symbolic size stays
    free from 1 to ``largest`` (by name, else `LARGEST_LENGTH`); on a GPU a smaller limit lets kernels
    index with 32 bits. The program's own symbols are never touched. On a GPU our own operators get the
    fastest legal provider, or the one that ``providers`` names by operator; ``times``
    keeps what was measured from one region to the next.

    Raises `BuildError` naming the length when the code would only be right for some legal lengths, and
    when the region cannot be kept without its compiler.
    """
    options = options or InductorOptions()
    target = torch.device(device)
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    started = perf_counter()
    values = fake_values(graph_module.graph)
    lengths = lengths_of(graph_module.graph, largest or {}, LARGEST_LENGTH)
    settings = settings_for(options, target)
    with _workers_stopped(target):
        code, inputs = _compile_free(graph_module, values, lengths, settings, options, target)
        output.mkdir(parents=True)
        own = Bound((), {})
        if target.type == "cuda":
            arch = kernel_arch(target)
            own = bind_operators(
                graph_module,
                arch=arch,
                named=providers or {},
                times={} if times is None else times,
                device=target,
                output=output,
            )
        names = {operator.name for operator in own.operators}
        sequence, loaded = launch_sequence(code.source_code, names), _globals_of(code)
        if needs_tuning(loaded, sequence.kernels):
            _tune(code, inputs, lengths)
        kernels = collect_kernels(loaded, sequence.kernels, output)
    info = _info(code, inputs, graph_module.graph, options, kernels, own, target)
    (output / SOURCE_FILE).write_text(sequence.source)
    (output / INFO_FILE).write_text(info.model_dump_json(indent=1) + "\n")
    size = sum(file.stat().st_size for file in output.iterdir())
    return CompiledRegion(output, info, size, perf_counter() - started)


def _compile_free(
    graph_module: fx.GraphModule,
    values: list[torch.Tensor],
    lengths: tuple[Length, ...],
    settings: Mapping[str, object],
    options: InductorOptions,
    device: torch.device,
) -> tuple[CompiledFxGraph, SymbolicInputs]:
    """Compile so that no legal length is excluded.

    Inductor takes 32-bit indices when the tuned-for length allows it and then excludes longer ones; tuned
    for the largest length, it takes 64-bit indices where they are needed. Hence a second attempt.
    """
    refusal: tuple[tuple[Length, ...], str] | None = None
    for _ in range(2):
        inputs = SymbolicInputs(values, lengths, device)
        with _tracing(inputs, settings, options.attention):
            code = _compile(_prepared(graph_module, device), inputs)
        _check(code, inputs)
        inputs.assumptions()
        refusal = inputs.refused()
        if refusal is None:
            return code, inputs
        lengths = at_largest(lengths, refusal[0])
    assert refusal is not None
    about, guard = refusal
    raise BuildError(
        f"the compiled region would be right only where {guard}",
        f"keep {', '.join(length.name for length in about)} free, or lower its largest legal value",
    )


@contextlib.contextmanager
def _workers_stopped(device: torch.device) -> Iterator[None]:
    """No process that compiles kernels outlives this context."""
    try:
        yield
    finally:
        if device.type == "cuda":
            shutdown_compile_workers()
