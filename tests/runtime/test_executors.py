from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from h3compile.engine.loader import open_engine
from h3compile.engine.manifest import ArtifactRecord, RegionRecord
from h3compile.errors import EngineError
from h3compile.runtime.executors import eager, executor_for
from h3compile.runtime.pool import Pool

CPU = torch.device("cpu")


def region(engine: Path, name: str) -> RegionRecord:
    return next(region for region in open_engine(engine).manifest.regions if region.name == name)


def test_a_region_runs_eagerly_with_inputs_then_weights(kit) -> None:
    run = eager(kit.regions()["refine"], CPU)
    text, weight = torch.randn(1, 3, 8), torch.randn(8, 8)
    (refined,) = run([text, weight])
    assert torch.equal(refined, text + torch.nn.functional.linear(text, weight))


def test_one_executor_serves_every_call_and_every_load(engine: Path) -> None:
    pool, record = Pool(), region(engine, "block")
    first = executor_for(open_engine(engine), record, CPU, pool, interpret=False)
    assert executor_for(open_engine(engine), record, CPU, pool, interpret=True) is first
    assert executor_for(open_engine(engine), record, CPU, Pool(), interpret=False) is not first


def test_an_artifact_is_loaded_once_and_a_schedule_region_never_uses_it(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Path] = []

    def load_artifact(path: Path, device: torch.device):
        loaded.append(path)

        def consume(arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            return (arguments[0],)

        return SimpleNamespace(consume=consume, rehearse=consume)

    monkeypatch.setattr("h3compile.runtime.artifact.load_artifact", load_artifact)
    artifact = ArtifactRecord(backend="inductor", target="cpu", path="regions/refine.json")
    record = region(engine, "refine").model_copy(update={"artifact": artifact})
    folder, pool = open_engine(engine), Pool()
    lowered = [executor_for(folder, record, CPU, pool, interpret=False) for _ in range(2)]
    interpreted = executor_for(folder, record, CPU, pool, interpret=True)
    assert loaded == [engine / "regions/refine.json"]
    assert lowered[0] is lowered[1] is not interpreted
    x, zero = torch.ones(1, 1, 8), torch.ones(8, 8)
    assert torch.equal(lowered[0]([x, zero])[0], x) and not torch.equal(interpreted([x, zero])[0], x)


def test_an_artifact_of_an_unknown_backend_is_refused(engine: Path) -> None:
    artifact = ArtifactRecord(backend="abacus", target="cpu", path="regions/refine.json")
    record = region(engine, "refine").model_copy(update={"artifact": artifact})
    with pytest.raises(EngineError, match=r"region refine was lowered by 'abacus'.*upgrade"):
        executor_for(open_engine(engine), record, CPU, Pool(), interpret=False)


def test_a_graph_with_other_ports_than_its_record_is_refused(engine: Path) -> None:
    record = region(engine, "refine").model_copy(update={"weights": ()})
    with pytest.raises(EngineError, match=r"regions/refine.json does not have the ports engine.json names"):
        executor_for(open_engine(engine), record, CPU, Pool(), interpret=False)
