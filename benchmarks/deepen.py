"""An engine as deep as the model is, from one of two layers.

The calls of its last block are repeated, each with weights of its own in memory, read from one file. So
50 layers need the disk of two, and the time that two take to build.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from h3compile.engine.loader import open_engine
from h3compile.engine.manifest import CallRecord, PlanRecord
from h3compile.engine.writer import EngineWriter


def deepened(path: Path, output: Path, layers: int, plan: PlanRecord | None = None) -> Path:
    """The engine at ``path`` with its last block repeated until there are ``layers``, with this ``plan``."""
    folder = open_engine(path, verify=False)
    manifest = folder.manifest
    partition = manifest.partitions["transformer"]
    blocks = [call for call in manifest.calls if call.region == "block"]
    last, count = blocks[-1], len(blocks)
    more = range(count, layers)

    def name(text: str, layer: int) -> str:
        here, before = f"block.{last.index}.", f"block.{last.index - 1}."
        if text.startswith(here):
            return f"block.{layer}.{text.removeprefix(here)}"
        return f"block.{layer - 1}.{text.removeprefix(before)}" if text.startswith(before) else text

    def copy(call: CallRecord, layer: int) -> CallRecord:
        inputs, outputs = ([name(value, layer) for value in values] for values in (call.inputs, call.outputs))
        given = {"index": layer, "inputs": tuple(inputs), "outputs": tuple(outputs)}
        return call.model_copy(update={**given, "range": f"{call.region}.{layer}"})

    calls: list[CallRecord] = []
    ranges = {key: value.model_copy(update={"sha256": None}) for key, value in partition.ranges.items()}
    for call in manifest.calls:
        if call.region == "head":
            call = call.model_copy(update={"inputs": tuple(_renamed(v, last, layers) for v in call.inputs)})
        calls.append(call)
        if call.region in ("block", "block.schedule") and call.index == last.index:
            calls += [copy(call, layer) for layer in more]
            ranges |= {f"{call.region}.{layer}": ranges[f"{call.region}.{last.index}"] for layer in more}
    assert partition.tables is not None
    with EngineWriter(output) as writer:
        writer.adopt(path, manifest.files, skip=["engine.json"])
        files = dict(partition.tables.files)
        stem = f"block.schedule.{last.index}"
        rows = load_file(path / files[stem])
        for layer in more:
            files[f"block.schedule.{layer}"] = f"tables/transformer/block.schedule.{layer}.safetensors"
            values = {name(value, layer): row for value, row in rows.items()}
            writer.write_tensors(files[f"block.schedule.{layer}"], values)
        tables = partition.tables.model_copy(update={"files": files})
        deeper = partition.model_copy(update={"ranges": ranges, "tables": tables})
        listed = [value for value in manifest.tables if value.startswith(f"block.{last.index}.")]
        update = {
            "calls": tuple(calls),
            "tables": (*manifest.tables, *(name(value, layer) for layer in more for value in listed)),
            "partitions": {"transformer": deeper},
            "plan": plan,
        }
        writer.commit(manifest.model_copy(update=update))
    return output


def _renamed(value: str, last: CallRecord, layers: int) -> str:
    here = f"block.{last.index}."
    return f"block.{layers - 1}.{value.removeprefix(here)}" if value.startswith(here) else value
