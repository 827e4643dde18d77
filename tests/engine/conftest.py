"""A small complete engine: a copied partition, a linked one, tables, a graph and an artifact folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from h3compile.engine.layout import SlotSpec, lay_out
from h3compile.engine.links import record_files
from h3compile.engine.manifest import Manifest, RangeRecord, TableRecord
from h3compile.engine.writer import EngineWriter
from h3compile.program.source import ShardedTensors


class Toy:
    """The parts of a toy engine, and the engine itself under ``folder``."""

    GRAPH, ARTIFACT = "regions/block.json", "regions/block"
    RANGE = "weights/copied/block.0.safetensors"
    MIXED = "weights/linked/block.0.safetensors"
    TABLE = "tables/copied/schedule.0.safetensors"
    SHARD = "model.safetensors"
    TIMESTEPS = (0, 0x3F000000)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "toy.h3e"
        self.checkpoint = folder / "checkpoint"
        values = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
        # A plain weight, a transposed FP8 one, and a scale.
        self.weights = {
            "w": values.bfloat16(),
            "q": values.to(torch.float8_e4m3fn).t(),
            "s": torch.tensor(0.5),
        }
        self.table = {"shift": torch.arange(4.0).view(2, 2)}

    def layout(self, linked: Sequence[str] = ()) -> RangeRecord:
        """The range of the weights, those named linked to the checkpoint."""
        return lay_out(
            SlotSpec(
                name,
                tuple(tensor.shape),
                tensor.dtype,
                tensor.stride(),
                (self.SHARD, name) if name in linked else None,
            )
            for name, tensor in self.weights.items()
        )

    def manifest(self, **fields: object) -> Manifest:
        """A manifest of one region, with no weights unless ``fields`` say otherwise."""
        ports = [
            {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": tuple(tensor.shape)}
            for name, tensor in self.weights.items()
        ]
        x, y = ({"name": name, "dtype": "float32", "shape": ("rows", 3)} for name in "xy")
        region = {
            "name": "block",
            "inputs": [x],
            "weights": ports,
            "outputs": [y],
            "graph": self.GRAPH,
            "artifact": {"backend": "eager", "target": "cpu", "path": self.ARTIFACT},
        }
        call = {"region": "block", "index": 0, "stage": "step", "inputs": ["x"], "outputs": ["y"]}
        defaults: dict[str, object] = {
            "model": "Toy",
            "model_config_values": {"layers": 1, "eps": 1e-5, "patch": (1, 2, 2)},
            "dtype": "bfloat16",
            "inputs": [x],
            "input_stages": {"x": "step"},
            "outputs": ["y"],
            "dims": {"rows": {"hint": 64, "largest": 4096}},
            "regions": [region],
            "calls": [call],
            "tables": [],
            "partitions": {},
            "passes": [],
            "backend": "eager",
            "target": "cpu",
            "arch": "cpu",
            "versions": {"torch": "2.14.1"},
            "model_path": None,
            "schedules": [50],
            "weights": "none",
        }
        return Manifest.model_validate(defaults | fields)

    def write_region(self, writer: EngineWriter) -> None:
        """The files that `manifest` refers to."""
        source = self.folder / "artifact"
        (source / "sub").mkdir(parents=True, exist_ok=True)
        (source / "code.py").write_text("raise SystemExit('executed')")
        (source / "sub" / "kernel.bin").write_bytes(bytes(range(256)))
        writer.write_text(self.GRAPH, '{"format": 1}')
        writer.add_folder(self.ARTIFACT, source)

    def write(self, *, overwrite: bool = False) -> Manifest:
        """The whole engine; its checkpoint is written first when it is not there."""
        if not self.checkpoint.exists():
            self.checkpoint.mkdir()
            stored = {name: tensor.contiguous() for name, tensor in self.weights.items()}
            save_file(stored, self.checkpoint / self.SHARD)
        files = record_files(ShardedTensors(self.checkpoint).files())
        with EngineWriter(self.path, overwrite=overwrite) as writer:
            self.write_region(writer)
            copied = writer.write_range(self.layout(), self.weights.items(), self.RANGE)
            mixed = writer.write_range(self.layout(("w", "q")), [("s", self.weights["s"])], self.MIXED)
            linked = writer.write_range(self.layout(("w", "q", "s")), (), "unused")
            tables = writer.write_tables("tables/copied", self.TIMESTEPS, [("schedule.0", self.table)])
            partitions = {
                "copied": _partition(None, {}, {"block.0": copied}, tables),
                "linked": _partition(self.checkpoint, files, {"block.0": mixed, "block.1": linked}, None),
            }
            return writer.commit(self.manifest(weights="linked", partitions=partitions))


def _partition(
    checkpoint: Path | None,
    files: object,
    ranges: Mapping[str, RangeRecord],
    tables: TableRecord | None,
) -> dict[str, object]:
    folder = str(checkpoint) if checkpoint else None
    return {"checkpoint": folder, "files": files, "digest": None, "ranges": ranges, "tables": tables}


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    """The toy in a folder of its own."""
    return Toy(tmp_path)
