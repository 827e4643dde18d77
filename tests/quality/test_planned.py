"""The plan in a report is the one that was built, and predicts what `h3compile plan` predicts of it."""

from __future__ import annotations

import base64
import sys
from dataclasses import replace

import pytest

from h3compile.models import h3
from h3compile.models.trace import parameter_shapes, trace
from h3compile.pipeline.manager import Manager
from h3compile.pipeline.registry import Registry
from h3compile.pipeline.spelling import resolve
from h3compile.plan.cost import step_seconds
from h3compile.plan.shapes import Clip
from h3compile.plan.work import released
from h3compile.program.parallel import Parallel
from h3compile.program.program import Program
from h3compile.quality.planned import Planned, planned
from h3compile.targets import resolve_target

pytestmark = pytest.mark.slow  # a model is traced
GPU = resolve_target("rtx-4090")
LAYERS = 3


@pytest.fixture(scope="module")
def program() -> Program:
    config = {**h3.RELEASE_CONFIG, "num_layers": LAYERS}
    traced = trace(config, {name: h3.release_dtype(name) for name in parameter_shapes(config)})
    passes, _ = resolve("dlo(resident=1)", Registry.default())
    return Manager(passes).run(traced, GPU)[0]


@pytest.fixture(scope="module")
def found(program: Program) -> Planned:
    made = planned(program, GPU, steps=8)
    assert made is not None
    return made


def test_it_is_the_residency_of_the_program(found: Planned, program: Program) -> None:
    assert found.residency == program.residency
    assert len(found.residency.resident) == 1 and len(found.residency.blocks) == LAYERS


def test_it_predicts_a_step_and_where_the_bytes_are(found: Planned) -> None:
    seconds = step_seconds(released("fuse").with_blocks(LAYERS), GPU, Clip(steps=8).dims)
    assert found.facts["A step"].startswith(f"{seconds:.4g} s, as with all weights on the device")
    assert "8 grid points = 7 forwards" in found.facts["Predicted for"]
    denoise = found.kinds["GPU, denoise"]
    assert 1 < denoise["slots"] / denoise["resident weights"] < 2.1  # two of one block
    assert denoise["activations"] > 3 * 2**30 and found.kinds["host"]["pinned streamed weights"] > 2**30


def test_the_picture_is_an_svg_of_its_own_bytes(found: Planned) -> None:
    pytest.importorskip("matplotlib")
    kind, _, text = found.picture.partition(",")
    assert kind == "data:image/svg+xml;base64" and found.missing == ()
    assert b"<svg" in base64.b64decode(text)


def test_without_matplotlib_it_says_so(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    made = planned(program, GPU, steps=8)
    assert made is not None and made.picture == "" and "A step" in made.facts
    assert made.missing == ("pictures need matplotlib: pip install matplotlib",)


def test_a_target_without_rates_predicts_nothing_and_says_why(program: Program) -> None:
    made = planned(program, resolve_target("cpu"), steps=8)
    assert made is not None and made.facts == {} and made.missing[0].startswith("nothing is predicted: ")


def test_of_ranks_one_is_planned_and_what_it_lacks_is_said(program: Program) -> None:
    ranks = program.evolve(parallel=Parallel(8))
    made = planned(ranks, GPU, steps=8)
    assert made is not None and made.facts
    assert made.missing == ("what 8 ranks exchange is left out: `h3compile plan --gpus 8` has it",)
    assert ranks.residency is not None
    gathered = ranks.evolve(residency=replace(ranks.residency, mode="allgather"))
    made = planned(gathered, GPU, steps=8)
    assert made is not None and not made.facts
    assert made.missing == ("of gathered blocks `h3compile plan --gpus 8` predicts",)


def test_a_program_without_a_plan_has_none(program: Program) -> None:
    assert planned(replace(program, residency=None), GPU, steps=8) is None
