"""What several ranks skipped, added up: each counts tiles of its own heads, and all say what one would."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import h3compile
from h3compile.errors import H3CompileError
from h3compile.quality.skipped import skipped_tiles
from h3compile.runtime.module import CompiledTransformer

Inputs = dict[str, torch.Tensor]
OnRanks = Callable[..., list[object]]


@pytest.fixture(scope="module")
def forwards(packed: Callable[..., Inputs]) -> list[Inputs]:
    """Three steps of one request of 574 rows, nine query tiles; the first is too noisy to skip."""
    first = packed("t2va", text=12, video=148, audio=414, dtype=torch.float32)
    return [first | {"timestep": torch.tensor(times)} for times in ([0.0, 0.05], [0.2, 0.31], [0.5, 0.7])]


def table(module: CompiledTransformer) -> str:
    """The report of ``module`` as text: what every step and block skipped and considered."""
    return skipped_tiles(module.manifest, module.measured()).encode()


def run(module: CompiledTransformer, forwards: list[Inputs]) -> None:
    for inputs in forwards:
        module(**inputs)


@pytest.fixture(scope="module")
def expected(modules: Callable[..., CompiledTransformer], forwards: list[Inputs]) -> str:
    """What one rank reports, some tiles in some steps."""
    module = modules(torch.float32, "skipping")
    run(module, forwards)
    text = table(module)
    noisy, *later = json.loads(text)["steps"]
    assert noisy["share"] == 0 and all(0.01 < step["share"] < 0.99 for step in later)
    return text


@pytest.mark.matrix
@pytest.mark.parametrize("count", [2, 4])
def test_every_rank_that_asks_is_told_what_one_rank_counts(
    engines: Callable[..., Path], forwards: list[Inputs], expected: str, on_ranks: OnRanks, count: int
) -> None:
    path = engines(torch.float32, f"skipping on {count}")

    def work(rank: int) -> object:
        module = h3compile.load(path)
        run(module, forwards[:1])
        early = table(module)
        run(module, forwards[1:])
        own = [value.clone() for step in module._parts.measures.steps for value in step.values.values()]
        texts = table(module), table(module)  # asking changes nothing
        held = [value for step in module._parts.measures.steps for value in step.values.values()]
        assert all(map(torch.equal, own, held))
        return early, texts, torch.stack(own).sum(0)

    results = on_ranks(count, work)
    for early, texts, _ in results:  # type: ignore[misc]
        assert json.loads(early)["steps"] == json.loads(expected)["steps"][:1]
        assert texts == (expected, expected)
    counted = torch.stack([own for _, _, own in results])  # type: ignore[misc]
    assert (counted[:, 1] == counted[0, 1]).all() and len(counted[:, 0].unique()) > 1, "heads are not alike"


def test_who_follows_has_a_part_in_what_rank_0_is_told(
    engines: Callable[..., Path], forwards: list[Inputs], expected: str, on_ranks: OnRanks
) -> None:
    path = engines(torch.float32, "skipping on 2")

    def work(rank: int) -> object:
        module = h3compile.load(path)
        if rank:
            return module.follow()
        with module.leading():
            assert module.measured() == ()
            run(module, forwards)
            text = table(module)
            run(module, forwards[2:])  # no less noisy: another request
        return text, len(module._parts.measures.steps)

    assert on_ranks(2, work) == [(expected, 1), len(forwards) + 1]


def test_ranks_that_ask_for_different_things_are_told_so_and_go_on(
    engines: Callable[..., Path], forwards: list[Inputs], expected: str, on_ranks: OnRanks
) -> None:
    path = engines(torch.float32, "skipping on 2")

    def work(rank: int) -> object:
        module = h3compile.load(path)
        run(module, forwards[:2])
        lines = []
        with pytest.raises(H3CompileError) as raised:
            module.measured() if rank else run(module, forwards[2:])
        lines.append(str(raised.value))
        if rank:
            module.release()
        with pytest.raises(H3CompileError) as raised:
            module.measured()
        lines.append(str(raised.value))
        module.release()
        run(module, forwards)
        return lines, table(module)

    mend = "they ask for different things: have every rank call the same"
    for lines, text in on_ranks(2, work):  # type: ignore[misc]
        assert lines == [
            f"rank 0 for a forward and rank 1 for what 2 steps measured: {mend}",
            f"rank 0 for what 2 steps measured and rank 1 for what 0 steps measured: {mend}",
        ]
        assert text == expected


def test_an_engine_that_measures_nothing_asks_nobody(engines: Callable[..., Path], on_ranks: OnRanks) -> None:
    path = engines(torch.float32, "ranks4")

    def work(rank: int) -> object:
        module = h3compile.load(path)
        return module.measured() if rank else ()  # a rank alone would wait

    assert on_ranks(4, work) == [()] * 4


@pytest.mark.slow
def test_run_reports_of_two_ranks_what_it_does_of_one(engines: Callable[..., Path], tmp_path: Path) -> None:
    main = "from h3compile.cli.main import main; main()"
    options = ["--prompt", "kite", "--size", "64x64", "--steps", "5", "--gpus"]
    found = []
    for count, kind in ((1, "skipping"), (2, "skipping on 2")):
        files = ["-o", str(tmp_path / f"{count}.mp4"), "--report", str(tmp_path / f"{count}.json")]
        arguments = ["run", str(engines(torch.float32, kind)), *options, str(count), *files]
        done = subprocess.run(
            [sys.executable, "-c", main, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        (line,) = (line for line in done.stdout.splitlines() if "skipped tiles" in line)
        found.append((line, (tmp_path / f"{count}.json").read_text()))
    assert found[0] == found[1]
    assert max(step["share"] for step in json.loads(found[0][1])["steps"]) > 0
