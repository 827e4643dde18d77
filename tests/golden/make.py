"""Writes the golden engine of the current schema: run once a schema version, and keep the result.

python tests/golden/make.py SCRATCH
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import fx

import h3compile
from h3compile.engine.manifest import SCHEMA_VERSION
from h3compile.models.tiny import write_tiny
from h3compile.pipeline.base import Match, Pass, Rewrite, Tier
from h3compile.pipeline.registry import Registry
from h3compile.program.conditions import Noisier, Shorter
from h3compile.program.program import Program
from h3compile.program.region import Port, Region
from h3compile.program.variants import add_variant
from h3compile.targets import Target

SMALL = {
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "hidden_size": 24,
    "ffn_dim": 40,
    "text_dim": 16,
    "freq_dim": 16,
    "time_embed_hidden_dim": 24,
    "time_embed_dim": 16,
    "rope_freq_dim": 2,
}


@dataclass(frozen=True)
class Vary(Pass):
    """Give the block a variant, for fewer than 8 rows and above sigma 0.7, and have both count tiles.

    Both compute the same: what a golden engine must keep is which of them ran.
    """

    name: ClassVar[str] = "vary"
    tier: ClassVar[Tier] = Tier.EXACT
    requires: ClassVar[tuple[str, ...]] = ("outline",)
    after: ClassVar[tuple[str, ...]] = ("hoist", "fold-schedule")

    def apply(self, program: Program, target: Target) -> Rewrite:
        block = program.regions["block"]
        calls = program.calls_of("block")
        measures = {call: f"{call.name}.tiles" for call in calls}
        counting = program.evolve(
            regions={**program.regions, "block": _counting(block, "block", 1, 4)},
            calls=tuple(
                replace(call, outputs=(*call.outputs, measures[call])) if call in measures else call
                for call in program.calls
            ),
            measures=tuple(measures.values()),
        )
        dense = _counting(block, "block.dense", 0, 0)
        varied = add_variant(counting, "block", dense, Shorter("rows", 8), Noisier(0.7))
        return Rewrite(varied, tuple(Match("block", call.name) for call in calls))


def _counting(region: Region, name: str, skipped: int, considered: int) -> Region:
    graph = fx.Graph()
    results = graph.graph_copy(region.graph, {})
    first = next(iter(graph.nodes))
    new_full, cat = torch.ops.aten.new_full.default, torch.ops.aten.cat.default
    parts = [
        graph.call_function(new_full, (first, [1], count), {"dtype": torch.int32})
        for count in (skipped, considered)
    ]
    counts = graph.call_function(cat, (parts,))
    assert isinstance(results, tuple)
    graph.output((*results, counts))
    return replace(
        region, name=name, graph=graph, outputs=(*region.outputs, Port(counts.name, torch.int32, (2,)))
    )


@contextmanager
def vary_installed() -> Iterator[None]:
    """Makes a build know the pass `Vary`, as if a plugin had brought it."""
    registry = Registry.default()
    registry.add(Vary.name, lambda: Vary, __name__)
    with patch.object(Registry, "default", return_value=registry):
        yield


def inputs() -> dict[str, torch.Tensor]:
    """One forward: 3 rows of text, 4 of audio, 5 of video, two timesteps, one of them in no table."""
    generator = torch.Generator().manual_seed(0)
    text, audio, video = 3, 4, 5
    rows = text + audio + video
    return {
        "hidden_states": torch.randn(1, video, 96, generator=generator),
        "audio_hidden_states": torch.randn(1, audio, 32, generator=generator),
        "encoder_hidden_states": torch.randn(1, text, SMALL["text_dim"], generator=generator).bfloat16(),
        "timestep": torch.tensor([0.26, 0.999]),
        "timestep_indices": torch.tensor([0] * text + [1] * audio + [0] * video),
        "token_tags": torch.tensor([1] * text + [2] * audio + [0] * video),
        "position_ids": torch.arange(rows * 3, dtype=torch.float64).reshape(rows, 3) / 3,
        "video_indices": torch.arange(text + audio, rows),
        "audio_indices": torch.arange(text, text + audio),
        "text_indices": torch.arange(text),
    }


def main(scratch: Path) -> None:
    """Build the engine and keep what it answers to `inputs`."""
    write_tiny(scratch / "checkpoint", **SMALL)
    folder = Path(__file__).parent / f"v{SCHEMA_VERSION}.h3e"
    checkpoint = str(scratch / "checkpoint")
    with vary_installed():
        passes = "vary,dlo(resident=1)"
        h3compile.build(checkpoint, passes=passes, target="cpu", backend="eager", steps=(3,), output=folder)
    given = inputs()
    module = h3compile.load(folder, device="cpu")
    sample, audio = module(**given, return_dict=False)
    (step,) = module.measured()
    tiles = torch.stack(list(step.values.values()))
    answers = {**given, "sample": sample, "audio_sample": audio, "tiles": tiles}
    save_file(answers, folder.with_suffix(".safetensors"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
