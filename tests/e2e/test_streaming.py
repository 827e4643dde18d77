"""Plans of the tiny engines against everything resident: equal bits, whatever the plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

import h3compile
from h3compile.plan.races import check
from h3compile.plan.residency import prefix
from h3compile.plan.schedule import Operation, Record
from h3compile.runtime.module import CompiledTransformer

Inputs = Mapping[str, torch.Tensor]
TASKS = ("t2va", "fl2va", "ref2va")
BLOCKS = tuple(f"block.{i}" for i in range(4))
# How many blocks stay, and how many slots the others have; beyond what is streamed they are spare.
PLANS = [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1), (2, 3), (3, 1), (3, 2), (4, 0)]
CHECKED = ((torch.bfloat16, "folded"), (torch.bfloat16, "inductor"), (torch.float32, "hoisted"))


def poisoned(module: CompiledTransformer) -> list[Operation]:
    """The operations as they are executed; a slot that is free is overwritten at once."""
    found: list[Operation] = []
    streamer = module._parts.streamer
    assert streamer is not None

    def observe(operation: Operation) -> None:
        found.append(operation)
        if isinstance(operation, Record) and operation.event.startswith("free/"):
            streamer._slots[int(operation.event.removeprefix("free/"))].fill_(0xFF)

    streamer.observe = observe
    return found


def assert_no_race(module: CompiledTransformer, operations: Sequence[Operation]) -> None:
    ranges = module.manifest.partitions[module.partition].ranges
    assert module.residency is not None
    sizes = {name: record.nbytes for name, record in ranges.items()}
    limit = module.stats.bytes_slots + sum(sizes[name] for name in module.residency.resident)
    assert [str(race) for race in check(operations, module.residency, sizes, limit)] == []


@pytest.fixture(scope="module")
def forwards(requests_of: Callable[..., Iterator[Inputs]]) -> Callable[[torch.dtype], list[Inputs]]:
    """All tasks, M from 1 to 3, each request with its next step, and then the first one again."""

    def of(dtype: torch.dtype) -> list[Inputs]:
        found: list[Inputs] = []
        for inputs in (given for task in TASKS for given in itertools.islice(requests_of(task, dtype), 3)):
            latents = {name: inputs[name] * 0.9 for name in ("hidden_states", "audio_hidden_states")}
            found += [inputs, {**inputs, **latents}]
        return [*found, found[0]]

    return of


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kind"), CHECKED, ids=lambda value: str(value).removeprefix("torch."))
def test_exact_every_count_of_residents_and_slots(dtype: torch.dtype, kind: str, engines, forwards) -> None:
    requests = forwards(dtype)
    whole = h3compile.load(engines(dtype, kind))
    assert whole.residency is None
    expected = [whole(**inputs) for inputs in requests]
    for resident, slots in PLANS:
        module = h3compile.load(engines(dtype, kind), resident=resident, slots=slots)
        operations = poisoned(module)
        for inputs, truth in zip(requests, expected, strict=True):
            assert all(map(torch.equal, module(**inputs), truth)), (resident, slots)
        assert_no_race(module, operations)
    for kept in (prefix(BLOCKS, 2), BLOCKS[-1:]):
        module = h3compile.load(engines(dtype, kind), resident=kept)
        operations = poisoned(module)
        assert all(map(torch.equal, module(**requests[0]), expected[0])), kept
        assert_no_race(module, operations)


@pytest.mark.slow
def test_exact_fp8_as_it_was_built(checkpoints, forwards, tmp_path: Path) -> None:
    path = tmp_path / "fp8.h3e"
    h3compile.build(
        str(checkpoints(torch.bfloat16)),
        passes="fp8,skip,dlo(resident=1)",
        target="cpu",
        backend="eager",
        steps=(4,),
        output=path,
    )
    module, whole = h3compile.load(path), h3compile.load(path, resident=4)
    assert str(module.residency) == "1 of 4 blocks resident, the others in 2 slots, local"
    slots = module.manifest.partitions["transformer"].ranges["block.1"].slots
    assert "float8_e4m3fn" in {slot.dtype for slot in slots}
    operations = poisoned(module)
    for inputs in forwards(torch.bfloat16):
        assert all(map(torch.equal, module(**inputs), whole(**inputs)))
    assert_no_race(module, operations)
    assert len(module.measured()) == len(whole.measured()) > 0


@pytest.mark.slow
def test_a_whole_generation_streamed(checkpoints, engines) -> None:
    from h3compile.models.generate import generate, load_pipeline
    from h3compile.models.request import Request

    request, _ = Request(prompt="a red kite over the dunes", width=64, height=64, steps=4, seed=3).resolve()
    folder, path = checkpoints(torch.float32), engines(torch.float32, "hoisted")
    made = [
        generate(load_pipeline(folder, transformer=module, device="cpu"), request)
        for module in (h3compile.load(path), h3compile.load(path, resident=1, slots=1))
    ]
    assert torch.equal(*(torch.as_tensor(clip.frames) for clip in made))
    assert torch.equal(*(torch.as_tensor(clip.waveform) for clip in made))
