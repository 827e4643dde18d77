"""A whole engine with variants and measures, against plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from h3compile.errors import Interrupted
from h3compile.runtime.load import load
from h3compile.runtime.module import CompiledTransformer
from h3compile.runtime.pool import Pool

DENSE, SPARSE = -1.0, 1.0
SCHEDULE = ((0.0,), (0.05, 0.3), (0.2, 0.5), (0.7, 0.9))


@pytest.fixture
def module(varied: Path) -> CompiledTransformer:
    return load(varied)


def assert_same(kit, module: CompiledTransformer, given: Mapping[str, torch.Tensor], sign: float) -> None:
    expected = kit.reference(kit.weights(), given, sign)
    assert all(torch.equal(one, other) for one, other in zip(module(**given), expected, strict=True))
    others = kit.reference(kit.weights(), given, -sign)
    assert not any(torch.equal(one, other) for one, other in zip(expected, others, strict=True))


def request(kit, module: CompiledTransformer, **options: object) -> None:
    """Every step of one request: the text and the layout are the same tensors throughout."""
    given = kit.inputs(**options)
    for timesteps in SCHEDULE:
        step = kit.inputs(**{**options, "timesteps": timesteps})
        module(**{**given, **{name: step[name] for name in ("timestep", "timestep_indices")}})


@pytest.mark.parametrize(
    ("rows", "timesteps", "sign"),
    [
        ((5, 2, 1), (0.25, 0.5), SPARSE),  # 8 rows
        ((4, 2, 1), (0.25, 0.5), DENSE),  # 7 rows
        ((5, 2, 1), (0.05, 0.999), DENSE),  # sigma 0.95, whatever the conditioning rows are
        ((5, 2, 1), (0.999, 0.05), DENSE),
        ((40, 6, 4), tuple(i / 50 for i in range(50)), DENSE),  # a timestep for every row
        ((40, 6, 4), tuple(0.2 + i / 100 for i in range(50)), SPARSE),
    ],
)
def test_exact_the_form_that_a_step_calls_for(
    kit, module: CompiledTransformer, rows: tuple[int, ...], timesteps: tuple[float, ...], sign: float
) -> None:
    assert_same(kit, module, kit.inputs(*rows, timesteps=timesteps), sign)


def test_the_choice_is_made_anew_in_every_step(kit, module: CompiledTransformer) -> None:
    for t, sign in ((0.0, DENSE), (0.5, SPARSE), (0.05, DENSE), (0.7, SPARSE)):
        assert_same(kit, module, kit.inputs(timesteps=(t,)), sign)


@pytest.mark.parametrize("hoist", [True, False])
@pytest.mark.parametrize("fold", [True, False])
def test_it_does_not_depend_on_other_passes(kit, tmp_path: Path, fold: bool, hoist: bool) -> None:
    module = load(kit.Toy(varied=True, fold=fold, hoist=hoist).write(tmp_path / "a.h3e"))
    for t, sign in ((0.0, DENSE), (0.5, SPARSE)):
        assert_same(kit, module, kit.inputs(timesteps=(t,)), sign)
    assert [dict(step.variants) for step in module.measured()] == [{"block": "block.dense"}, {}]


def test_what_the_steps_of_a_request_left(kit, module: CompiledTransformer) -> None:
    assert module.measured() == ()
    request(kit, module)
    steps = module.measured()
    assert [step.sigma for step in steps] == pytest.approx([1.0, 0.95, 0.8, 0.3])
    assert [dict(step.variants) for step in steps] == [{"block": "block.dense"}] * 2 + [{}] * 2
    counts = [[step.values[name].tolist() for name in ("tiles_0", "tiles_1")] for step in steps]
    assert counts == [[[0, 0]] * 2] * 2 + [[[1, 4]] * 2] * 2


@pytest.mark.parametrize("change", [{}, {"seed": 1}, {"text": 4}], ids=["nothing", "prompt", "size"])
def test_another_request_begins_anew(kit, module: CompiledTransformer, change: dict[str, int]) -> None:
    request(kit, module)
    held = module.stats.bytes_request
    request(kit, module, **change)
    assert len(module.measured()) == len(SCHEDULE)
    if not change:
        assert module.stats.bytes_request == held


def test_release_forgets_the_request(kit, module: CompiledTransformer) -> None:
    request(kit, module)
    module.release()
    assert module.measured() == () and module.stats.bytes_request == 0


def test_a_stopped_step_leaves_nothing(kit, module: CompiledTransformer) -> None:
    given = kit.inputs(timesteps=(0.0,))
    module(**given)
    module.stop()
    with pytest.raises(Interrupted):
        module(**{**given, "timestep": torch.tensor([0.5])})
    assert [step.sigma for step in module.measured()] == [1.0]
    module(**{**given, "timestep": torch.tensor([0.5])})
    assert [step.sigma for step in module.measured()] == [1.0, 0.5]


def test_measures_count_as_memory_of_the_request(kit, module: CompiledTransformer) -> None:
    given = kit.inputs(timesteps=(0.5,))
    module(**given)
    before = module.stats.bytes_request
    module(**{**given, "timestep": torch.tensor([0.6])})
    assert module.stats.bytes_request - before == 2 * 2 * 4


def test_the_timesteps_are_looked_at_once(
    kit, module: CompiledTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading them waits for the device; the choice must not read them again."""
    given = kit.inputs(timesteps=(0.5,))
    module(**given)

    def read(*tensors: torch.Tensor) -> list[float]:
        raise AssertionError("read again")

    monkeypatch.setattr("h3compile.runtime.forward.read_timesteps", read)
    module(**given)
    with pytest.raises(AssertionError, match="read again"):
        module(**{**given, "timestep": torch.tensor([0.6])})


def test_an_engine_without_measures_keeps_nothing(kit, engine: Path) -> None:
    module = load(engine)
    request(kit, module)
    assert module.measured() == ()


def test_forms_share_weights_and_engines_share_forms(varied: Path) -> None:
    pool = Pool()
    one, other = load(varied, share=pool), load(varied, share=pool)
    found = [module._parts.runner._variants["block.dense"] for module in (one, other)]
    assert found[0] is found[1]
    assert found[0] is not one._parts.runner._calls[1].executor
    ranges = {call.range for call in one.manifest.calls}
    assert set(one.manifest.partitions["transformer"].ranges) == ranges


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_for_the_choice_or_the_measures(kit, tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    changes = {"target": "gpu", "arch": f"sm_{major}{minor}a"}
    module = load(kit.Toy(varied=True, changes=changes).write(tmp_path / "a.h3e"))
    for t, sign in ((0.0, DENSE), (0.5, SPARSE)):
        given = {name: value.to(module.device) for name, value in kit.inputs(timesteps=(t,)).items()}
        expected = kit.reference(kit.weights(), kit.inputs(timesteps=(t,)), sign)
        module(**given)
        torch.cuda.set_sync_debug_mode("error")
        try:
            outputs = module(**given)  # nothing changed, so nothing need be read
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for one, other in zip(outputs, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)
    (step,) = module.measured()  # made again at the same sigma, each step began a request
    assert [value.device == module.device for value in step.values.values()] == [True, True]
    assert [value.tolist() for value in step.values.values()] == [[1, 4], [1, 4]]
