"""What the tests of operators share: executing a provider's launches, in the interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

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
def interpreted() -> Iterator[Run]:
    """Executes launches on CPU tensors."""
    with interpreter() as run:
        yield run


@pytest.fixture(scope="session")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Executes launches on CUDA tensors, compiling what they ask for."""
    from h3compile.ops.cubin import Kernels
    from h3compile.ops.kernels.compile import compile_spec

    folder = tmp_path_factory.mktemp("cubins")
    binaries: dict[str, Binary] = {}

    def run(launch: Launch) -> None:
        key = launch.spec.key
        if key not in binaries:
            fields = asdict(compile_spec(launch.spec, _present()))
            file = Path(folder / key)
            file.write_bytes(fields.pop("code"))
            binaries[key] = Binary(file=file, **fields)
        Kernels(binaries, torch.device("cuda", torch.cuda.current_device()))(launch)

    return run


def _present() -> str:
    """The architecture of this machine's GPU, by the name that has all its instructions."""
    from h3compile.ops.kernels.compile import ARCHES

    major, minor = torch.cuda.get_device_capability()
    return next(name for name, number in ARCHES.items() if number == 10 * major + minor)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def launched(request: pytest.FixtureRequest, operator_named: Callable[[str], Operator]) -> Launched:
    """A function from an operator's name, operands and keyword operands to its Triton provider's outputs."""
    gpu = request.param == "cuda"
    run: Run = request.getfixturevalue("on_gpu" if gpu else "interpreted")

    def moved(operand: Operand) -> Operand:
        return operand.cuda() if gpu and isinstance(operand, torch.Tensor) else operand

    def of(name: str, *operands: Operand) -> Outputs:
        providers = operator_named(name).providers
        provider = next(provider for provider in providers if provider.name == "triton")
        arch = _present() if gpu else "sm_90a"
        assert provider.illegal(arch, *operands) is None
        outputs = provider.launch(run, arch, *map(moved, operands))
        parts = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(part.cpu() for part in parts)

    return of


@pytest.fixture(scope="session")
def reference(operator_named: Callable[[str], Operator]) -> Launched:
    """A function from an operator's name and operands to its reference's outputs."""

    def of(name: str, *operands: Operand) -> Outputs:
        outputs = operator_named(name).reference(*operands)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return of
