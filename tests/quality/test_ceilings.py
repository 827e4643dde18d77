"""Timing what a machine reaches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from h3compile.errors import BuildError, H3CompileError
from h3compile.ops.cubin import Kernels
from h3compile.ops.kernels import compile as compiler
from h3compile.ops.launch import Launch, Spec
from h3compile.ops.numerics import FP8
from h3compile.quality import ceilings, probes
from h3compile.quality.ceilings import Sizes, measure
from h3compile.quality.clock import median_seconds
from h3compile.quality.probes import Compiling, Probe
from h3compile.targets import FLOPS, present, read_target, targets, write_target
from h3compile.targets.detect import CudaDevice

CPU = torch.device("cpu")
META = torch.device("meta")
SMALL = Sizes(((48, 32), (32, 16)), rows=16, heads=2, attention_rows=32, rotated=96, copied=4096)


class Told:
    """A `Progress` that remembers."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.notes: list[str] = []
        self.advanced = 0

    def phase(self, name: str, total: int | None) -> None:
        self.phases.append(name)

    def advance(self, count: int = 1) -> None:
        self.advanced += count

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "current_device", lambda: None)


def here(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(ceilings, "current_device", lambda: CudaDevice(name, capability, 96 * 10**9))


@pytest.mark.slow
def test_the_cpu_is_measured_and_its_file_is_its_target(no_gpu: None, tmp_path: Path) -> None:
    told = Told()
    target = measure(SMALL, told, seconds=0.002)
    assert (target.name, target.arch, target.memory) == ("cpu", "cpu", None)
    assert set(target.flops) == {"gemm.bfloat16", "gemm.float32", "attention.bfloat16"}
    assert target.bandwidth is not None and (target.host, target.peer) == (None, None)
    for rate in (target.bandwidth, *target.flops.values()):
        assert rate.reached > 1e5
        assert rate.source.startswith(f"measured on {target.title}, 20")
        assert f"torch {torch.__version__}" in rate.source
    assert 1e-8 < target.launch_seconds < 1e-3
    assert (told.phases, told.notes) == (["copies", "launches", *target.flops], [])
    write_target(target, tmp_path / "here.toml")
    again = read_target(tmp_path / "here.toml")
    assert present(again)
    assert again.rate("gemm.float32").reached == pytest.approx(target.rate("gemm.float32").reached)


@pytest.mark.slow
def test_what_cannot_be_done_is_left_out_and_said(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> object:
        raise RuntimeError("no kernel image\nmore")

    def refused(*_: object) -> list[Probe]:
        return [Probe("torch", 1.0, lambda: never)]

    def without_triton(*_: object) -> Iterator[Probe]:
        def cannot() -> object:
            raise BuildError("Triton cannot", "choose another")

        yield Probe("triton", 8.0, lambda: cannot)
        yield Probe("sdpa", 8.0, lambda: lambda: time.sleep(1e-3))
        yield Probe("slow", 8.0, lambda: lambda: time.sleep(5e-3))

    monkeypatch.setattr(probes, "linears", refused)
    monkeypatch.setattr(probes, "attention", without_triton)
    told = Told()
    target = measure(SMALL, told, seconds=0.002)
    assert set(target.flops) == {"attention.bfloat16"}
    best = target.rate("attention.bfloat16")
    assert best.source.endswith("; sdpa")
    assert 8 / 5e-3 < best.reached <= 8 / 1e-3
    assert told.notes == [
        "gemm.bfloat16 by torch is left out: no kernel image",
        "gemm.float32 by torch is left out: no kernel image",
        "attention.bfloat16 by triton is left out: Triton cannot: choose another",
    ]


@pytest.mark.slow
def test_an_interrupt_goes_through(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(probes, "linears", lambda *_: [Probe("torch", 1.0, lambda: interrupted)])
    with pytest.raises(KeyboardInterrupt):
        measure(SMALL, Told(), seconds=0.002)


def test_a_device_is_called_like_its_target_or_like_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, "NVIDIA H20-3e", (9, 0))
    known = ceilings._identity()
    assert (known.name, known.arch, known.devices) == ("h20", "sm_90a", ("NVIDIA H20-3e",))
    assert known.memory == 96 * 10**9
    here(monkeypatch, "NVIDIA GH200 480GB", (9, 0))
    other = ceilings._identity()
    assert (other.name, other.arch) == ("nvidia-gh200-480gb", "sm_90a")
    here(monkeypatch, "NVIDIA GeForce GTX 1080", (6, 1))
    with pytest.raises(H3CompileError, match="has the architecture sm_61, and nothing is compiled for it"):
        ceilings._identity()


def test_a_cpu_gets_less_work_and_never_more() -> None:
    large = replace(SMALL, rows=37_760, heads=56, attention_rows=37_760, copied=2**32)
    assert large.for_cpu() == replace(large, rows=64, heads=8, attention_rows=1024, copied=2**28)
    assert SMALL.for_cpu() == SMALL


def test_the_clock_tells_the_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    naps = iter([0.0, 0.05, 0.05, 0.002, 0.002, 0.002])

    def work() -> None:
        time.sleep(next(naps, 0.002))

    waited: list[int] = []
    assert 0.002 <= median_seconds(work, CPU, 0.11, lambda: waited.append(1)) < 0.02
    assert len(waited) >= 2 * 5
    assert median_seconds(lambda: time.sleep(0.01), CPU, 0.0) >= 0.01  # at least some samples


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, torch.int8, torch.float32])
def test_linears_are_counted_and_shaped(dtype: torch.dtype) -> None:
    made = probes.linears(((512, 256), (64, 128)), 32, dtype, META)
    assert [probe.amount for probe in made] == [2.0 * 32 * 512 * 256, 2.0 * 32 * 64 * 128]
    out = made[0].make()()
    assert isinstance(out, torch.Tensor) and out.shape == (32, 512)


def test_operands_are_never_zeros() -> None:
    copied = probes.copy(4096, CPU, CPU).make()()
    assert isinstance(copied, torch.Tensor) and copied.count_nonzero() > 3900
    for dtype in (torch.bfloat16, torch.int8, torch.float32):
        assert probes._random((64, 64), dtype, CPU).count_nonzero() > 3900
    (product,) = probes.linears(((48, 32),), 16, torch.float32, CPU)
    out = product.make()()
    assert isinstance(out, torch.Tensor) and out.count_nonzero() == 16 * 48


@pytest.mark.parametrize("name", [name for name in targets() if name != "cpu"])
def test_a_target_has_a_rate_for_every_attention_that_is_legal_there(name: str) -> None:
    target = targets()[name]
    launches: list[Launch] = []
    run = launches.append
    legal = {"attention.bfloat16" for _ in probes.attention(300, 4, target.arch, META, run)}
    for kind in ("float8_e4m3fn", "int8"):
        for probe in probes.sage(kind, 300, 4, 96, target.arch, META, run):
            legal.add(f"attention.{kind}")
            launches.clear()
            out = probe.make()()
            assert isinstance(out, torch.Tensor) and out.shape == (1, 300, 4, 128)
            # Quantizing is timed with what it is for.
            modules = [launch.spec.kernel.partition(":")[0] for launch in launches]
            assert modules[0] == "qk_prepare" and {*modules} > {"qk_prepare"}
            assert probe.amount == 4.0 * 300 * 300 * 4 * 128
    assert legal == {key for key in target.flops if key.startswith("attention")}
    assert legal <= set(FLOPS)


def test_a_kernel_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Spec] = []
    ran: list[Launch] = []

    def compile_spec(spec: Spec, arch: str) -> compiler.Cubin:
        compiled.append(spec)
        assert arch == "sm_90a"
        return compiler.Cubin(b"code", "entry", 4, 0, 0, 1, 2)

    monkeypatch.setattr(compiler, "compile_spec", compile_spec)
    monkeypatch.setattr(Kernels, "__call__", lambda self, launch: ran.append(launch))
    run = Compiling("sm_90a", CPU, tmp_path)
    one, other = (Launch(Spec(f"module:{name}", ()), (1, 1, 1), ()) for name in ("one", "other"))
    for launch in (one, one, other, one):
        run(launch)
    assert (compiled, ran) == ([one.spec, other.spec], [one, one, other, one])
    assert {path.name for path in tmp_path.iterdir()} == {one.spec.key, other.spec.key}


@pytest.mark.gpu
def test_a_gpu_is_measured(tmp_path: Path) -> None:
    torch.cuda.init()
    sizes = Sizes(((5376, 2048), (2048, 5376)), 4096, 8, 4096, 96, 2**28)
    told = Told()
    target = measure(sizes, told, seconds=0.05)
    assert target.kind == "cuda" and target.bandwidth is not None and target.host is not None
    assert {"gemm.bfloat16", "gemm.float32", "attention.bfloat16"} <= set(target.flops), told.notes
    assert 1e-7 < target.launch_seconds < 1e-4
    known = targets().get(target.name)
    if known is not None and known.bandwidth is not None:
        assert set(target.flops) == set(known.flops), told.notes
        assert 0.4 < target.bandwidth.reached / known.bandwidth.nominal < 1.1
        for key, rate in target.flops.items():
            assert rate.reached < 1.2 * known.rate(key).nominal, key
    write_target(target, tmp_path / "here.toml")
    assert present(read_target(tmp_path / "here.toml"))
