"""Engines against Diffusers: the same checkpoint, FP32 and BF16, every task, five odd row counts each.

Equal bits where no pass may round; elsewhere both are measured against a float64 evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from h3compile.models.h3 import PARTITIONS
from h3compile.models.trace import trace
from h3compile.pipeline.testing import ROUNDING_BOUND, distance, weight_source
from h3compile.program.interpreter import Interpreter
from h3compile.runtime.module import CompiledTransformer

Inputs = dict[str, torch.Tensor]
Outputs = tuple[torch.Tensor, ...]
Modules = Callable[[torch.dtype, str, str], CompiledTransformer]
Transformers = Callable[[torch.dtype, str], torch.nn.Module]

pytestmark = pytest.mark.slow

TASKS = {task: partition for partition, tasks in PARTITIONS.items() for task in tasks}
# Half the distance between two neighbours is what one rounding of a result may change. An FP32 result is
# the sum of many products, each rounded in its last bit.
ROUNDINGS = {torch.bfloat16: 2**-8, torch.float32: 2**-18}
# A request's outputs of one draw have one or two values of independent error each, so that single draws of
# a few rows spread by a third, also between two evaluations that are exact for each timestep alone. Pooled
# over this many draws the spread is about 2 %.
FEW_ROWS = 16
DRAWS = {True: 64, False: 16}

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
tasks = pytest.mark.parametrize("task", TASKS)


def evaluate(model: torch.nn.Module, inputs: Inputs) -> Outputs:
    with torch.no_grad():
        outputs: Outputs = model(**inputs, return_dict=False)
        return outputs


@dtypes
@tasks
def test_without_folding_the_bits_of_diffusers(
    task: str,
    dtype: torch.dtype,
    modules: Modules,
    transformers_of: Transformers,
    requests_of: Callable[..., Iterator[Inputs]],
) -> None:
    engine = modules(dtype, "hoisted", TASKS[task])
    assert [record.spelled for record in engine.manifest.passes] == ["canonicalize", "outline", "hoist"]
    for inputs in requests_of(task, dtype):
        theirs = evaluate(transformers_of(dtype, TASKS[task]), inputs)
        for ours, expected in zip(evaluate(engine, inputs), theirs, strict=True):
            assert ours.dtype == expected.dtype
            assert torch.equal(ours, expected)


@dtypes
@tasks
def test_folded_the_bits_of_each_timestep_alone(
    task: str,
    dtype: torch.dtype,
    modules: Modules,
    transformers_of: Transformers,
    requests_of: Callable[..., Iterator[Inputs]],
    diffusers_alone: Callable[[torch.nn.Module, Inputs], Outputs],
) -> None:
    engine, model = modules(dtype, "folded", TASKS[task]), transformers_of(dtype, TASKS[task])
    for inputs in requests_of(task, dtype):
        results = evaluate(engine, inputs)
        for ours, alone in zip(results, diffusers_alone(model, inputs), strict=True):
            assert torch.equal(ours, alone)
        for ours, batch in zip(results, evaluate(model, inputs), strict=True):
            assert distance(ours, batch.double()) <= ROUNDINGS[dtype]


@pytest.fixture(scope="module")
def exact(transformers_of: Transformers) -> Callable[[torch.dtype, str], Interpreter]:
    """A function from dtype and partition to a float64 evaluation of what Diffusers' class computes."""
    made: dict[tuple[torch.dtype, str], Interpreter] = {}

    def of(dtype: torch.dtype, partition: str) -> Interpreter:
        if (dtype, partition) not in made:
            model = transformers_of(dtype, partition)
            weights = model.state_dict()
            config = {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in model.config.items()
                if not key.startswith("_")
            }
            program = trace(config, {name: tensor.dtype for name, tensor in weights.items()})
            made[dtype, partition] = Interpreter(program, weight_source(weights), dtype=torch.float64)
        return made[dtype, partition]

    return of


@dtypes
@tasks
def test_compiled_no_further_from_float64_than_diffusers(
    task: str,
    dtype: torch.dtype,
    modules: Modules,
    transformers_of: Transformers,
    requests_of: Callable[..., Iterator[Inputs]],
    redraw: Callable[[Inputs, int], Inputs],
    exact: Callable[[torch.dtype, str], Interpreter],
) -> None:
    engine, model = modules(dtype, "inductor", TASKS[task]), transformers_of(dtype, TASKS[task])
    assert all(record.artifact for record in engine.manifest.regions if record.name in ("block", "head"))
    referee = exact(dtype, TASKS[task])
    for number, inputs in enumerate(requests_of(task, dtype)):
        few = min(inputs["video_indices"].shape[0], inputs["audio_indices"].shape[0]) < FEW_ROWS
        squares = torch.zeros(2, 2, dtype=torch.float64)  # ours and theirs, by output
        for seed in range(DRAWS[few]):
            drawn = redraw(inputs, seed)
            truth = tuple(referee(drawn).values())
            for row, outputs in zip(squares, (evaluate(engine, drawn), evaluate(model, drawn)), strict=True):
                row += torch.tensor([distance(o, t) ** 2 for o, t in zip(outputs, truth, strict=True)])
        ratios = (squares[0] / squares[1]).sqrt().tolist()
        assert all(math.isfinite(ratio) for ratio in ratios)
        assert max(ratios) <= ROUNDING_BOUND, f"row counts {number}: {ratios} times Diffusers' distance"


@pytest.fixture(scope="module")
def redraw() -> Callable[[Inputs, int], Inputs]:
    """A function that gives the same request other latents, text and positions; draw 0 is the request."""

    def again(inputs: Inputs, seed: int) -> Inputs:
        if seed == 0:
            return inputs
        generator = torch.Generator().manual_seed(seed)
        drawn = dict(inputs)
        for name in ("hidden_states", "audio_hidden_states", "encoder_hidden_states"):
            drawn[name] = torch.randn(inputs[name].shape, generator=generator).to(inputs[name].dtype)
        positions = inputs["position_ids"]
        drawn["position_ids"] = torch.rand(positions.shape, generator=generator, dtype=positions.dtype) * 40
        return drawn

    return again
