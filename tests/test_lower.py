"""Finalizing: what one machine left over, another one completes, as often as it takes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

import h3compile
from h3compile.engine.loader import open_engine
from h3compile.engine.manifest import ArtifactRecord
from h3compile.errors import EngineError
from h3compile.lower import Lowered, finalize
from h3compile.pipeline.testing import distance
from h3compile.plan.polynomial import Polynomial


class Notes:
    """A `Progress` that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def phase(self, name: str, total: int | None) -> None: ...

    def advance(self, count: int = 1) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def vary_installed() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Makes a build know the pass of the golden engine, which gives the block a variant."""
    spec = importlib.util.spec_from_file_location("golden_make", Path(__file__).parent / "golden" / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # where a pass's options are looked up
        spec.loader.exec_module(module)
        yield module.vary_installed


@pytest.mark.slow
def test_a_variant_waits_for_its_target_like_every_region(
    checkpoints: Callable[[torch.dtype], Path],
    vary_installed: Callable[[], AbstractContextManager[None]],
    tmp_path: Path,
) -> None:
    path = tmp_path / "b300.h3e"
    with vary_installed():
        engine = h3compile.build(
            str(checkpoints(torch.bfloat16)), passes="vary", target="b300", steps=(4,), output=path
        )
    assert engine.manifest.pending == (
        "request",
        "refiner",
        "request_2",
        "embed",
        "block",
        "block.dense",
        "head",
    )
    assert len(engine.manifest.measures) == engine.manifest.model_config_values["num_layers"]
    # Nothing is stored twice: a variant runs on the weights and tables of the region it stands in for.
    called = {f"{call.region}.{call.index}" for call in engine.manifest.calls if call.range}
    assert set(engine.manifest.partitions["transformer"].ranges) == called
    assert not any(
        "dense" in name for name in engine.manifest.files if name.startswith(("weights", "tables"))
    )


def test_an_engine_for_an_absent_gpu_waits_for_it(
    checkpoints: Callable[[torch.dtype], Path], tmp_path: Path
) -> None:
    told = Notes()
    path = tmp_path / "b300.h3e"
    engine = h3compile.build(
        str(checkpoints(torch.bfloat16)), target="b300", steps=(4,), output=path, progress=told
    )
    assert set(engine.manifest.pending) == {"request", "refiner", "request_2", "embed", "block", "head"}
    assert told.notes == ["b300 is not in this machine: run `h3compile finalize` where it is"]
    with pytest.raises(EngineError, match=r"is not finished: .* run `h3compile finalize .*` on a machine"):
        h3compile.load(path)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(EngineError, match="is for b300, which is not in this machine: run this on a machine"):
        finalize(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert open_engine(path).digest == engine.digest


@pytest.mark.slow
def test_finalize_lowers_what_is_pending_and_again_what_is_lowered(
    checkpoints: Callable[[torch.dtype], Path],
    packed: Callable[..., dict[str, torch.Tensor]],
    vary_installed: Callable[[], AbstractContextManager[None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "cpu.h3e"
    with monkeypatch.context() as patch, vary_installed():
        patch.setattr("h3compile.driver.present", lambda target: False)
        built = h3compile.build(
            str(checkpoints(torch.float32)), passes="vary", target="cpu", steps=(4,), output=path
        )
    assert "block.dense" in built.manifest.pending
    finished = finalize(path)
    assert finished.manifest.pending == () and finished.digest != built.digest
    assert {r.name for r in finished.manifest.regions if r.artifact} == set(built.manifest.pending)
    inputs = packed("t2va", text=7, video=33, audio=6, dtype=torch.float32)
    module = h3compile.load(path, device="cpu")
    first = module(**inputs, return_dict=False)
    # The variant and the region itself, both from their artifacts.
    assert [dict(step.variants) for step in module.measured()] == [{"block": "block.dense"}]
    module(**{**inputs, "timestep": torch.tensor([0.5, 0.75])})
    steps = [{tuple(value.tolist()) for value in step.values.values()} for step in module.measured()]
    assert steps == [{(0, 0)}, {(1, 4)}]

    told = Notes()
    assert finalize(path, progress=told).digest == finished.digest
    assert told.notes == ["nothing is pending: the engine is complete"]

    again = finalize(path, again=True)
    assert [r.artifact for r in again.manifest.regions] == [r.artifact for r in finished.manifest.regions]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cpu.h3e"]
    for one, other in zip(first, h3compile.load(path, device="cpu")(**inputs), strict=True):
        assert distance(one, other) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("passes", "chosen", "more"),
    [
        ("", {"attention.default": "cudnn"}, 2),  # a result in BF16
        ("", {"attention.default": "gluon"}, 0),
        ("sp(ring=2)", {"ring_attention.default": "torch"}, 12 / 2),  # of half of the rows what is merged
        ("sp(ring=2)", {"ring_attention.default": "gluon"}, 0),
    ],
)
def test_what_finalize_chooses_counts_in_what_a_forward_needs(
    checkpoints: Callable[[torch.dtype], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    passes: str,
    chosen: dict[str, str],
    more: float,
) -> None:
    """A build for an H200 elsewhere counts on a kernel of ours; there a library may prove to be faster."""
    path = tmp_path / "h200.h3e"
    built = h3compile.build(
        str(checkpoints(torch.bfloat16)),
        passes=passes,
        weightless=True,
        target="h200",
        steps=(4,),
        output=path,
    ).manifest

    def lower(regions, dims, backend, target, writer, progress, providers) -> Lowered:  # type: ignore[no-untyped-def]
        made = {}
        for region in regions:
            file = f"regions/{region.name}.txt"
            writer.write_text(file, "")
            dense = chosen if region.name == "block" else {}
            made[region.name] = ArtifactRecord(
                backend="inductor", target=target.name, path=file, providers=dense
            )
        return Lowered(made, ())

    monkeypatch.setattr("h3compile.lower.present", lambda target: True)
    monkeypatch.setattr("h3compile.lower.lower", lower)
    finished = finalize(path).manifest
    lengths = {"rows": 1000, "video_rows": 900, "audio_rows": 60, "text_rows": 40, "timesteps": 2}
    lengths |= {f"local_{name}": length // 2 for name, length in lengths.items()}
    before, after = (
        max(Polynomial.parse(text).at(lengths) for text in manifest.activations)
        for manifest in (built, finished)
    )
    assert after - before == more * 8 * 16 * 1000  # the tiny model's heads
