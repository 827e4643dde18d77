"""The pass `dlo` that is not told how many blocks stay asks the planner, about the program that it has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from h3compile.errors import BuildError, H3CompileError
from h3compile.passes.canonicalize import Canonicalize
from h3compile.passes.dlo import Dlo
from h3compile.passes.fold_schedule import FoldSchedule
from h3compile.passes.fuse import Fuse
from h3compile.passes.hoist import Hoist
from h3compile.passes.outline import Outline
from h3compile.passes.sp import SequenceParallel
from h3compile.pipeline.manager import Manager
from h3compile.plan.choose import fastest_residency
from h3compile.plan.cost import Parallel
from h3compile.plan.memory import activation_bytes, memory_plan
from h3compile.plan.residency import Mode, Residency
from h3compile.plan.shapes import Clip
from h3compile.plan.work import ProgramWork, released
from h3compile.plan.work_of import work_of
from h3compile.program.program import Program
from h3compile.targets import Target, find_target

GIB = 2**30
LENGTHS = {"rows": 37_760, "video_rows": 37_296, "audio_rows": 414, "text_rows": 50, "timesteps": 2}
BLOCKS = tuple(f"block.{index}" for index in range(4))


@pytest.fixture(scope="module")
def program(traced: Callable[[torch.dtype], Program]) -> Program:
    passes = (Canonicalize(), Outline(), Hoist(), FoldSchedule(), Fuse())
    return Manager(passes).run(traced(torch.bfloat16), find_target("rtx-4090"))[0]


def test_a_model_that_fits_stays_whole(program: Program) -> None:
    found = Dlo().apply(program, find_target("rtx-4090")).program.residency
    assert found is not None and not found.streamed and len(found.blocks) == 4


def test_a_budget_is_kept_for_the_released_model() -> None:
    target = find_target("h200")
    whole, less = fastest_residency(released(), target), fastest_residency(released(), target, hbm=30 * GIB)
    assert not whole.streamed and less.streamed
    # A small canvas does not hide its copies: what there is of the device is used.
    small = Clip(480, 256)
    tight, wide = (fastest_residency(released(), target, hbm=n * GIB, clip=small) for n in (6, 40))
    assert len(tight.resident) < len(wide.resident) < 50


def test_an_impossible_budget_is_one_line(program: Program) -> None:
    with pytest.raises(H3CompileError, match=r"no plan fits 0\.0 GiB of a rtx-4090: the smallest takes "):
        Dlo(hbm="1MiB").apply(program, find_target("rtx-4090"))


def test_a_target_that_does_not_say_how_fast_it_is_is_refused(program: Program) -> None:
    with pytest.raises(H3CompileError, match="cpu has no rate for bandwidth"):
        Dlo().apply(program, find_target("cpu"))


def test_one_device_gathers_from_nobody(program: Program) -> None:
    with pytest.raises(BuildError, match="mode=allgather is of several ranks, and there is one"):
        Dlo(mode="allgather").apply(program, find_target("b300"))


def test_where_blocks_come_from_is_chosen_too() -> None:
    """On a small canvas a rank's own link is too slow for whole blocks, and not for an eighth of each."""
    work, target, small = released(), find_target("b300"), Clip(480, 256)

    def chosen(*modes: Mode, ranks: int = 8) -> Residency:
        return fastest_residency(work, target, ranks=ranks, modes=modes, hbm=6 * GIB, clip=small)

    assert chosen("local", "allgather") == chosen("allgather") != chosen("local")
    assert chosen("allgather").mode == "allgather" and chosen("local").mode == "local"
    assert chosen("local", "allgather", ranks=1).mode == "local"


@pytest.fixture(scope="module")
def shared(program: Program) -> Program:
    return SequenceParallel(ulysses=2).apply(program, find_target("rtx-4090")).program


def test_a_mode_that_is_asked_for_is_kept(shared: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass asks about the ranks that the program has, in the modes that it was told."""
    asked: list[tuple[int, tuple[Mode, ...]]] = []

    def note(
        work: ProgramWork, target: Target, *, ranks: int, modes: tuple[Mode, ...], hbm: int | None
    ) -> Residency:
        asked.append((ranks, modes))
        return Residency(BLOCKS, (), 2, modes[-1])

    monkeypatch.setattr("h3compile.plan.choose.fastest_residency", note)
    for mode in (None, "local", "allgather"):
        found = Dlo(mode=mode).apply(shared, find_target("rtx-4090")).program.residency
        assert found is not None and found.mode == (mode or "allgather")
    assert asked == [(2, ("local", "allgather")), (2, ("local",)), (2, ("allgather",))]


def test_a_rank_has_half_of_the_rows_and_what_it_exchanges(program: Program, shared: Program) -> None:
    work, whole = work_of(shared), work_of(program)
    half = activation_bytes(work, LENGTHS, "step") / activation_bytes(whole, LENGTHS, "step")
    assert 0.45 < half < 0.75  # the request's values are whole, and rows are exchanged
    exchanged = work.regions["block"].exchanged.at(LENGTHS)
    assert exchanged == 12 * (LENGTHS["rows"] / 2) * work.attended

    def beside(work: ProgramWork) -> int:
        device = memory_plan(work, LENGTHS, Residency(work.blocks, (), 2)).device["denoise"]
        return device["workspace"] - round(0.02 * device["activations"]) - 2 * 32 * 2**20

    # Attention has half of the heads, and all rows.
    assert beside(work) == pytest.approx(beside(whole) / 2 + exchanged)


def test_what_nccl_holds_counts_where_a_rank_plans(program: Program, shared: Program) -> None:
    """A program that was shared before it is planned is one rank's: it exchanges, and may gather."""

    def held(one: Program, mode: Mode) -> float:
        parallel = Parallel(1, 2 if one is shared else 1)
        plan = memory_plan(work_of(one), LENGTHS, Residency(BLOCKS, (), 2, mode), parallel)
        return plan.device["encode"].get("collectives", 0) / 2**20

    assert held(program, "local") == 0
    assert (held(shared, "local"), held(shared, "allgather")) == (1260, 1260 + 450)

    def smallest(one: Program, ranks: int) -> float:
        with pytest.raises(H3CompileError) as refused:
            fastest_residency(work_of(one), find_target("h200"), ranks=ranks, modes=("local",), hbm=1 << 20)
        return float(str(refused.value).partition("the smallest takes ")[2].partition(" GiB")[0])

    # What the planner asks for: half of the rows, and NCCL's.
    assert smallest(shared, 2) > smallest(program, 1) / 2 + 1.2


def test_a_ring_holds_what_it_merges(program: Program) -> None:
    work = work_of(SequenceParallel(ring=2).apply(program, find_target("b300")).program)
    block, numbers = work.regions["block"], LENGTHS["rows"] / 2 * work.attended
    # Two stretches of keys and values in 16 bits and a result in 32; libraries merge results into others.
    assert block.by_library("sm_90a").at(LENGTHS) == 12 * numbers
    assert block.by_library("sm_103a").at(LENGTHS) == 24 * numbers


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"hbm": "12"}, "hbm: '12' is no amount of memory: write it like 24GiB or 24GB"),
        (
            {"hbm": "12GiB", "resident": 3},
            "hbm chooses the number of resident blocks: leave resident or hbm out",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, str | int], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        Dlo(**options)  # type: ignore[arg-type]
