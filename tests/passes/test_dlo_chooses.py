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
from h3compile.plan.memory import activation_bytes
from h3compile.plan.residency import Mode, Residency
from h3compile.plan.shapes import Clip
from h3compile.plan.work import released
from h3compile.plan.work_of import work_of
from h3compile.program.program import Program
from h3compile.targets import find_target

GIB = 2**30


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
        return fastest_residency(work, target, ranks=ranks, modes=modes, hbm=8 * GIB, clip=small)

    assert chosen("local", "allgather") == chosen("allgather") != chosen("local")
    assert chosen("allgather").mode == "allgather" and chosen("local").mode == "local"
    assert chosen("local", "allgather", ranks=1).mode == "local"


def test_a_mode_that_is_asked_for_is_kept(program: Program) -> None:
    target = find_target("rtx-4090")
    shared = SequenceParallel(ulysses=2).apply(program, target).program
    found = Dlo(mode="allgather", hbm="1.5GiB").apply(shared, target).program.residency
    assert found is not None and (found.mode == "allgather" or not found.streamed)


def test_with_ranks_it_chooses_for_one_of_them(program: Program) -> None:
    target = find_target("rtx-4090")
    shared = SequenceParallel(ulysses=2).apply(program, target).program
    assert shared.parallel is not None
    # Of a rank is half of every activation, so a budget holds more.
    budget = "2GiB"
    alone, rank = (Dlo(hbm=budget).apply(p, target).program.residency for p in (program, shared))
    assert alone is not None and rank is not None
    assert len(rank.resident) >= len(alone.resident)
    work, whole = work_of(shared), work_of(program)
    lengths = {"rows": 37_760, "video_rows": 37_296, "audio_rows": 414, "text_rows": 50, "timesteps": 2}
    half = activation_bytes(work, lengths, "step") / activation_bytes(whole, lengths, "step")
    assert 0.45 < half < 0.75  # the request's values are whole, and rows are exchanged


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
