"""Engines of every schema version so far still load, and answer as they did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import h3compile
from h3compile.engine.manifest import SCHEMA_VERSION
from h3compile.pipeline.testing import distance
from h3compile.runtime.activations import activations_for

GOLDEN = sorted(Path(__file__).parent.glob("v*.h3e"))


def test_the_current_schema_has_its_golden_engine() -> None:
    assert Path(__file__).parent / f"v{SCHEMA_VERSION}.h3e" in GOLDEN


@pytest.mark.parametrize("engine", GOLDEN, ids=lambda path: path.stem)
def test_it_loads_and_answers_as_it_did(engine: Path) -> None:
    kept = load_file(engine.with_suffix(".safetensors"))
    outputs = {name: kept.pop(name) for name in ("sample", "audio_sample")}
    tiles = kept.pop("tiles", None)  # since schema 2
    module = h3compile.load(engine, device="cpu")
    for (name, reference), value in zip(outputs.items(), module(**kept, return_dict=False), strict=True):
        # Another torch or CPU may round otherwise; a wrong weight or table is off by far more.
        assert distance(value, reference) < 2**-6, name
    assert module.stats.table_hits == 1 and module.stats.table_misses == 1
    plan = module.manifest.plan
    assert (plan is not None) == (module.manifest.schema_version >= 3)
    if plan is not None:
        assert (plan.blocks, plan.resident, plan.slots) == (("block.0", "block.1"), ("block.0",), 2)
    needed = activations_for(module.manifest, {"rows": 100_000, "video_rows": 99_000})
    assert (needed is not None) == (module.manifest.schema_version >= 4)
    if needed is not None:  # 24 channels in BF16, and no less
        assert needed.nbytes > 48 * 100_000
    if tiles is None:
        assert module.measured() == ()
        return
    (step,) = module.measured()
    assert torch.equal(torch.stack(list(step.values.values())), tiles)


@pytest.mark.parametrize("engine", GOLDEN, ids=lambda path: path.stem)
def test_the_check_can_fail(engine: Path) -> None:
    kept = load_file(engine.with_suffix(".safetensors"))
    reference = kept.pop("sample")
    kept.pop("audio_sample")
    tiles = kept.pop("tiles", None)
    kept["timestep"] = torch.tensor([0.95, 0.999])
    module = h3compile.load(engine, device="cpu")
    value, _ = module(**kept, return_dict=False)
    assert distance(value, reference) > 2**-6
    for step in module.measured():
        assert tiles is not None and not torch.equal(torch.stack(list(step.values.values())), tiles)
