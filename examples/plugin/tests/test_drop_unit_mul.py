"""`drop-unit-mul` on a small H3: its tier, its count, and what it must leave alone.

Run them with the package installed: pip install . && pytest
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from drop_unit_mul import DropUnitMul
from torch import fx

from h3compile.models.h3 import RELEASE_CONFIG
from h3compile.models.tiny import TRANSFORMER_CONFIG
from h3compile.models.trace import trace
from h3compile.passes.canonicalize import Canonicalize
from h3compile.passes.outline import Outline
from h3compile.pipeline.base import Rewrite
from h3compile.pipeline.registry import Registry
from h3compile.pipeline.spelling import resolve
from h3compile.pipeline.testing import Case, check_pass, weight_source
from h3compile.program.program import Program
from h3compile.program.region import Port, Region
from h3compile.targets import Target, find_target

BEFORE = (Canonicalize(), Outline())
CONFIG = {**RELEASE_CONFIG, **TRANSFORMER_CONFIG, "num_layers": 2, "num_refiner_layers": 1}


def request(text: int, audio: int, video: int, timesteps: tuple[float, ...]) -> dict[str, torch.Tensor]:
    """The inputs of one forward: [text | audio | video], the audio rows at the last timestep."""
    rows = text + audio + video
    times = torch.zeros(rows, dtype=torch.int64)
    times[text : text + audio] = len(timesteps) - 1
    text_rows, audio_rows, video_rows = torch.arange(rows).split([text, audio, video])
    return {
        "hidden_states": torch.randn(1, video, 96),
        "audio_hidden_states": torch.randn(1, audio, 32),
        "encoder_hidden_states": torch.randn(1, text, CONFIG["text_dim"]),
        "timestep": torch.tensor(timesteps),
        "timestep_indices": times,
        "token_tags": torch.tensor([1] * text + [2] * audio + [0] * video),
        "position_ids": torch.rand(rows, 3) * 40,
        "video_indices": video_rows,
        "audio_indices": audio_rows,
        "text_indices": text_rows,
    }


@pytest.fixture(scope="module")
def case() -> Case:
    torch.manual_seed(0)
    weights = MiniMaxH3Transformer3DModel(**CONFIG).state_dict()
    inputs = [request(1, 14, 37, (0.0,)), request(15, 8, 129, (0.2, 0.5))]
    program = trace(CONFIG, {name: weight.dtype for name, weight in weights.items()})
    return Case(program, weight_source(weights), inputs)


def test_exact_and_counted(case: Case) -> None:
    found = check_pass(DropUnitMul(), case, after=BEFORE)
    assert found.run.matches == {"multiplication": 1}
    assert found.run.ops_before - found.run.ops_after == {"aten.mul.Tensor": 1}


def test_exact_when_asked_for_by_name_beside_the_default_passes(case: Case) -> None:
    chosen, _ = resolve("drop-unit-mul", Registry.default())
    assert DropUnitMul() in chosen
    check_pass(DropUnitMul(), case, after=[item for item in chosen if item != DropUnitMul()])


@dataclass(frozen=True)
class Greedy(DropUnitMul):
    """Planted: takes every multiplication by a number for one by 1."""

    def apply(self, program: Program, target: Target) -> Rewrite:
        regions = {name: all_ones(region) for name, region in program.regions.items()}
        return super().apply(program.evolve(regions=regions), target)

    def expects(self, facts: object) -> dict[str, int]:
        return {}


def all_ones(region: Region) -> Region:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(region.graph, copies))
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        if not isinstance(node.args[1], fx.Node):
            node.args = (node.args[0], 1)
    return replace(region, graph=graph)


def test_the_harness_catches_a_greedy_pass(case: Case) -> None:
    with pytest.raises(AssertionError, match=r"drop-unit-mul, input \d, sample: \d+ elements differ"):
        check_pass(Greedy(), case, after=BEFORE)


@pytest.mark.parametrize(
    ("dtype", "factor", "returned"),
    [
        (torch.float32, 2, False),
        (torch.int64, 1.0, False),  # the result is float32
        (torch.float32, 1, True),  # a region may not return its input
    ],
)
def test_what_stays(case: Case, dtype: torch.dtype, factor: float, returned: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["port"] = Port("x", dtype, ("rows",))
    product = graph.call_function(torch.ops.aten.mul.Tensor, (x, factor))
    result = torch.float32 if isinstance(factor, float) else dtype
    product.meta["port"] = Port("product", result, ("rows",))
    last = product if returned else graph.call_function(torch.ops.aten.neg.default, (product,))
    graph.output((last,))
    ports = (Port("x", dtype, ("rows",)),), (), (Port("y", result, ("rows",)),)
    program = case.program.evolve(regions={"main": Region("main", graph, *ports)})
    assert DropUnitMul().apply(program, find_target("cpu")).matches == ()
