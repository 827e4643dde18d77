"""The facts about H3, held against Diffusers: where it changes, these tests say what."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from diffusers import MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel

from h3compile.models import h3
from h3compile.models.trace import parameter_shapes
from h3compile.program.stages import Stage

GRID = [*range(2, 61), 100, 127, 128, 250, 999, 1000, 4096]
SHIFTS = [12.0, 3.0, 1.0, 6.0, 10.0, 0.5, 0.1, 7.3, 100.0, 1e4]


@pytest.mark.parametrize("shift", SHIFTS)
def test_schedules_bit_for_bit(shift: float) -> None:
    scheduler = MiniMaxH3Scheduler(shift=shift)
    for steps in GRID:
        scheduler.set_timesteps(steps)
        theirs = scheduler.timesteps.float()
        ours = torch.tensor(h3.schedule_timesteps(steps, shift), dtype=torch.float32)
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32)), (steps, shift)


@pytest.mark.parametrize("steps", [2, 4, 8, 50])
def test_a_schedule_is_one_forward_shorter_than_its_grid(steps: int) -> None:
    for shift in h3.SHIFTS.values():
        timesteps = h3.schedule_timesteps(steps, shift)
        assert len(timesteps) == steps - 1
        assert timesteps[0] == 0.0 and timesteps == sorted(set(timesteps)) and timesteps[-1] < 1.0
        # Exact in float32, which is what the tables are keyed by.
        assert torch.tensor(timesteps, dtype=torch.float32).tolist() == timesteps


def test_a_grid_so_fine_that_points_fall_together_has_fewer_forwards() -> None:
    assert len(h3.schedule_timesteps(4096, 1e4)) < 4095


def test_the_default_shift_is_the_schedulers() -> None:
    assert MiniMaxH3Scheduler().config.shift == h3.SHIFTS["video"]


def test_the_release_is_what_the_class_defaults_to() -> None:
    parameters = inspect.signature(MiniMaxH3Transformer3DModel.__init__).parameters
    defaults = {
        name: tuple(parameter.default) if isinstance(parameter.default, list) else parameter.default
        for name, parameter in parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    assert dict(h3.RELEASE_CONFIG) == defaults


def test_the_class_has_the_name_that_checkpoints_give() -> None:
    assert MiniMaxH3Transformer3DModel.__name__ == h3.ARCHITECTURE


def test_what_diffusers_keeps_in_fp32() -> None:
    kept = set(MiniMaxH3Transformer3DModel._keep_in_fp32_modules)
    # rope has no weight: its frequencies are computed in FP32.
    assert set(h3.FP32_MODULES) == kept - {"rope"}


def test_the_modalities_are_diffusers_own() -> None:
    from diffusers.models.transformers.transformer_minimax_h3 import MINIMAX_H3_MODALITY_NUM

    assert sorted(h3.TAGS.values()) == list(range(MINIMAX_H3_MODALITY_NUM))


@pytest.fixture(scope="module")
def shapes() -> dict[str, tuple[int, ...]]:
    return parameter_shapes(h3.RELEASE_CONFIG)


def count(shapes: dict[str, tuple[int, ...]], part: str = "") -> int:
    return sum(math.prod(shape) for name, shape in shapes.items() if part in name)


def test_the_parameter_count(shapes: dict[str, tuple[int, ...]]) -> None:
    assert round(count(shapes) / 1e9, 2) == 33.12
    assert round(count(shapes, "transformer_blocks.7.") / 1e6, 2) == 645.57
    assert round(count(shapes, "refiner_blocks.1.") / 1e6, 1) == 385.4


def test_adaln_is_two_fifths_of_a_block(shapes: dict[str, tuple[int, ...]]) -> None:
    block = count(shapes, "transformer_blocks.0.")
    adaln = count(shapes, "transformer_blocks.0.adaln_proj.")
    assert round(adaln / block, 2) == 0.40
    assert round(count(shapes, "transformer_blocks.") / 50) == block
    assert round(count(shapes, ".adaln_proj.") / 1e9, 2) == 13.01


def test_the_dtypes_of_the_release(shapes: dict[str, tuple[int, ...]]) -> None:
    dtypes = {name: h3.release_dtype(name) for name in shapes}
    fp32 = {name.split(".")[0] for name, dtype in dtypes.items() if dtype is torch.float32}
    assert fp32 == set(h3.FP32_MODULES)
    assert h3.dominant_dtype(dtypes) is torch.bfloat16
    nbytes = sum(math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items())
    assert 66e9 < nbytes < 67e9


def test_the_facts_of_the_release(shapes: dict[str, tuple[int, ...]]) -> None:
    facts = h3.facts_for(h3.RELEASE_CONFIG, {name: h3.release_dtype(name) for name in shapes})
    declared = set(inspect.signature(MiniMaxH3Transformer3DModel.forward).parameters)
    assert {fact.name for fact in facts.inputs} == declared - {"self", "attention_kwargs", "return_dict"}
    named = {dim for fact in facts.inputs for dim in fact.shape if isinstance(dim, str)}
    assert named == {dim.name for dim in facts.dims}
    # The packed rows are those of the three modalities.
    hint = {dim.name: dim.hint for dim in facts.dims}
    assert hint["rows"] == hint["video_rows"] + hint["audio_rows"] + hint["text_rows"]
    assert [fact.name for fact in facts.inputs if fact.stage is Stage.SCHEDULE] == ["timestep"]
    assert {fact.name for fact in facts.inputs if fact.stage is Stage.STEP} == {
        "hidden_states",
        "audio_hidden_states",
        "timestep_indices",
    }
    assert facts.expected["outline"] == {"block": 50, "refiner": 2}
    assert facts.expected["fold-schedule"] == {"table": 51}
    for repeat in facts.repeats:
        numbers = {name.split(repeat.path + ".")[1].split(".")[0] for name in shapes if repeat.path in name}
        assert numbers == {str(i) for i in range(repeat.count)}
    # A modulation table of the most timesteps is indexed with 32 bits.
    elements = facts.dim("timesteps").largest * 3 * 6 * 5376
    assert elements < 2**31 <= elements + 3 * 6 * 5376


def test_every_name_in_a_printed_program_belongs_to_a_module_there_is(
    shapes: dict[str, tuple[int, ...]],
) -> None:
    import re

    modules = {"", "rope"}
    for name in shapes:
        parts = re.sub(r"\b\d+\b", "*", name).split(".")
        modules |= {".".join(parts[:i]) for i in range(1, len(parts))}
    assert {module for module, _ in h3.LABELS} <= modules
