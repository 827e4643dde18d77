"""The claims of tests/e2e, on a CUDA device: built for it, loaded on it, compared there."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

import h3compile
from h3compile.engine.loader import open_engine
from h3compile.models.tiny import write_tiny
from h3compile.models.trace import trace
from h3compile.pipeline.testing import ROUNDING_BOUND, distance, weight_source
from h3compile.program.interpreter import Interpreter

pytestmark = pytest.mark.gpu

Inputs = dict[str, torch.Tensor]
TASKS = ("t2va", "fl2va", "ref2va")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
KINDS = {
    "hoisted": ("eager", "-fold-schedule,-fuse"),
    "folded": ("eager", "-fuse"),
    "inductor": ("inductor", ""),
}


@pytest.fixture(scope="module")
def engine(
    checkpoints: Callable[[torch.dtype], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """A function from dtype, kind and folded schedule to an engine built on and for this GPU."""
    built: dict[tuple[torch.dtype, str, int], Path] = {}

    def of(dtype: torch.dtype, kind: str, steps: int = 4) -> Path:
        key = (dtype, kind, steps)
        if key not in built:
            backend, passes = KINDS[kind]
            output = tmp_path_factory.mktemp("gpu") / f"{kind}.h3e"
            h3compile.build(
                str(checkpoints(dtype)), passes=passes, backend=backend, steps=(steps,), output=output
            )
            built[key] = output
        return built[key]

    return of


@pytest.fixture(scope="module")
def model(transformers_of: Callable[..., torch.nn.Module]) -> Callable[[torch.dtype], torch.nn.Module]:
    """A function from dtype to Diffusers' transformer on the GPU."""
    from copy import deepcopy

    moved: dict[torch.dtype, torch.nn.Module] = {}

    def of(dtype: torch.dtype) -> torch.nn.Module:
        if dtype not in moved:
            moved[dtype] = deepcopy(transformers_of(dtype)).to("cuda")
        return moved[dtype]

    return of


@pytest.fixture(scope="module")
def forwards(requests_of: Callable[..., Iterator[Inputs]]) -> Callable[[torch.dtype], list[Inputs]]:
    """A function from dtype to the inputs of all tasks and row counts, on the GPU."""

    def of(dtype: torch.dtype) -> list[Inputs]:
        return [
            {name: value.cuda() for name, value in inputs.items()}
            for task in TASKS
            for inputs in requests_of(task, dtype)
        ]

    return of


def _plain(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        outputs: tuple[torch.Tensor, ...] = model(**inputs, return_dict=False)
    return outputs


# A request's outputs are few numbers, and one draw of their rounding errors spreads by a third.
DRAWS = 4


def _redrawn(inputs: Inputs, seed: int) -> Inputs:
    """The same request with other latents and text; draw 0 is the request itself."""
    if seed == 0:
        return inputs
    generator = torch.Generator("cuda").manual_seed(seed)
    drawn = dict(inputs)
    for name in ("hidden_states", "audio_hidden_states", "encoder_hidden_states"):
        value = inputs[name]
        drawn[name] = torch.randn(value.shape, generator=generator, device="cuda").to(value.dtype)
    return drawn


@DTYPES
def test_hoisted_engine_has_the_bits_of_diffusers(dtype, engine, model, forwards) -> None:
    module = h3compile.load(engine(dtype, "hoisted"))
    for inputs in forwards(dtype):
        for ours, theirs in zip(module(**inputs), _plain(model(dtype), inputs), strict=True):
            assert ours.is_cuda and torch.equal(ours, theirs)


@DTYPES
def test_folded_engine_has_the_bits_of_each_timestep_alone(
    dtype, engine, model, forwards, diffusers_alone
) -> None:
    module = h3compile.load(engine(dtype, "folded"))
    for inputs in forwards(dtype):
        for ours, theirs in zip(module(**inputs), diffusers_alone(model(dtype), inputs), strict=True):
            assert torch.equal(ours, theirs)
        for ours, theirs in zip(module(**inputs), _plain(model(dtype), inputs), strict=True):
            assert distance(ours, theirs) < 2**-8


@DTYPES
def test_inductor_engine_is_no_further_from_float64(dtype, engine, model, forwards) -> None:
    module = h3compile.load(engine(dtype, "inductor"))
    config = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in model(dtype).config.items()
        if not key.startswith("_")
    }
    state = model(dtype).state_dict()
    program = trace(config, {name: tensor.dtype for name, tensor in state.items()})
    exact = Interpreter(program, weight_source(state), device="cuda", dtype=torch.float64)
    squares = {name: [0.0, 0.0] for name in program.outputs}
    for inputs, seed in itertools.product(forwards(dtype), range(DRAWS)):
        drawn = _redrawn(inputs, seed)
        truth = exact(drawn)
        for i, outputs in enumerate((module(**drawn), _plain(model(dtype), drawn))):
            for (name, reference), value in zip(truth.items(), outputs, strict=True):
                squares[name][i] += distance(value, reference) ** 2
    for name, (ours, theirs) in squares.items():
        ratio = (ours / theirs) ** 0.5
        print(f"{name}: {ratio:.3f} of Diffusers' distance to float64")
        assert ratio <= ROUNDING_BOUND, name


CHILD = """
import json, os, sys, time
from pathlib import Path
import torch
torch.zeros(1, device="cuda")
import h3compile
started = []
sys.addaudithook(lambda event, args: started.append(str(args[0])) if event == "subprocess.Popen" else None)
begun = time.perf_counter()
module = h3compile.load(sys.argv[1])
torch.cuda.synchronize()
seconds = time.perf_counter() - begun
inputs = torch.load(sys.argv[2], weights_only=True)
outputs = [[o.cpu() for o in module(**i)] for i in inputs]
torch.save(outputs, sys.argv[3])
caches = [Path(os.environ[key]) for key in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
written = [str(path) for cache in caches for path in cache.rglob("*")]
compilers = [m for m in sys.modules if m.startswith(("torch._inductor.compile_fx", "triton.compiler"))]
print(json.dumps([started, written, compilers, seconds]))
"""


def test_a_new_process_compiles_nothing(engine, forwards, tmp_path: Path) -> None:
    """Empty caches, no compiler on the machine, lengths the build never saw, M from 1 to 4."""
    path = engine(torch.bfloat16, "inductor")
    inputs = forwards(torch.bfloat16)
    module = h3compile.load(path)
    expected = [[output.cpu() for output in module(**i)] for i in inputs]
    torch.save(inputs, tmp_path / "inputs.pt")
    environment = {
        **os.environ,
        "CXX": "/nonexistent",
        "CC": "/nonexistent",
        "TRITON_PTXAS_PATH": "/nonexistent",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    command = [sys.executable, "-c", CHILD, str(path), str(tmp_path / "inputs.pt"), str(tmp_path / "out.pt")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    started, written, compilers, seconds = json.loads(done.stdout.splitlines()[-1])
    print(f"loaded in {seconds:.3f} s")
    assert (started, written, compilers) == ([], [], [])
    for ours, theirs in zip(torch.load(tmp_path / "out.pt", weights_only=True), expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


@DTYPES
def test_a_timestep_seen_later_has_the_bits_of_a_folded_one(dtype, engine, packed) -> None:
    folded, later = (h3compile.load(engine(dtype, "folded", steps)) for steps in (9, 4))
    t = folded.manifest.partitions["transformer"].tables.timesteps
    assert len(set(t) - set(later.manifest.partitions["transformer"].tables.timesteps)) > 8
    inputs = {
        k: v.cuda() for k, v in packed("fl2va", text=7, video=33, audio=6, condition=5, dtype=dtype).items()
    }
    values = torch.tensor(t, dtype=torch.int32).view(torch.float32).cuda()
    for first, second in itertools.pairwise(values):
        inputs["timestep"] = torch.stack((first, second))
        for one, other in zip(folded(**inputs), later(**inputs), strict=True):
            assert torch.equal(one, other)
    assert folded.stats.table_misses == 0 < later.stats.table_misses


def test_tables_of_cpu_and_gpu_differ_by_a_rounding(engine, checkpoints, tmp_path: Path) -> None:
    here = h3compile.load(engine(torch.bfloat16, "folded"))
    h3compile.build(
        str(checkpoints(torch.bfloat16)),
        target="cpu",
        backend="eager",
        steps=(4,),
        output=tmp_path / "cpu.h3e",
    )
    there = h3compile.load(tmp_path / "cpu.h3e", device="cpu")
    values = [0.0, 0.999]
    here.prepare(values)
    there.prepare(values)
    folders = [open_engine(engine(torch.bfloat16, "folded")), open_engine(tmp_path / "cpu.h3e")]
    for call in folders[0].manifest.partitions["transformer"].tables.files:
        one, other = (folder.load_table("transformer", call) for folder in folders)
        for name, value in one.items():
            scale = other[name].float().abs().max()
            assert (value.float() - other[name].float()).abs().max() <= 2**-7 * scale, name


def test_finalize_completes_what_a_machine_without_the_gpu_began(
    checkpoints, forwards, engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pending.h3e"
    with monkeypatch.context() as patch:
        patch.setattr("h3compile.driver.present", lambda target: False)
        pending = h3compile.build(str(checkpoints(torch.bfloat16)), steps=(4,), output=path).manifest.pending
    assert "block" in pending
    with pytest.raises(h3compile.errors.EngineError, match="h3compile finalize"):
        h3compile.load(path)
    from h3compile.lower import finalize

    assert finalize(path).manifest.pending == ()
    module, direct = h3compile.load(path), h3compile.load(engine(torch.bfloat16, "inductor"))
    inputs = forwards(torch.bfloat16)[1]
    for one, other in zip(module(**inputs), direct(**inputs), strict=True):
        # Its tables were folded on the CPU: within a rounding of those folded here.
        assert distance(one, other) < 2**-6


def test_a_whole_generation_agrees_with_diffusers(checkpoints, engine) -> None:
    from h3compile.models.generate import generate, load_pipeline
    from h3compile.models.request import Request

    request, _ = Request(prompt="a red kite over the dunes", width=64, height=64, steps=4, seed=3).resolve()
    folder = checkpoints(torch.float32)
    module = h3compile.load(engine(torch.float32, "inductor"))
    ours = generate(load_pipeline(folder, transformer=module, device="cuda"), request)
    theirs = generate(load_pipeline(folder, from_checkpoint=("transformer",), device="cuda"), request)
    error = (torch.as_tensor(ours.frames).double() - torch.as_tensor(theirs.frames).double()).pow(2).mean()
    psnr = 10 * torch.log10(255**2 / error.clamp_min(1e-12))
    print(f"PSNR {float(psnr):.1f} dB")
    assert psnr > 60
    torch.testing.assert_close(
        torch.as_tensor(ours.waveform), torch.as_tensor(theirs.waveform), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("passes", ["sp(ulysses=2)", "sp(ring=2)", "fp8,sage,sp(ulysses=2,exchange=fp8)"])
def test_what_ranks_exchange_is_lowered_where_there_is_one(tmp_path: Path, passes: str) -> None:
    # Kernels choose their configuration in a run, and nobody is there to exchange with.
    write_tiny(tmp_path / "tiny", attention_head_dim=128, rope_freq_dim=16)
    h3compile.build(str(tmp_path / "tiny"), passes=passes, steps=(4,), output=tmp_path / "x.h3e")
    manifest = open_engine(tmp_path / "x.h3e").manifest
    assert not manifest.pending and manifest.parallel is not None
