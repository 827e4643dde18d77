"""Loading a compiled region: without a compiler, in any process, and only where it may run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, fx

from h3compile.engine.machine import cpu_features
from h3compile.errors import EngineError
from h3compile.program.facts import Dim
from h3compile.program.propagate import propagate
from h3compile.program.region import Port, Region
from h3compile.runtime.artifact import load_artifact
from h3compile.runtime.kernels import load_cubin

WIDTH = 32
LENGTHS = (1, 2, 5, 64, 1001)
ACCESSOR = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"


def _region(gain: float) -> Region:
    """norm, project, silu and a gate of ``gain``: one GEMM and at least one kernel."""
    aten = torch.ops.aten
    graph = fx.Graph()
    x, norm, weight = (graph.placeholder(name) for name in ("x", "norm", "weight"))
    normed = graph.call_function(aten.rms_norm.default, (x, [WIDTH], norm, 1e-5))
    projected = graph.call_function(aten.linear.default, (normed, weight))
    gate = graph.call_function(aten.mul.Tensor, (graph.call_function(aten.silu.default, (projected,)), gain))
    graph.output((graph.call_function(aten.add.Tensor, (x, gate)),))
    return Region(
        f"gain{gain}",
        graph,
        (Port("x", torch.float32, (1, "rows", WIDTH)),),
        (Port("norm", torch.float32, (WIDTH,)), Port("weight", torch.float32, (WIDTH, WIDTH))),
        (Port("out", torch.float32, (1, "rows", WIDTH)),),
    )


def _expected(x: Tensor, norm: Tensor, weight: Tensor, gain: float) -> Tensor:
    return x + gain * F.silu(F.linear(F.rms_norm(x, (WIDTH,), norm, 1e-5), weight))


def _inputs(rows: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((1, rows, WIDTH), (WIDTH,), (WIDTH, WIDTH))]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    """Two regions that differ in a constant."""
    if shutil.which("g++") is None:
        pytest.skip("compiling for the CPU needs g++")
    from h3compile.backends.inductor import compile_region

    folder = tmp_path_factory.mktemp("artifacts")
    for gain in (0.5, 2.0):
        graph = propagate(_region(gain), [Dim("rows", hint=512)]).module()
        compile_region(graph, device="cpu", output=folder / str(gain), largest={"rows": 4096})
    return {gain: folder / str(gain) for gain in (0.5, 2.0)}


@pytest.fixture
def artifact(artifacts: dict[float, Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(artifacts[0.5], tmp_path / "region"))


PROCESS = """
import os, sys, time
started = []
sys.addaudithook(lambda event, args: started.append((event, args[0])) if event in (
    "subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system") else None)
import torch
from safetensors.torch import load_file
from h3compile.runtime.artifact import load_artifact

folder, cases = sys.argv[1:]
torch_started = len(started)
before = time.process_time()
run = load_artifact(__import__("pathlib").Path(folder), "cpu")
assert time.process_time() - before < 1, "loading took more than a second"
cases = load_file(cases)
for case in sorted({name.split(".")[0] for name in cases}):
    (output,) = run([cases[f"{case}.{name}"] for name in ("x", "norm", "weight")])
    torch.testing.assert_close(output, cases[f"{case}.expected"])
assert len(started) == torch_started, started
compiler = [name for name in sys.modules if name.startswith(("torch._inductor", "torch._dynamo", "triton"))]
assert not compiler, compiler
assert not os.path.exists(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


@pytest.mark.slow
def test_a_new_process_compiles_nothing(artifacts: dict[float, Path], tmp_path: Path) -> None:
    cases: dict[str, Tensor] = {}
    for seed, rows in enumerate(LENGTHS):
        inputs = _inputs(rows, seed)  # other weights for every length
        for name, tensor in zip(("x", "norm", "weight"), inputs, strict=True):
            cases[f"{seed}.{name}"] = tensor
        cases[f"{seed}.expected"] = _expected(*inputs, gain=0.5)
    save_file(cases, tmp_path / "cases.safetensors")
    environment = os.environ | {
        "CXX": "/nonexistent",
        "CC": "/nonexistent",
        "PATH": "/nonexistent",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(artifacts[0.5]), str(tmp_path / "cases.safetensors")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_two_artifacts_do_not_clash(artifacts: dict[float, Path]) -> None:
    runs = {gain: load_artifact(path, "cpu") for gain, path in artifacts.items()}
    again = load_artifact(artifacts[0.5], "cpu")
    inputs = _inputs(7)
    for gain, run in runs.items():
        torch.testing.assert_close(run(inputs)[0], _expected(*inputs, gain=gain))
    assert torch.equal(again(inputs)[0], runs[0.5](inputs)[0])


def test_a_replaced_artifact_is_not_confused(artifacts: dict[float, Path], artifact: Path) -> None:
    inputs = _inputs(7)
    first = load_artifact(artifact, "cpu")(inputs)[0]
    shutil.rmtree(artifact)
    shutil.copytree(artifacts[2.0], artifact)
    second = load_artifact(artifact, "cpu")(inputs)[0]
    torch.testing.assert_close(first, _expected(*inputs, gain=0.5))
    torch.testing.assert_close(second, _expected(*inputs, gain=2.0))


def test_threads_may_load_and_run_together(artifacts: dict[float, Path]) -> None:
    failures: list[BaseException] = []

    def work(gain: float, seed: int) -> None:
        try:
            inputs = _inputs(3 + seed, seed)
            run = load_artifact(artifacts[gain], "cpu")
            for _ in range(5):
                torch.testing.assert_close(run(inputs)[0], _expected(*inputs, gain=gain))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(gain, seed)) for gain in (0.5, 2.0) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_loading_leaves_the_process_as_it_was(
    artifacts: dict[float, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ACCESSOR, "kept")
    before, threads = dict(os.environ), torch.get_num_threads()
    load_artifact(artifacts[0.5], "cpu")
    assert dict(os.environ) == before
    assert torch.get_num_threads() == threads


def test_loading_takes_under_a_second(artifacts: dict[float, Path]) -> None:
    # Of the processor: what others do on it is not measured.
    started = time.thread_time()
    load_artifact(artifacts[2.0], "cpu")
    assert time.thread_time() - started < 1


def _edit(artifact: Path, **changes: object) -> None:
    file = artifact / "region.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch": "2.0.0"}, "compiled for torch 2.0.0"),
        ({"arch": "riscv64"}, "compiled for architecture riscv64"),
        ({"python": "cpython-39"}, "compiled for Python cpython-39"),
        (
            {"cpu_features": [*sorted(cpu_features()), "amx_fp99"]},
            r"CPU instructions this machine lacks \(amx_fp99\)",
        ),
        ({"device": "cuda"}, "compiled for device cuda and this is cpu"),
        ({"format": 2}, "has format 2, not 1"),
        ({"surprise": 1}, "not a record this version reads"),
    ],
)
def test_another_machine_is_refused(artifact: Path, changes: dict[str, object], message: str) -> None:
    _edit(artifact, **changes)
    with pytest.raises(EngineError, match=message) as raised:
        load_artifact(artifact, "cpu")
    assert "\n" not in str(raised.value)


def test_a_damaged_artifact_is_refused(artifact: Path) -> None:
    library = next(artifact.glob("*.so"))
    library.write_bytes(library.read_bytes()[:100])
    with pytest.raises(EngineError, match=r"\.so cannot be loaded"):
        load_artifact(artifact, "cpu")
    library.unlink()
    with pytest.raises(EngineError, match="incomplete"):
        load_artifact(artifact, "cpu")
    shutil.rmtree(artifact)
    with pytest.raises(EngineError, match="no compiled region"):
        load_artifact(artifact, "cpu")


def test_unfit_inputs_are_named(artifacts: dict[float, Path]) -> None:
    run = load_artifact(artifacts[0.5], "cpu")
    x, norm, weight = _inputs(5)
    with pytest.raises(EngineError, match="takes 3 inputs and got 2"):
        run([x, norm])
    with pytest.raises(EngineError, match=r"input 'norm' .* is torch.float64, not torch.float32"):
        run([x, norm.double(), weight])
    with pytest.raises(EngineError, match=r"rows is 5000 .* compiled for 1 to 4096"):
        run([torch.zeros(1, 5000, WIDTH), norm, weight])
    with pytest.raises(EngineError, match="does not fit region"):
        run([x, norm, weight.t()])
    with pytest.raises(EngineError, match="does not fit region"):
        run([x, norm, torch.zeros(WIDTH, WIDTH + 1)])


class _Driver:
    """Stands in for torch's static launcher."""

    def __init__(self, handles: tuple[int, ...]) -> None:
        self._handles = handles
        self.launches: list[tuple[object, ...]] = []

    def _load_kernel(self, path: str, entry: str, shared: int, device: int) -> tuple[int, ...]:
        if not Path(path).read_bytes().startswith(b"\x7fELF"):
            raise RuntimeError("device kernel image is invalid")
        return self._handles

    def _launch_kernel(self, *arguments: object) -> None:
        self.launches.append(arguments)


@pytest.mark.parametrize("handles", [(42, 30, 0), (7, 42, 30, 0)], ids=["torch-2.11", "torch-2.14"])
def test_a_cubin_is_launched_as_recorded(
    handles: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = _Driver(handles)
    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", driver, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    (tmp_path / "scale.cubin").write_bytes(b"\x7fELF")

    def load(name: str) -> object:
        return load_cubin(
            tmp_path / name,
            entry="scale",
            warps=4,
            shared=64,
            argument_types="OOl",
            null_arguments=2,
            parameters=("x", "y", "xnumel", "unused"),
            passed=("x", "y", "xnumel"),
            prefix=("half = xnumel // 2",),
            grid=("-(half // -256)", "1", "1"),
            device=torch.device("cuda", 1),
        )

    kernel = load("scale.cubin")
    kernel.run("a", "b", 2000, None, stream=99)  # type: ignore[attr-defined]
    assert driver.launches == [(42, 4, 1, 1, 4, 64, "OOlOO", ("a", "b", 2000, None, None), 99)]
    (tmp_path / "broken.cubin").write_bytes(b"text")
    with pytest.raises(
        EngineError, match=r"broken\.cubin cannot be loaded \(device kernel image is invalid\)"
    ):
        load("broken.cubin")
