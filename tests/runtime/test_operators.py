"""Operators of an artifact: what an engine may ask for, and kernels that are not as they should be."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from h3compile.engine.artifact import ArtifactInfo, OperatorInfo
from h3compile.errors import EngineError
from h3compile.ops.cubin import Kernels
from h3compile.ops.launch import Binary, Launch, Spec
from h3compile.runtime.operators import bound_operators

SPEC = Spec("swiglu:swiglu_kernel", (("x", "*bf16"), ("out", "*bf16")))
CUDA = torch.device("cuda", 0)


def info(name: str, provider: str) -> ArtifactInfo:
    """The record of an artifact with one operator of ours."""
    return ArtifactInfo(
        device="cuda",
        arch="sm_90",
        cpu_features=(),
        torch="2.14.1",
        python="cpython-311",
        inputs=(),
        outputs=1,
        lengths=(),
        assumptions=(),
        options={},
        kernels={},
        operators=(OperatorInfo(name=name, variant="", provider=provider, ms={provider: None}),),
    )


@pytest.mark.parametrize(
    ("name", "provider"),
    [("swiglu.default", "cutlass"), ("swiglu.int4", "triton"), ("softmax.default", "triton")],
)
def test_an_operator_or_provider_of_another_version_is_one_line(
    name: str, provider: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineError) as caught:
        bound_operators(info(name, provider), tmp_path / "block.inductor", CUDA)
    assert str(caught.value) == (
        f"region block.inductor needs {name} by {provider}, which this version lacks:"
        " run `h3compile finalize --again`, or install the version that built the engine"
    )


class _Driver:
    """Stands in for torch's static launcher: it takes what looks like an ELF file."""

    def _load_kernel(self, path: str, entry: str, shared: int, device: int) -> tuple[int, ...]:
        if not Path(path).read_bytes().startswith(b"\x7fELF"):
            raise RuntimeError("device kernel image is invalid")
        return (7, 42, 30, 0)

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []

    def _launch_kernel(self, *arguments: object) -> None:
        self.launches.append(arguments)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    made = _Driver()
    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", made, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 99, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return made


def kernels(folder: Path, content: bytes) -> Kernels:
    """The one kernel of an engine, in a file that holds ``content``."""
    file = folder / f"{SPEC.key}.cubin"
    file.write_bytes(content)
    binary = Binary(file, "entry", warps=4, shared=64, scratch=0, scratch_alignment=1, scratch_arguments=2)
    return Kernels({SPEC.key: binary}, CUDA)


def launch(spec: Spec = SPEC, offset: int = 0) -> Launch:
    operands = torch.zeros(2, 64, dtype=torch.bfloat16)
    return Launch(spec, (3, 2, 1), (operands[0, offset:], operands[1]))


def test_a_kernel_is_launched_as_recorded(driver: _Driver, tmp_path: Path) -> None:
    one = launch()
    run = kernels(tmp_path, b"\x7fELF")
    run(one)
    assert driver.launches == [(42, 3, 2, 1, 4, 64, "OOOO", (*one.arguments, None, None), 99)]


def test_a_damaged_kernel_is_one_line(driver: _Driver, tmp_path: Path) -> None:
    with pytest.raises(EngineError) as caught:
        kernels(tmp_path, b"\x00ELF")(launch())
    assert str(caught.value) == (
        f"{SPEC.key}.cubin cannot be loaded (device kernel image is invalid):"
        " run `h3compile finalize --again` on this machine"
    )


def test_a_kernel_that_was_not_compiled_is_never_compiled(driver: _Driver, tmp_path: Path) -> None:
    other = Spec(SPEC.kernel, SPEC.types, (("GATE_FIRST", True),))
    with pytest.raises(EngineError, match=f"the engine has no kernel {other.key} for these operands"):
        kernels(tmp_path, b"\x7fELF")(launch(other))
    assert driver.launches == []


def test_an_operand_off_its_boundary_is_refused(driver: _Driver, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="an operand of swiglu:swiglu_kernel does not start on a 16-byte"):
        kernels(tmp_path, b"\x7fELF")(launch(offset=1))
    assert driver.launches == []
