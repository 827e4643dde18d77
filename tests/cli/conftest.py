"""Running commands, and a small engine for them to look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import fx
from typer.testing import CliRunner, Result

from h3compile.cli.main import application
from h3compile.engine.layout import SlotSpec, lay_out
from h3compile.engine.manifest import Manifest
from h3compile.engine.writer import EngineWriter
from h3compile.program.region import Port, Region
from h3compile.program.serialize import region_to_json

Invoke = Callable[..., Result]


@pytest.fixture
def h3compile() -> Invoke:
    """Runs `h3compile ARGUMENTS` in this process."""

    def invoke(*arguments: str | Path) -> Result:
        return CliRunner().invoke(application(), [str(argument) for argument in arguments])

    return invoke


def region(name: str, inputs: int) -> Region:
    """``silu(x @ w)`` applied ``inputs`` times to the one input."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    y = x
    for _ in range(inputs):
        y = graph.call_function(torch.ops.aten.linear.default, (y, w))
        y = graph.call_function(torch.ops.aten.silu.default, (y,))
    graph.output((y,))
    port = Port("x", torch.bfloat16, (1, "rows", 4))
    return Region(name, graph, (port,), (Port("w", torch.bfloat16, (4, 4)),), (Port("y", *port_type(port)),))


def port_type(port: Port) -> tuple[torch.dtype, tuple[int | str, ...]]:
    return port.dtype, port.shape


def record(found: Region, artifact: str | None) -> dict[str, object]:
    def ports(kind: tuple[Port, ...]) -> list[dict[str, object]]:
        return [
            {"name": p.name, "dtype": str(p.dtype).removeprefix("torch."), "shape": p.shape} for p in kind
        ]

    return {
        "name": found.name,
        "inputs": ports(found.inputs),
        "weights": ports(found.weights),
        "outputs": ports(found.outputs),
        "graph": f"regions/{found.name}.json",
        "artifact": {"backend": "eager", "target": "cpu", "path": artifact} if artifact else None,
    }


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An engine of two regions, three calls and the partition ``transformer``."""
    return write(tmp_path / "toy.h3e")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The same engine as if two ranks shared heads and their rows went round four stretches."""
    parallel = {"ulysses": 2, "ring": 4, "exchange": "plain", "rows": "rows", "kinds": []}
    return write(tmp_path / "shared.h3e", parallel=parallel)


@pytest.fixture
def varied(tmp_path: Path) -> Path:
    """The same engine whose blocks have a variant and are said to measure something."""
    # That the values are no counts is for the runtime to find.
    return write(tmp_path / "varied.h3e", variant="block.dense", measures=["h0", "y"])


def write(
    path: Path, variant: str | None = None, measures: Sequence[str] = (), parallel: object = None
) -> Path:
    first, block = region("request", 1), region("block", 2)
    others = [region(variant, 3)] if variant else []
    when = {"kind": "noisier", "than": 0.97}
    with EngineWriter(path) as writer:
        for found in (first, block, *others):
            writer.write_text(f"regions/{found.name}.json", region_to_json(found))
        writer.write_bytes("regions/block/code", b"x" * 2048)
        ranges = {}
        for name in ("request.0", "block.0", "block.1"):
            layout = lay_out([SlotSpec("w", (4, 4), torch.bfloat16)])
            weights = torch.full((4, 4), float(len(ranges)), dtype=torch.bfloat16)
            ranges[name] = writer.write_range(layout, [("w", weights)], f"weights/{name}.safetensors")
        calls = [
            {"region": "request", "index": 0, "stage": "request", "inputs": ["x"], "outputs": ["h"]},
            {"region": "block", "index": 0, "stage": "step", "inputs": ["h"], "outputs": ["h0"]},
            {"region": "block", "index": 1, "stage": "step", "inputs": ["h0"], "outputs": ["y"]},
        ]
        writer.commit(
            Manifest.model_validate(
                {
                    "model": "Toy",
                    "model_config_values": {"layers": 2, "patch": (1, 2, 2)},
                    "dtype": "bfloat16",
                    "inputs": [record(first, None)["inputs"][0]],  # type: ignore[index]
                    "input_stages": {"x": "request"},
                    "outputs": ["y"],
                    "dims": {"rows": {"hint": 64, "largest": 4096}},
                    # On purpose not in the order of execution.
                    "regions": [
                        *(record(other, None) for other in others),
                        record(block, "regions/block"),
                        record(first, None),
                    ],
                    "variants": {"block": [{"region": variant, "when": when}]} if variant else {},
                    "measures": measures,
                    "parallel": parallel,
                    "calls": [call | {"range": f"{call['region']}.{call['index']}"} for call in calls],
                    "tables": [],
                    "partitions": {
                        "transformer": {"checkpoint": None, "files": {}, "digest": None, "ranges": ranges}
                    },
                    "passes": [{"spelled": "outline", "tier": "exact", "matches": {"block": 2}}],
                    "backend": "eager",
                    "target": "cpu",
                    "arch": "cpu",
                    "versions": {"torch": "2.14.1"},
                    "model_path": None,
                    "schedules": [50, 8],
                    "weights": "copied",
                }
            )
        )
    return path
