"""What the tests of operators share: executing a provider's launches, in the interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest
import torch

from h3compile.engine.machine import kernel_arch
from h3compile.ops import OPERATORS, Operator
from h3compile.ops.kernels.interpret import interpreter
from h3compile.ops.launch import Binary, Launch, Run
from h3compile.ops.operator import Operand

Outputs = tuple[torch.Tensor, ...]
Launched = Callable[..., Outputs]


@pytest.fixture(scope="session")
def operator_named() -> Callable[[str], Operator]:
    """A function from the name of an operator, as in ``swiglu.fp8``, to it."""
    return {operator.name: operator for operator in OPERATORS}.__getitem__


@pytest.fixture(scope="session")
def interpreter_run() -> Iterator[Run]:
    """Executes launches on CPU tensors."""
    with interpreter() as run:
        yield run


@pytest.fixture(scope="session")
def gpu_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Executes launches on CUDA tensors, compiling what they ask for."""
    from h3compile.ops.cubin import Kernels
    from h3compile.ops.kernels.compile import compile_spec

    folder = tmp_path_factory.mktemp("cubins")
    device = torch.device("cuda", torch.cuda.current_device())
    loaded: dict[str, Kernels] = {}

    def run(launch: Launch) -> None:
        key = launch.spec.key
        if key not in loaded:
            fields = asdict(compile_spec(launch.spec, _present()))
            file = folder / key
            file.write_bytes(fields.pop("code"))
            loaded[key] = Kernels({key: Binary(file=file, **fields)}, device)
        loaded[key](launch)

    return run


def _present() -> str:
    """The architecture of this machine's GPU, by the name that has all its instructions."""
    return kernel_arch(torch.device("cuda", 0))


def _on_gpu(operand: Operand) -> Operand:
    """A tensor with all of its storage, so that a view stays one."""
    if not isinstance(operand, torch.Tensor):
        return operand
    storage = operand.untyped_storage().cuda()
    empty = torch.empty(0, dtype=operand.dtype, device="cuda")
    return empty.set_(storage, operand.storage_offset(), operand.size(), operand.stride())


def _outputs(operator: Operator, run: Run, arch: str, operands: tuple[Operand, ...]) -> Outputs:
    """What the Triton provider of ``operator`` computes, on the CPU."""
    provider = next(provider for provider in operator.providers if provider.name == "triton")
    assert provider.illegal(arch, *operands) is None
    outputs = provider.launch(run, arch, *operands)
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple(part.cpu() for part in parts)


@pytest.fixture(scope="session")
def interpreted(interpreter_run: Run, operator_named: Callable[[str], Operator]) -> Launched:
    """A function from an operator's name and operands to its Triton provider's outputs, interpreted."""
    return lambda name, *operands: _outputs(operator_named(name), interpreter_run, "sm_90a", operands)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def launched(request: pytest.FixtureRequest, operator_named: Callable[[str], Operator]) -> Launched:
    """The same in the interpreter and, in a test of its own, on a GPU.

    For kernels that round there as here; those of attention are compared on GPUs in tests/gpu.
    """
    if request.param == "interpreter":
        interpreted: Launched = request.getfixturevalue("interpreted")
        return interpreted
    run: Run = request.getfixturevalue("gpu_run")
    return lambda name, *operands: _outputs(
        operator_named(name), run, _present(), tuple(map(_on_gpu, operands))
    )


@pytest.fixture(scope="session")
def reference(operator_named: Callable[[str], Operator]) -> Launched:
    """A function from an operator's name and operands to its reference's outputs."""

    def of(name: str, *operands: Operand) -> Outputs:
        outputs = operator_named(name).reference(*operands)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return of
