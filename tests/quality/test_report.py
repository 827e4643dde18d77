"""The report: complete, self-contained, and true to the manifest."""

from __future__ import annotations

import html
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import fx

from h3compile.engine.manifest import (
    ArtifactRecord,
    CallRecord,
    Manifest,
    PartitionRecord,
    PassRecord,
    PortRecord,
    RangeRecord,
    RegionRecord,
    TableRecord,
)
from h3compile.pipeline.base import Tier
from h3compile.pipeline.manager import PassRun
from h3compile.program.facts import InputFact, ModelFacts
from h3compile.program.program import Call, Program
from h3compile.program.region import Port, Region
from h3compile.program.residency import Residency
from h3compile.program.stages import Stage
from h3compile.program.weights import Load
from h3compile.quality.planned import Planned
from h3compile.quality.report import write_report
from h3compile.quality.summary import (
    artifact_size,
    folder_sizes,
    operators,
    program_weights_by_stage,
    weights_by_stage,
)
from h3compile.quality.units import forwards, size

BLOCKS = 50
FILES = {
    "engine.json": 90_000,
    "regions/schedule.json": 4_000,
    "regions/block.json": 16_000,
    "regions/block/artifact": 6_200_000,
    "weights/transformer/block.0.safetensors": 771_000_000,
    "tables/transformer/block.safetensors": 948_000_000,
}
OPERATORS = {
    "schedule": Counter({"aten.linear.default": 2, "aten.silu.default": 2}),
    "block": Counter({"aten.linear.default": 4, "aten.rms_norm.default": 4, "aten.mul.Tensor": 14}),
}


RUNS = (
    PassRun(
        "canonicalize",
        "canonicalize",
        Tier.EXACT,
        0.41,
        {"assertion": 320, "cast": 61},
        Counter(
            {
                "aten._to_copy.default": 61,
                "aten._assert_tensor_metadata.default": 320,
                "aten.linear.default": 330,
            }
        ),
        Counter({"aten.linear.default": 330}),
        1,
        1,
    ),
    PassRun(
        "outline",
        "outline",
        Tier.EXACT,
        1.92,
        {"block": 50, "refiner": 2},
        Counter({"aten.linear.default": 330, "aten.mul.Tensor": 700}),
        Counter({"aten.linear.default": 24, "aten.mul.Tensor": 20}),
        1,
        5,
    ),
    PassRun(
        "fuse", "fuse(norm=true)", Tier.ROUNDING, 0.2, {}, Counter({"a.b": 1}), Counter({"a.b": 1}), 5, 5
    ),
)


def ranges(nbytes: int, *names: str) -> dict[str, RangeRecord]:
    return {name: RangeRecord(nbytes=nbytes, slots=()) for name in names}


def manifest_of(**changes: object) -> Manifest:
    hidden = PortRecord(name="hidden", dtype="bfloat16", shape=(1, "rows", 5376))
    block = RegionRecord(
        name="block",
        inputs=(hidden, PortRecord(name="modulation", dtype="bfloat16", shape=("timesteps", 96768))),
        weights=(),
        outputs=(hidden,),
        graph="regions/block.json",
        artifact=ArtifactRecord(backend="inductor", target="h200", path="regions/block"),
    )
    schedule = RegionRecord(
        name="block.schedule",
        inputs=(PortRecord(name="temb", dtype="bfloat16", shape=("timesteps", 2688)),),
        weights=(),
        outputs=(PortRecord(name="modulation", dtype="bfloat16", shape=("timesteps", 96768)),),
        graph="regions/schedule.json",
    )
    calls = [
        CallRecord(region=region, index=i, stage=stage, inputs=(), outputs=(), range=f"{region}.{i}")
        for region, stage in (("block.schedule", "schedule"), ("block", "step"))
        for i in range(BLOCKS)
    ]
    cold = ranges(520_000_000, *(f"block.schedule.{i}" for i in range(BLOCKS)))
    hot = ranges(771_000_000, *(f"block.{i}" for i in range(BLOCKS)))
    partition = PartitionRecord(
        checkpoint="MiniMax-H3/transformer",
        files={},
        digest="0123456789abcdef0123",
        ranges=cold | hot,
        tables=TableRecord(timesteps=(0,), files={}),
    )
    values: dict[str, object] = {
        "model": "MiniMax-H3",
        "model_config_values": {"num_layers": 50, "patch_size": (1, 2, 2)},
        "dtype": "bfloat16",
        "inputs": (),
        "input_stages": {},
        "outputs": (),
        "dims": {"rows": {"hint": 64, "largest": 4096}},
        "regions": (schedule, block),
        "calls": tuple(calls),
        "tables": ("modulation.0",),
        "partitions": {"transformer": partition},
        "passes": tuple(
            PassRecord(spelled=run.spelled, tier=run.tier.value, matches=dict(run.matches)) for run in RUNS
        ),
        "backend": "inductor",
        "target": "h200",
        "arch": "sm_90a",
        "versions": {"h3compile": "0.1.0", "torch": "2.14.1"},
        "model_path": None,
        "schedules": (50,),
        "weights": "copied",
    }
    return Manifest.model_validate(values | changes)


class Page(HTMLParser):
    """What a reader's browser would see: rows of cells, links out, unclosed tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.references: list[str] = []
        self.headers_without_scope = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.references += [str(found[key]) for key in ("src", "href") if key in found]
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.headers_without_scope += tag == "th" and "scope" not in found

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.rows and {"td", "th"} & set(self.open):
            self.rows[-1][-1] = " ".join(f"{self.rows[-1][-1]} {data}".split())

    def row(self, first: str) -> list[str]:
        return next(row for row in self.rows if first in row[:2])


def report(tmp_path: Path, manifest: Manifest, **changes: object) -> str:
    arguments: dict[str, object] = {
        "passes": RUNS,
        "operators": OPERATORS,
        "weights_before": {"step": 66_240_000_000},
        "files": FILES,
        "seconds": {"trace": 3.2, "passes": 2.5, "lower": 21.0},
    }
    path = tmp_path / "report.html"
    write_report(manifest, path, **(arguments | changes))  # type: ignore[arg-type]
    return path.read_text(encoding="utf-8")


def test_the_page_is_whole_and_needs_no_network(tmp_path: Path) -> None:
    text = report(tmp_path, manifest_of())
    page = Page(text)
    assert page.open == []
    assert page.references == []
    assert not re.search(r"https?://|@import|url\(", text)
    assert page.headers_without_scope == 0


def test_the_tables_tell_what_the_passes_did(tmp_path: Path) -> None:
    page = Page(report(tmp_path, manifest_of()))
    number, spelled, tier, seconds, matches, regions, operators_, difference = page.row("outline")
    assert (number, spelled, tier, seconds) == ("2", "outline", "exact", "1.92")
    assert (matches, regions, operators_) == ("50 block 2 refiner", "1 → 5", "1,030 → 44")
    assert difference == "-680 aten.mul.Tensor -306 aten.linear.default"
    assert page.row("fuse(norm=true)")[4] == "none"
    assert page.row("fuse(norm=true)")[7] == "same operators"


def test_the_tables_tell_regions_weights_and_files(tmp_path: Path) -> None:
    page = Page(report(tmp_path, manifest_of()))
    assert page.row("block") == [
        "block",
        "50",
        "step",
        "hidden bfloat16 [1, rows, 5376] modulation bfloat16 [timesteps, 96768] "
        "→ hidden bfloat16 [1, rows, 5376]",
        "735.3 MiB",
        "22 aten.mul.Tensor 14 aten.linear.default 4 aten.rms_norm.default 4",
        "5.9 MiB",
    ]
    assert page.row("step")[2:4] == ["61.7 GiB", "35.9 GiB"]
    assert page.row("schedule")[2:4] == ["0 B", "24.2 GiB"]
    assert page.row("tables/")[1:3] == ["1", "904.1 MiB"]


def test_both_numbers_of_a_schedule_and_the_fingerprint_are_shown(tmp_path: Path) -> None:
    manifest = manifest_of()
    text = report(tmp_path, manifest)
    assert "50 grid points = 49 forwards" in text
    assert manifest.resolved_fingerprint() in text


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    text = report(
        tmp_path, manifest_of(pending=("block",), weights="none", schedules=()), passes=(), notes=("a < b",)
    )
    assert "Not finished: block" in text
    assert "Built without weights" in text
    assert "No pass ran." in text
    assert "a &lt; b" in text and "a < b" not in text


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    hostile = '<script>alert("x")</script>'
    text = report(tmp_path, manifest_of(model=hostile))
    assert "<script" not in text
    assert hostile in html.unescape(text)


def test_weights_count_once_in_the_stage_that_reads_them_most() -> None:
    shared = [
        CallRecord(region="a", index=0, stage="request", inputs=(), outputs=(), range="w"),
        CallRecord(region="b", index=0, stage="step", inputs=(), outputs=(), range="w"),
    ]
    partition = PartitionRecord(
        checkpoint=None, files={}, digest=None, ranges=ranges(100, "w") | ranges(7, "spare")
    )
    manifest = manifest_of(calls=tuple(shared), partitions={"transformer": partition})
    assert weights_by_stage(manifest, partition) == {"step": 100, "unused": 7}


def test_an_artifact_is_a_file_or_a_folder() -> None:
    region = manifest_of().regions[1]
    assert (
        artifact_size(region, {"regions/block/a": 1, "regions/block/b/c": 2, "regions/block.json": 40}) == 3
    )
    assert artifact_size(region, {"regions/block": 5}) == 5
    assert artifact_size(manifest_of().regions[0], FILES) == 0


def test_folders_are_summed() -> None:
    assert folder_sizes({"a/x": 1, "a/b/y": 2, "z": 3}) == {"a/": (2, 3), "z": (1, 3)}


def test_operators_are_counted_by_name() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(2):
        x = graph.call_function(torch.ops.aten.silu.default, (x,))
    graph.output((x,))
    port = Port("x", torch.float32, (1,))
    assert operators(Region("r", graph, (port,), (), (port,))) == {"aten.silu.default": 2}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (26_020_000_000, "24.2 GiB"),
        (3 * 1024**5, "3072.0 TiB"),
    ],
)
def test_sizes_read_well(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_forwards_are_one_fewer_than_grid_points() -> None:
    assert forwards(50) == "50 grid points = 49 forwards"


def test_a_programs_weights_count_in_the_stage_that_reads_them_most() -> None:
    def region(name: str, inputs: int, weights: int) -> Region:
        graph = fx.Graph()
        places = [graph.placeholder(f"p{i}") for i in range(inputs + weights)]
        value = places[0]
        for other in places[1:]:
            value = graph.call_function(torch.ops.aten.add.Tensor, (value, other))
        graph.output((value,))
        ports = tuple(Port(f"p{i}", torch.float32, (4,)) for i in range(inputs + weights))
        return Region(name, graph, ports[:inputs], ports[inputs:], (Port("out", torch.float32, (4,)),))

    facts = ModelFacts(
        name="toy",
        config={},
        dims=(),
        inputs=(
            InputFact("text", torch.float32, (4,), Stage.REQUEST),
            InputFact("latents", torch.float32, (4,), Stage.STEP),
        ),
        outputs=("y",),
        repeats=(),
        segments=(),
        expected={},
    )
    program = Program(
        facts=facts,
        regions={"refine": region("refine", 1, 2), "block": region("block", 2, 1)},
        calls=(
            Call("refine", 0, ("text",), ("own", "shared"), ("h",)),
            Call("block", 0, ("h", "latents"), ("shared",), ("y",)),
        ),
        outputs=("y",),
        weights={name: Load(name, (4,), torch.float32) for name in ("own", "shared")},
    )
    assert program_weights_by_stage(program) == {"step": 16, "request": 16}


def test_weights_after_can_be_given_where_the_manifest_has_none(tmp_path: Path) -> None:
    text = report(tmp_path, manifest_of(partitions={}, weights="none"), weights_after={"step": 2**30})
    assert Page(text).row("step")[2:4] == ["61.7 GiB", "1.0 GiB"]


def test_a_variant_says_for_whom_and_when(tmp_path: Path) -> None:
    plain = manifest_of()
    block = next(region for region in plain.regions if region.name == "block")
    dense = block.model_copy(update={"name": "block.dense"})
    when = ({"kind": "shorter", "dim": "rows", "than": 16}, {"kind": "noisier", "than": 0.97})
    varied = manifest_of(
        regions=(dense, *plain.regions),  # on purpose before the region it stands in for
        variants={"block": [{"region": "block.dense", "when": condition} for condition in when]},
    )
    rows = Page(report(tmp_path, varied)).rows
    names = [row[0] for row in rows if row and row[0] in ("block.schedule", "block", "block.dense")]
    assert names == ["block.schedule", "block", "block.dense"]
    base, variant = (next(row for row in rows if row and row[0] == name) for name in names[1:])
    assert (base[1:3], base[4]) == (["50", "step"], variant[4])
    assert variant[1:3] == ["50", "step for block when rows < 16 or sigma > 0.97"]


def test_a_plan_is_shown_with_its_memory_and_its_picture(tmp_path: Path) -> None:
    blocks = tuple(f"block.{index}" for index in range(4))
    picture = "data:image/svg+xml;base64,PHN2Zy8+"
    kinds = {"GPU, denoise": {"slots": 2**30, "activations": 3 * 2**30}, "host": {"pinned": 2**31}}
    found = Planned(Residency(blocks, blocks[:1], 2), {"A step": "0.5 s"}, kinds, picture)
    page = Page(text := report(tmp_path, manifest_of(), planned=found))
    assert page.open == [] and page.headers_without_scope == 0
    for told in (
        "1 of 4 stay on the device",
        "in 2 slots, mode local",
        "0.5 s",
        "4.0 GiB",
        "3.0 GiB activations",
    ):
        assert told in text, told
    assert f'src="{picture}" alt="Memory' in text


def test_a_plan_without_a_prediction_says_why(tmp_path: Path) -> None:
    residency = Residency(("block.0", "block.1"), ("block.0", "block.1"), 0)
    text = report(tmp_path, manifest_of(), planned=Planned(residency, missing=("nobody knows",)))
    assert "2 of 2 stay on the device" in text and "nobody knows." in text
    assert "The others" not in text and "<img" not in text and "Memory by kind" not in text
    assert "Where the blocks live" not in report(tmp_path, manifest_of())
