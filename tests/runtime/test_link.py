from __future__ import annotations

from pathlib import Path

import pytest

from h3compile.engine.loader import open_engine
from h3compile.engine.manifest import CallRecord, Manifest, ShorterRecord, VariantRecord
from h3compile.errors import EngineError
from h3compile.program.conditions import Noisier, Shorter, Variant
from h3compile.runtime.link import link


@pytest.fixture
def manifest(engine: Path) -> Manifest:
    return open_engine(engine).manifest


def with_call(manifest: Manifest, name: str, **changes: object) -> Manifest:
    """``manifest`` with one call changed."""
    calls = tuple(
        CallRecord.model_validate({**call.model_dump(), **changes})
        if f"{call.region}.{call.index}" == name
        else call
        for call in manifest.calls
    )
    return manifest.model_copy(update={"calls": calls})


def test_calls_fall_into_their_stages(manifest: Manifest) -> None:
    program = link(manifest)
    assert [call.region for call in program.schedule] == ["schedule", "mod", "mod"]
    assert [call.region for call in program.request] == ["project", "refine", "refine", "angles"]
    assert [call.region for call in program.step] == ["embed", "block", "block", "head"]
    assert [port.name for port in program.tables] == ["out", "table_0", "table_1"]
    assert program.request_values == ("text", "cos")
    assert program.timestep is not None and program.timestep.name == "timestep"


def test_without_tables_schedule_calls_are_steps(manifest: Manifest) -> None:
    program = link(manifest.model_copy(update={"tables": ()}))
    assert program.schedule == () and program.timestep is None
    assert [call.region for call in program.step] == [
        "schedule",
        "mod",
        "mod",
        "embed",
        "block",
        "block",
        "head",
    ]


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("block.0", {"region": "lock"}, "lock.0 calls a region that is not there"),
        ("refine.0", {"inputs": ("nothing",)}, "refine.0 reads nothing before it exists"),
        ("refine.0", {"outputs": ("text_0",)}, "text_0 is made twice"),
        ("refine.0", {"inputs": ("table_0",)}, "refine.0, request stage, reads table_0, schedule stage"),
        ("refine.0", {"inputs": ("text_0", "text_0")}, "refine.0 does not fit the ports of its region"),
        ("refine.0", {"range": None}, "refine.0 has no weights"),
        ("head.0", {"outputs": ("a", "b")}, "the output sample is made by no call"),
        (
            "block.1",
            {"inputs": ("x_1", "cos", "timestep_indices", "token_tags", "table_0")},
            "list of tables",
        ),
    ],
)
def test_a_program_that_cannot_run_is_refused(
    manifest: Manifest, name: str, changes: dict[str, object], line: str
) -> None:
    with pytest.raises(EngineError, match=f"the engine's program cannot be executed.*{line}"):
        link(with_call(manifest, name, **changes))


def test_two_schedule_inputs_are_refused(manifest: Manifest) -> None:
    stages = {**manifest.input_stages, "timestep_indices": "schedule"}
    with pytest.raises(EngineError, match="its tables depend on more than one input"):
        link(manifest.model_copy(update={"input_stages": stages}))


# --- variants and measures ---


@pytest.fixture
def varied_manifest(varied: Path) -> Manifest:
    return open_engine(varied).manifest


def test_variants_and_measures_are_linked(manifest: Manifest, varied_manifest: Manifest) -> None:
    program = link(varied_manifest)
    assert program.variants == {
        "block": (Variant("block.dense", Shorter("rows", 8)), Variant("block.dense", Noisier(0.9)))
    }
    assert program.measures == ("tiles_0", "tiles_1")
    assert [call.region for call in program.step] == ["embed", "block", "block", "head"]
    assert (link(manifest).variants, link(manifest).measures) == ({}, ())


def short(region: str, dim: str = "rows") -> tuple[VariantRecord, ...]:
    return (VariantRecord(region=region, when=ShorterRecord(dim=dim, than=4)),)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"variants": {"block": short("lock")}}, "the variant lock does not fit the ports of block"),
        (
            {"variants": {"embed": short("block.dense")}},
            "the variant block.dense does not fit the ports of embed",
        ),
        ({"variants": {"block": short("block")}}, "block is a variant of block and more than that"),
        ({"variants": {"block": short("head")}}, "head is a variant of block and more than that"),
        (
            {"variants": {"block": short("block.dense"), "block.dense": short("block.dense")}},
            "block.dense is a variant of block and more than that",
        ),
        (
            {"variants": {"block": short("block.dense", "columns")}},
            "the variant block.dense asks for the length columns, which no input has",
        ),
        ({"measures": ("x_1",)}, "x_1 is no measure of a step"),
        ({"measures": ("sample",)}, "sample is no measure of a step"),
        ({"measures": ("text_0",)}, "text_0 is no measure of a step"),
        ({"measures": ("nothing",)}, "nothing is no measure of a step"),
    ],
)
def test_variants_that_cannot_run_are_refused(
    varied_manifest: Manifest, changes: dict[str, object], line: str
) -> None:
    with pytest.raises(EngineError, match=f"the engine's program cannot be executed.*{line}"):
        link(varied_manifest.model_copy(update=changes))


def test_a_variant_of_early_work_is_refused(varied_manifest: Manifest) -> None:
    refine = next(region for region in varied_manifest.regions if region.name == "refine")
    other = refine.model_copy(update={"name": "refine.other"})
    changes = {"regions": (*varied_manifest.regions, other), "variants": {"refine": short("refine.other")}}
    with pytest.raises(EngineError, match=r"refine.0 has variants and does not run in the step"):
        link(varied_manifest.model_copy(update=changes))


def test_a_measure_is_two_counts(varied_manifest: Manifest) -> None:
    regions = [
        region.model_copy(
            update={"outputs": (region.outputs[0], region.outputs[1].model_copy(update={"shape": (3,)}))}
        )
        if region.name.startswith("block")
        else region
        for region in varied_manifest.regions
    ]
    with pytest.raises(EngineError, match="tiles_0 is no measure of a step"):
        link(varied_manifest.model_copy(update={"regions": tuple(regions)}))
