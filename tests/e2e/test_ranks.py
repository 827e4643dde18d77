"""Engines of several ranks with every other pass, and lowered ones, against engines of one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

import h3compile
from h3compile.pipeline.testing import ROUNDING_BOUND, distance

Inputs = dict[str, torch.Tensor]
OnRanks = Callable[..., list[object]]
Outputs = list[tuple[torch.Tensor, ...]]
Built = Callable[[str, str], Path]

DTYPE = torch.bfloat16
LOSSY = "fp8,sage(k_block=16),skip(threshold=1.0,until=0.8),dlo(resident=1)"


@pytest.fixture(scope="module")
def built(checkpoints: Callable[[torch.dtype], Path], tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A function from passes and backend to an engine of the tiny checkpoint in BF16."""
    folder, paths = tmp_path_factory.mktemp("ranks"), dict[tuple[str, str], Path]()

    def of(passes: str, backend: str) -> Path:
        if (passes, backend) not in paths:
            path = paths[passes, backend] = folder / f"{len(paths)}.h3e"
            model = str(checkpoints(DTYPE))
            h3compile.build(model, passes=passes, target="cpu", backend=backend, steps=(4,), output=path)
        return paths[passes, backend]

    return of


@pytest.fixture(scope="module")
def forwards(requests_of: Callable[..., Iterator[Inputs]]) -> list[Inputs]:
    """One text row and 129, M from 1 to 2 with the layout of the first, conditioning rows."""
    text, image = list(requests_of("t2va", DTYPE)), list(requests_of("fl2va", DTYPE))
    first = text[0]
    times = (first["token_tags"] == 2).long()
    later = first | {"timestep": torch.tensor([0.0625, 0.31]), "timestep_indices": times}
    return [first, later, text[4], image[2], image[3]]


def outputs(path: Path, forwards: Sequence[Inputs]) -> Outputs:
    module = h3compile.load(path)
    return [module(**inputs, return_dict=False) for inputs in forwards]


def on_all(on_ranks: OnRanks, count: int, path: Path, forwards: Sequence[Inputs]) -> Outputs:
    """What rank 0 gives, once all are found to give the same bits."""
    first, *others = on_ranks(count, lambda rank: outputs(path, forwards))
    assert isinstance(first, list)
    for other in others:
        assert isinstance(other, list)
        for one, two in zip(first, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    return first


def off(found: Outputs, exact: Outputs) -> float:
    """The distance of all outputs together."""
    pairs = [pair for one, two in zip(found, exact, strict=True) for pair in zip(one, two, strict=True)]
    return math.hypot(*(distance(a, b) for a, b in pairs))


@pytest.mark.slow
def test_every_pass_together(built: Built, on_ranks: OnRanks, forwards: list[Inputs]) -> None:
    exact = outputs(built("", "eager"), forwards)
    one = outputs(built(LOSSY, "eager"), forwards)
    several = on_all(on_ranks, 4, built(f"sp(ulysses=4),{LOSSY}", "eager"), forwards)
    assert off(one, exact) > 0.01
    assert off(several, exact) <= ROUNDING_BOUND * off(one, exact)


@pytest.mark.slow
def test_lowered_regions_exchange_too(built: Built, on_ranks: OnRanks, forwards: list[Inputs]) -> None:
    exact = outputs(built("", "eager"), forwards)
    several = on_all(on_ranks, 2, built("sp(ulysses=2)", "inductor"), forwards)
    # Of BF16: two orders of rounding in four blocks; measured 7e-3.
    assert off(several, exact) <= 0.05
