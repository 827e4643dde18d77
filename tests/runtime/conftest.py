"""A toy model with the inputs of H3, small enough to write its program and its reference by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import fx

from h3compile.engine.layout import SlotSpec, lay_out
from h3compile.engine.manifest import (
    CallRecord,
    DimRecord,
    Manifest,
    NoisierRecord,
    PartitionRecord,
    PortRecord,
    RegionRecord,
    ShorterRecord,
    TableRecord,
    VariantRecord,
)
from h3compile.engine.writer import EngineWriter
from h3compile.program.region import Port, Region
from h3compile.program.serialize import dtype_name, region_to_json
from h3compile.runtime.executors import eager
from h3compile.runtime.fold import ScheduleCall, fold
from h3compile.runtime.timesteps import to_bits

aten = torch.ops.aten
CPU = torch.device("cpu")
H, TEXT, VIDEO, AUDIO = 8, 5, 4, 2
FLOAT, INT = torch.float32, torch.int64

INPUTS = (
    (Port("hidden_states", FLOAT, (1, "video_rows", VIDEO)), "step"),
    (Port("audio_hidden_states", FLOAT, (1, "audio_rows", AUDIO)), "step"),
    (Port("encoder_hidden_states", FLOAT, (1, "text_rows", TEXT)), "request"),
    (Port("timestep", FLOAT, ("timesteps",)), "schedule"),
    (Port("timestep_indices", INT, ("rows",)), "step"),
    (Port("token_tags", INT, ("rows",)), "request"),
    (Port("position_ids", FLOAT, ("rows", 3)), "request"),
    (Port("video_indices", INT, ("video_rows",)), "request"),
    (Port("audio_indices", INT, ("audio_rows",)), "request"),
    (Port("text_indices", INT, ("text_rows",)), "request"),
)
PORTS = {port.name: port for port, _ in INPUTS}


def hidden(name: str) -> Port:
    return Port(name, FLOAT, (1, "rows", H))


def _region(
    name: str,
    inputs: Sequence[Port],
    weights: Sequence[Port],
    outputs: Sequence[Port],
    write: Callable[..., Sequence[fx.Node]],
) -> Region:
    graph = fx.Graph()
    nodes = [graph.placeholder(port.name) for port in (*inputs, *weights)]
    graph.output(tuple(write(graph.call_function, *nodes)))
    return Region(name, graph, tuple(inputs), tuple(weights), tuple(outputs))


def regions(varied: bool = False) -> dict[str, Region]:
    """The toy's regions; `reference` computes the same by hand.

    With ``varied`` a block reports that it skipped 1 of 4 tiles, and there is ``block.dense``: it skips none
    and subtracts where the block adds.
    """

    def schedule(op, t, frequencies, out):
        e = op(aten.silu.default, (op(aten.mul.Tensor, (op(aten.unsqueeze.default, (t, 1)), frequencies)),))
        return e, op(aten.linear.default, (e, out))

    def modulation(op, e, weight, bias):
        return (op(aten.view.default, (op(aten.linear.default, (e, weight, bias)), [-1, 2 * H])),)

    def project(op, text, weight):
        return (op(aten.linear.default, (text, weight)),)

    def refine(op, text, weight):
        return (op(aten.add.Tensor, (text, op(aten.linear.default, (text, weight)))),)

    def angles(op, positions, weight):
        return (op(aten.cos.default, (op(aten.linear.default, (positions, weight)),)),)

    def embed(op, video, audio, text, tags, v, a, t, proj, audio_proj):
        rows = op(aten.sym_size.int, (tags, 0))
        packed = op(aten.new_zeros.default, (text, [1, rows, H]))
        packed = op(aten.index_copy.default, (packed, 1, t, text))
        packed = op(aten.index_copy.default, (packed, 1, v, op(aten.linear.default, (video, proj))))
        return (op(aten.index_copy.default, (packed, 1, a, op(aten.linear.default, (audio, audio_proj)))),)

    def block(op, x, cos, indices, tags, table, weight, *, join=aten.add.Tensor, tiles=()):
        row = op(aten.add.Tensor, (op(aten.mul.Tensor, (indices, 3)), tags))
        shift, scale = (
            op(aten.slice.Tensor, (op(aten.index_select.default, (table, 0, row)), 1, i * H, (i + 1) * H))
            for i in (0, 1)
        )
        y = op(aten.add.Tensor, (op(aten.mul.Tensor, (x, op(aten.add.Scalar, (scale, 1.0)))), shift))
        y = op(aten.mul.Tensor, (op(aten.linear.default, (y, weight)), cos))
        if not tiles:
            return (op(join, (x, y)),)
        counts = [op(aten.new_full.default, (x, [1], n), {"dtype": torch.int32}) for n in tiles]
        return op(join, (x, y)), op(aten.cat.default, (counts,))

    def head(op, x, indices, v, a, table, proj, audio_proj):
        y = op(aten.add.Tensor, (x, op(aten.index_select.default, (table, 0, indices))))
        return tuple(
            op(aten.index_select.default, (op(aten.linear.default, (y, w)), 1, rows))
            for w, rows in ((proj, v), (audio_proj, a))
        )

    def w(name: str, *shape: int) -> Port:
        return Port(name, FLOAT, shape)

    e = Port("e", FLOAT, ("timesteps", H))
    out = Port("out", FLOAT, ("timesteps", H))
    table = Port("table", FLOAT, ("3*timesteps", 2 * H))
    text, cos = Port("text", FLOAT, (1, "text_rows", H)), Port("cos", FLOAT, ("rows", H))
    p = PORTS
    made = (
        _region("schedule", [p["timestep"]], [w("freq", H), w("out_w", H, H)], [e, out], schedule),
        _region("mod", [e], [w("weight", 6 * H, H), w("bias", 6 * H)], [table], modulation),
        _region("project", [p["encoder_hidden_states"]], [w("weight", H, TEXT)], [text], project),
        _region("refine", [text], [w("weight", H, H)], [text], refine),
        _region("angles", [p["position_ids"]], [w("weight", H, 3)], [cos], angles),
        _region(
            "embed",
            [
                p["hidden_states"],
                p["audio_hidden_states"],
                text,
                p["token_tags"],
                p["video_indices"],
                p["audio_indices"],
                p["text_indices"],
            ],
            [w("proj", H, VIDEO), w("audio_proj", H, AUDIO)],
            [hidden("x")],
            embed,
        ),
        _region(
            "block",
            [hidden("x"), cos, p["timestep_indices"], p["token_tags"], table],
            [w("weight", H, H)],
            [hidden("y")],
            block,
        ),
        _region(
            "head",
            [hidden("x"), p["timestep_indices"], p["video_indices"], p["audio_indices"], out],
            [w("proj", VIDEO, H), w("audio_proj", AUDIO, H)],
            [Port("sample", FLOAT, (1, "video_rows", VIDEO)), Port("audio", FLOAT, (1, "audio_rows", AUDIO))],
            head,
        ),
    )
    found = {region.name: region for region in made}
    if varied:
        ports = (
            found["block"].inputs,
            found["block"].weights,
            [hidden("y"), Port("tiles", torch.int32, (2,))],
        )
        found["block"] = _region("block", *ports, partial(block, tiles=(1, 4)))
        dense = partial(block, join=aten.sub.Tensor, tiles=(0, 0))
        found["block.dense"] = _region("block.dense", *ports, dense)
    return found


SCHEDULE = (
    ("schedule", 0, ("timestep",), ("e", "out")),
    ("mod", 0, ("e",), ("table_0",)),
    ("mod", 1, ("e",), ("table_1",)),
)
REQUEST = (
    ("project", 0, ("encoder_hidden_states",), ("text_0",)),
    ("refine", 0, ("text_0",), ("text_1",)),
    ("refine", 1, ("text_1",), ("text",)),
    ("angles", 0, ("position_ids",), ("cos",)),
)
LAYOUT = ("token_tags", "video_indices", "audio_indices", "text_indices")
STEP = (
    ("embed", 0, ("hidden_states", "audio_hidden_states", "text", *LAYOUT), ("x_0",)),
    ("block", 0, ("x_0", "cos", "timestep_indices", "token_tags", "table_0"), ("x_1",)),
    ("block", 1, ("x_1", "cos", "timestep_indices", "token_tags", "table_1"), ("x_2",)),
    ("head", 0, ("x_2", "timestep_indices", "video_indices", "audio_indices", "out"), ("sample", "audio")),
)
TABLES = ("out", "table_0", "table_1")
MEASURES = ("tiles_0", "tiles_1")
VARIANTS = {
    "block": (
        VariantRecord(region="block.dense", when=ShorterRecord(dim="rows", than=8)),
        VariantRecord(region="block.dense", when=NoisierRecord(than=0.9)),
    )
}

Weights = Mapping[str, Mapping[str, torch.Tensor]]


def toy_weights(seed: int = 0) -> Weights:
    """Weights by call name and port name."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: region.weights for name, region in regions().items()}
    return {
        f"{region}.{index}": {
            port.name: torch.randn(port.shape, generator=generator) * 0.5 for port in shapes[region]
        }
        for region, index, _, _ in (*SCHEDULE, *REQUEST, *STEP)
    }


def reference(
    weights: Weights, given: Mapping[str, torch.Tensor], sign: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The toy in plain torch, every timestep evaluated alone; with ``sign`` -1 its blocks are dense."""
    linear = torch.nn.functional.linear
    out, tables = [], ([], [])
    for t in given["timestep"].float().split(1):
        e = torch.nn.functional.silu(t[:, None] * weights["schedule.0"]["freq"])
        out.append(linear(e, weights["schedule.0"]["out_w"]))
        for i in (0, 1):
            mod = weights[f"mod.{i}"]
            tables[i].append(linear(e, mod["weight"], mod["bias"]).view(3, 2 * H))
    text = linear(given["encoder_hidden_states"].float(), weights["project.0"]["weight"])
    for i in (0, 1):
        text = text + linear(text, weights[f"refine.{i}"]["weight"])
    cos = linear(given["position_ids"].float(), weights["angles.0"]["weight"]).cos()
    x = torch.zeros(1, len(given["token_tags"]), H)
    x[:, given["text_indices"]] = text
    x[:, given["video_indices"]] = linear(given["hidden_states"].float(), weights["embed.0"]["proj"])
    x[:, given["audio_indices"]] = linear(
        given["audio_hidden_states"].float(), weights["embed.0"]["audio_proj"]
    )
    for i in (0, 1):
        row = torch.cat(tables[i])[given["timestep_indices"] * 3 + given["token_tags"]]
        y = x * (row[:, H:] + 1.0) + row[:, :H]
        x = x + sign * (linear(y, weights[f"block.{i}"]["weight"]) * cos)
    x = x + torch.cat(out)[given["timestep_indices"]]
    head = weights["head.0"]
    return (
        linear(x, head["proj"])[:, given["video_indices"]],
        linear(x, head["audio_proj"])[:, given["audio_indices"]],
    )


def toy_inputs(
    video: int = 5, audio: int = 3, text: int = 2, timesteps: Sequence[float] = (0.25, 0.5), seed: int = 0
) -> dict[str, torch.Tensor]:
    """Inputs of one forward; rows in the order text, audio, video."""
    generator = torch.Generator().manual_seed(seed)
    rows = video + audio + text
    order = torch.arange(rows).split([text, audio, video])
    tags = torch.cat([torch.full((n,), tag) for n, tag in ((text, 1), (audio, 2), (video, 0))])
    return {
        "hidden_states": torch.randn(1, video, VIDEO, generator=generator),
        "audio_hidden_states": torch.randn(1, audio, AUDIO, generator=generator),
        "encoder_hidden_states": torch.randn(1, text, TEXT, generator=generator),
        "timestep": torch.tensor(timesteps, dtype=FLOAT),
        "timestep_indices": torch.arange(rows) % len(timesteps),
        "token_tags": tags,
        "position_ids": torch.randn(rows, 3, generator=generator),
        "video_indices": order[2],
        "audio_indices": order[1],
        "text_indices": order[0],
    }


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at an address no allocator returns, as a mapped checkpoint file has them."""
    data = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return data.copy_(tensor)


def port_record(port: Port) -> PortRecord:
    return PortRecord(name=port.name, dtype=dtype_name(port.dtype), shape=port.shape)


@dataclass(frozen=True)
class Toy:
    """How to write the toy as an engine."""

    partitions: Mapping[str, Weights] = field(default_factory=lambda: {"transformer": toy_weights()})
    timesteps: tuple[float, ...] = ()  # folded at build
    fold: bool = True
    hoist: bool = True
    varied: bool = False  # with VARIANTS and MEASURES
    changes: Mapping[str, object] = field(default_factory=dict)  # over the manifest

    def write(self, path: Path) -> Path:
        """The engine at ``path``, written through the engine writer."""
        made = regions(self.varied)
        with EngineWriter(path) as writer:
            records = []
            for region in made.values():
                writer.write_text(f"regions/{region.name}.json", region_to_json(region))
                records.append(
                    RegionRecord(
                        name=region.name,
                        inputs=tuple(map(port_record, region.inputs)),
                        weights=tuple(map(port_record, region.weights)),
                        outputs=tuple(map(port_record, region.outputs)),
                        graph=f"regions/{region.name}.json",
                    )
                )
            partitions = {
                name: self._partition(writer, name, weights) for name, weights in self.partitions.items()
            }
            manifest = Manifest(
                model="Toy",
                model_config_values={"hidden_size": H, "patch_size": (1, 2, 2)},
                dtype="float32",
                inputs=tuple(port_record(port) for port, _ in INPUTS),
                input_stages={port.name: stage for port, stage in INPUTS},
                outputs=("sample", "audio"),
                dims=dict.fromkeys(
                    ("rows", "video_rows", "audio_rows", "text_rows", "timesteps"),
                    DimRecord(hint=64, largest=4096),
                ),
                regions=tuple(records),
                calls=tuple(self._calls()),
                tables=TABLES if self.fold else (),
                variants=VARIANTS if self.varied else {},
                measures=MEASURES if self.varied else (),
                partitions=partitions,
                passes=(),
                backend="eager",
                target="cpu",
                arch="cpu",
                versions={},
                model_path=None,
                schedules=(),
                weights="copied",
            )
            writer.commit(manifest.model_copy(update=dict(self.changes)))
        return path

    def _calls(self) -> Iterator[CallRecord]:
        stages = (("schedule", SCHEDULE), ("request", REQUEST), ("step", STEP))
        for stage, calls in stages:
            hoisted = {"schedule": self.fold, "request": self.hoist}.get(stage, True)
            for region, index, inputs, outputs in calls:
                if self.varied and region == "block":
                    outputs = (*outputs, MEASURES[index])
                yield CallRecord(
                    region=region,
                    index=index,
                    stage=stage if hoisted else "step",
                    inputs=inputs,
                    outputs=outputs,
                    range=f"{region}.{index}",
                )

    def _partition(self, writer: EngineWriter, name: str, weights: Weights) -> PartitionRecord:
        ranges = {}
        for call, tensors in weights.items():
            specs = [SlotSpec(port, tuple(value.shape), value.dtype) for port, value in tensors.items()]
            ranges[call] = writer.write_range(
                lay_out(specs), iter(tensors.items()), f"weights/{name}/{call}.safetensors"
            )
        tables = None
        if self.fold:
            tables = self._tables(writer, name, weights)
        return PartitionRecord(checkpoint=None, files={}, digest=None, ranges=ranges, tables=tables)

    def _tables(self, writer: EngineWriter, name: str, weights: Weights) -> TableRecord:
        keys = to_bits(sorted(self.timesteps))
        if not keys:
            return TableRecord(timesteps=(), files={})
        return writer.write_tables(f"tables/{name}", keys, toy_fold(weights, keys))


def schedule_calls() -> list[ScheduleCall]:
    made = regions()
    return [
        ScheduleCall(f"{region}.{index}", inputs, outputs, eager(made[region], CPU))
        for region, index, inputs, outputs in SCHEDULE
    ]


def toy_fold(weights: Weights, keys: Sequence[int]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """The tables as a build evaluates them: weights straight from a checkpoint, wherever they lie."""
    return fold(
        schedule_calls(),
        keys,
        timestep="timestep",
        dtype=FLOAT,
        tables=TABLES,
        weights=lambda call: [misaligned(tensor) for tensor in weights[call].values()],
        device=CPU,
    )


class Kit:
    """What the tests of this folder use: they cannot import one another, so it comes as a fixture."""

    Toy = Toy
    weights = staticmethod(toy_weights)
    inputs = staticmethod(toy_inputs)
    reference = staticmethod(reference)
    fold = staticmethod(toy_fold)
    schedule_calls = staticmethod(schedule_calls)
    regions = staticmethod(regions)
    misaligned = staticmethod(misaligned)
    tables = TABLES
    inputs_of_program = INPUTS


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with two partitions that share half their weights, and three timesteps folded."""
    one, other = toy_weights(0), toy_weights(1)
    mixed = {call: one[call] if call.startswith(("embed", "refine")) else other[call] for call in one}
    toy = Toy(partitions={"transformer": one, "transformer_ref": mixed}, timesteps=(0.0, 0.25, 0.5))
    return toy.write(tmp_path_factory.mktemp("toy") / "toy.h3e")


@pytest.fixture(scope="session")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy whose blocks are dense below 8 rows and above sigma 0.9, and count tiles elsewhere."""
    return Toy(varied=True).write(tmp_path_factory.mktemp("varied") / "toy.h3e")
