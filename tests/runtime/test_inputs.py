from __future__ import annotations

import pytest
import torch

from h3compile.engine.manifest import PortRecord
from h3compile.runtime.inputs import Inputs

PORTS = (
    PortRecord(name="latents", dtype="float32", shape=("rows", 4)),
    PortRecord(name="text", dtype="bfloat16", shape=("rows", 4)),
    PortRecord(name="tags", dtype="int64", shape=("rows",)),
)


def take(inputs: Inputs, given: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    taken = inputs.take(given)
    inputs.acknowledge()
    return taken


@pytest.fixture
def inputs() -> Inputs:
    return Inputs(PORTS, ("text", "tags"), torch.device("cpu"))


@pytest.fixture
def given() -> dict[str, torch.Tensor]:
    return {"latents": torch.randn(3, 4), "text": torch.randn(3, 4), "tags": torch.tensor([0, 1, 2])}


def test_inputs_come_in_the_declared_dtype(inputs: Inputs, given) -> None:
    values, changed = take(inputs, given)
    assert {name: value.dtype for name, value in values.items()} == {
        "latents": torch.float32,
        "text": torch.bfloat16,
        "tags": torch.int64,
    }
    assert torch.equal(values["text"], given["text"].bfloat16())
    assert changed == {"text", "tags"}


def test_the_same_objects_are_unchanged(inputs: Inputs, given) -> None:
    take(inputs, given)
    values, changed = take(inputs, given)
    assert not changed
    assert values["text"] is take(inputs, given)[0]["text"]


def test_equal_contents_in_other_objects_are_unchanged(inputs: Inputs, given) -> None:
    take(inputs, given)
    assert not take(inputs, {name: value.clone() for name, value in given.items()})[1]


def test_a_write_in_place_is_a_change_even_to_the_snapshot_s_own_source(inputs: Inputs, given) -> None:
    take(inputs, given)
    given["tags"][0] = 2
    values, changed = take(inputs, given)
    assert changed == {"tags"} and values["tags"].tolist() == [2, 1, 2]


def test_a_write_to_a_tensor_without_a_version_is_a_change(inputs: Inputs, given) -> None:
    with torch.inference_mode():
        given["tags"] = torch.tensor([0, 1, 2])
        take(inputs, given)
        assert not take(inputs, given)[1]
        given["tags"][0] = 2
        assert take(inputs, given)[1] == {"tags"}


def test_a_write_of_the_same_content_is_none(inputs: Inputs, given) -> None:
    take(inputs, given)
    given["tags"].add_(0)
    assert not take(inputs, given)[1]


@pytest.mark.parametrize(("old", "new", "differs"), [(0.0, -0.0, True), (float("nan"), float("nan"), False)])
def test_contents_are_compared_by_their_bits(
    inputs: Inputs, given, old: float, new: float, differs: bool
) -> None:
    take(inputs, {**given, "text": torch.full((3, 4), old)})
    assert ("text" in take(inputs, {**given, "text": torch.full((3, 4), new)})[1]) is differs


def test_another_length_is_a_change(inputs: Inputs, given) -> None:
    take(inputs, given)
    assert take(inputs, {**given, "tags": torch.tensor([0, 1])})[1] == {"tags"}


def test_a_failure_in_between_does_not_lose_a_change(inputs: Inputs, given) -> None:
    with pytest.raises(KeyError):
        take(inputs, {name: given[name] for name in ("latents", "text")})
    assert take(inputs, given)[1] == {"text", "tags"}


def test_a_change_is_told_until_it_is_acknowledged(inputs: Inputs, given) -> None:
    for _ in range(2):
        assert inputs.take(given)[1] == {"text", "tags"}
    inputs.acknowledge()
    assert not inputs.take(given)[1]


def test_step_inputs_are_contiguous_aligned_and_without_gradient(kit, inputs: Inputs, given) -> None:
    for latents in (torch.randn(4, 3).t(), kit.misaligned(torch.randn(3, 4)), torch.randn(1, 4).expand(3, 4)):
        value = take(inputs, {**given, "latents": latents.requires_grad_()})[0]["latents"]
        assert value.is_contiguous() and value.data_ptr() % 64 == 0 and not value.requires_grad
        assert torch.equal(value, latents)


def test_release_forgets(inputs: Inputs, given) -> None:
    take(inputs, given)
    assert inputs.nbytes == 3 * 4 * 2 + 3 * 8
    inputs.release()
    assert inputs.nbytes == 0 and take(inputs, given)[1] == {"text", "tags"}
