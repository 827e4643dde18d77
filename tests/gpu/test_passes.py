"""Engines with the lossy passes on a CUDA device: kernels against the references, forms, measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import h3compile
from h3compile.pipeline.testing import distance
from h3compile.runtime.forward import Forward
from h3compile.runtime.module import CompiledTransformer

pytestmark = pytest.mark.gpu

Inputs = dict[str, torch.Tensor]
PASSES = {
    "fuse": "",
    "fp8": "fp8",
    "sage": "sage",
    "all": "fp8,sage,skip(threshold=40.0,until=0.9)",
}
# Kernels and references quantize alike; a value near a tie moves by one step, and two layers add up.
APART = {"fuse": 8e-3, "fp8": 4e-2, "sage": 3e-2, "all": 4e-2}
# Odd lengths: one text row, M from 1 to 2, and fewer rows than a block of keys, which runs dense.
LENGTHS = (
    {"text": 1, "video": 301, "audio": 14, "timesteps": 1},
    {"text": 7, "video": 1190, "audio": 22, "timesteps": 2},
    {"text": 1, "video": 63, "audio": 22, "timesteps": 2},
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with heads of 128 channels, which the kernels take."""
    from h3compile.models.tiny import write_tiny

    root = tmp_path_factory.mktemp("wide") / "tiny"
    write_tiny(root, attention_head_dim=128, num_attention_heads=2, num_layers=2, rope_freq_dim=16)
    return root


@pytest.fixture(scope="module")
def built(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Path, CompiledTransformer]]:
    """A function from passes and a device to an engine and the module it loads as; references on the CPU."""
    made: dict[tuple[str, str], tuple[Path, CompiledTransformer]] = {}

    def of(passes: str, device: str) -> tuple[Path, CompiledTransformer]:
        if (passes, device) not in made:
            path = tmp_path_factory.mktemp("engines") / f"{passes}.{device}.h3e"
            target, backend = ("cpu", "eager") if device == "cpu" else ("auto", "inductor")
            h3compile.build(
                str(checkpoint),
                passes=PASSES[passes],
                target=target,
                backend=backend,
                steps=(4,),
                output=path,
            )
            made[passes, device] = path, h3compile.load(path, device=device)
        return made[passes, device]

    return of


@pytest.fixture(scope="module")
def engine(
    built: Callable[[str, str], tuple[Path, CompiledTransformer]],
) -> Callable[[str, str], CompiledTransformer]:
    """A function from passes and a device to the loaded engine."""
    return lambda passes, device: built(passes, device)[1]


@pytest.mark.parametrize("passes", PASSES)
def test_kernels_and_references_agree(
    passes: str, engine: Callable[[str, str], CompiledTransformer], packed: Callable[..., Inputs]
) -> None:
    for seed, lengths in enumerate(LENGTHS):
        inputs = packed("t2va", **lengths, seed=seed)
        expected = engine(passes, "cpu")(**inputs, return_dict=False)
        given = {name: value.cuda() for name, value in inputs.items()}
        for ours, theirs in zip(engine(passes, "cuda")(**given, return_dict=False), expected, strict=True):
            apart = distance(ours.cpu(), theirs.double())
            print(f"{passes}, {lengths}: {apart:.2e}")
            assert apart < APART[passes]


@pytest.mark.parametrize("passes", PASSES)
def test_values_of_a_step_are_placed_before_it_runs(
    passes: str,
    built: Callable[[str, str], tuple[Path, CompiledTransformer]],
    packed: Callable[..., Inputs],
) -> None:
    """No bit is another than with torch's allocator, and nothing is reserved but what was found to live."""
    path, module = built(passes, "cuda")
    plain = h3compile.load(path, share=module)
    plain._parts = replace(plain._parts, memory=None)
    plain._forward = Forward(plain._parts)
    large = {"text": 9, "video": 40_011, "audio": 80, "timesteps": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for seed, lengths in enumerate((*LENGTHS, large)):
            inputs = {name: value.cuda() for name, value in packed("t2va", **lengths, seed=seed).items()}
            expected = plain(**inputs, return_dict=False)
            for _ in range(2):
                assert all(map(torch.equal, module(**inputs, return_dict=False), expected)), lengths
    del expected
    module.release()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    module(**inputs)
    torch.cuda.synchronize()
    reserved, placed = torch.cuda.max_memory_reserved() - before, module.stats.bytes_activations
    print(f"{passes}: {placed:,} bytes placed, {reserved:,} more reserved")
    assert placed <= reserved < 1.02 * placed + (64 << 20)  # what is small comes in segments of 2 and 20 MiB


def test_the_engine_names_who_computes_what(engine: Callable[[str, str], CompiledTransformer]) -> None:
    records = {record.name: record for record in engine("all", "cuda").manifest.regions}
    artifact = records["block"].artifact
    assert artifact is not None
    operators = {name.partition("[")[0] for name in artifact.providers}
    assert {"linear_fp8.default", "sage_prepare.default", "sage_attention.skip"} <= operators
    assert sum(name.startswith("linear_fp8.default[") for name in artifact.providers) == 4
    dense = records["block.dense"].artifact
    assert dense is not None and "attention.skip" in dense.providers


def test_forms_by_sigma_and_length_and_what_was_skipped(
    engine: Callable[[str, str], CompiledTransformer], packed: Callable[..., Inputs]
) -> None:
    module = engine("all", "cuda")
    request = packed("t2va", **LENGTHS[1])
    inputs = {name: value.cuda() for name, value in request.items()}
    for t in (0.0, 0.05, 0.5):
        module(**{**inputs, "timestep": torch.tensor([t, t + 0.3], device="cuda")})
    steps = module.measured()
    assert [dict(step.variants) for step in steps] == [
        {"block": "block.unskipped"},
        {"block": "block.unskipped"},
        {},
    ]
    for step in steps:
        assert len(step.values) == 2
        for value in step.values.values():
            skipped, considered = value.tolist()
            assert considered > 0 and 0 <= skipped < considered
            assert skipped == 0 or not step.variants
    short = {name: value.cuda() for name, value in packed("t2va", **LENGTHS[2]).items()}
    module(**short)
    assert dict(module.measured()[-1].variants) == {"block": "block.dense"}


CHILD = """
import json, sys
import torch, h3compile
inputs, expected = torch.load(sys.argv[2], weights_only=True)
module = h3compile.load(sys.argv[1])
equal = [bool(torch.equal(o, e)) for o, e in zip(module(**inputs, return_dict=False), expected)]
print(json.dumps([equal, sorted(m for m in sys.modules if m.split(".")[0] == "triton")]))
"""


def test_a_new_process_has_the_bits_and_no_triton(
    built: Callable[[str, str], tuple[Path, CompiledTransformer]],
    packed: Callable[..., Inputs],
    tmp_path: Path,
) -> None:
    path, module = built("all", "cuda")
    inputs = {name: value.cuda() for name, value in packed("t2va", **LENGTHS[1]).items()}
    outputs = tuple(module(**inputs, return_dict=False))
    torch.save((inputs, outputs), tmp_path / "saved.pt")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "triton"), "CXX": "/nonexistent"}
    command = [sys.executable, "-c", CHILD, str(path), str(tmp_path / "saved.pt")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    equal, triton = json.loads(done.stdout.splitlines()[-1])
    assert equal == [True, True]
    assert triton == []
    assert not (tmp_path / "triton").exists()


def test_a_provider_that_is_named_is_used_or_refused(checkpoint: Path, tmp_path: Path) -> None:
    engine = h3compile.build(
        str(checkpoint), steps=(4,), providers={"attention": "triton"}, output=tmp_path / "named.h3e"
    )
    records = {record.name: record for record in engine.manifest.regions}
    artifact = records["block"].artifact
    assert artifact is not None and artifact.providers["attention.default"] == "triton"
