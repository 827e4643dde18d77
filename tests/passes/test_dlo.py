from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from h3compile.errors import BuildError
from h3compile.passes.canonicalize import Canonicalize
from h3compile.passes.dlo import Dlo, streamable
from h3compile.passes.fold_schedule import FoldSchedule
from h3compile.passes.fuse import Fuse
from h3compile.passes.hoist import Hoist
from h3compile.passes.outline import Outline
from h3compile.passes.sp import SequenceParallel
from h3compile.pipeline.base import Rewrite
from h3compile.pipeline.manager import Manager, order
from h3compile.pipeline.registry import Registry
from h3compile.pipeline.spelling import resolve
from h3compile.pipeline.testing import Case, check_pass
from h3compile.program.printer import print_program
from h3compile.program.program import Program
from h3compile.program.residency import Residency
from h3compile.program.serialize import region_to_json
from h3compile.program.verifier import VerificationError, verify
from h3compile.targets import find_target

BEFORE = (Canonicalize(), Outline(), Hoist(), FoldSchedule(), Fuse())
BLOCKS = tuple(f"block.{i}" for i in range(4))


@pytest.fixture(scope="module")
def before(traced: Callable[[torch.dtype], Program]) -> Program:
    return Manager(BEFORE).run(traced(torch.bfloat16), find_target("cpu"))[0]


@pytest.fixture
def planned(before: Program) -> Callable[[Dlo], Rewrite]:
    """A function from the pass to what it makes of the tiny model."""
    return lambda item: item.apply(before, find_target("cpu"))


def test_exact_it_changes_where_weights_live_and_nothing_else(case: Case) -> None:
    # The regions are what they were, so a few inputs are enough: the runtime's tests load by the plan.
    few = replace(case, inputs=case.inputs[:2])
    found = check_pass(Dlo(resident=1), few, after=BEFORE)
    assert found.run.matches == {"resident": 1, "streamed": 3}
    assert found.run.ops_before == found.run.ops_after


@pytest.mark.parametrize(
    ("item", "residency"),
    [
        (Dlo(resident=0), Residency(BLOCKS, (), 2)),
        (Dlo(resident=2), Residency(BLOCKS, ("block.0", "block.2"), 2)),
        (Dlo(resident=2, place="prefix", slots=1), Residency(BLOCKS, BLOCKS[:2], 1)),
        (Dlo(resident=4), Residency(BLOCKS, BLOCKS, 0)),
    ],
)
def test_the_residency_that_is_asked_for(planned, item: Dlo, residency: Residency) -> None:
    found = planned(item)
    assert found.program.residency == residency
    counts = found.counts()
    assert sum(counts.values()) == 4 and counts.get("resident", 0) == len(residency.resident)


def test_shards_are_gathered_from_ranks(before: Program) -> None:
    shared = SequenceParallel(ulysses=2).apply(before, find_target("cpu")).program
    found = Dlo(resident=1, mode="allgather", pieces=4).apply(shared, find_target("cpu")).program.residency
    assert found == Residency(BLOCKS, BLOCKS[:1], 2, "allgather", 4)


def test_only_repeated_calls_of_the_step_are_streamed(planned) -> None:
    program = planned(Dlo(resident=0)).program
    assert streamable(program) == BLOCKS
    assert {"refiner.0", "embed.0", "head.0"} <= {call.name for call in program.calls}


def test_it_comes_last_and_says_so_in_the_printed_program(planned) -> None:
    typed, _ = resolve("dlo(resident=1),sp(ulysses=2),skip,fp8", Registry.default())
    assert order(typed)[-1] == Dlo(resident=1)
    program = planned(Dlo(resident=1)).program
    assert "residency 1 of 4 blocks resident, the others in 2 slots, local" in print_program(program)


def test_ranks_are_shared_before_weights_are_placed_whatever_is_typed_first(case: Case) -> None:
    found = []
    for typed in ("sp(ulysses=2),dlo(resident=1),-fuse", "-fuse,dlo(resident=1),sp(ulysses=2)"):
        program, runs = Manager(resolve(typed, Registry.default())[0]).run(case.program, find_target("cpu"))
        assert [run.name for run in runs][-2:] == ["sp", "dlo"]
        assert program.parallel is not None and program.residency is not None
        regions = {name: region_to_json(region) for name, region in program.regions.items()}
        found.append((print_program(program), regions))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "text", ["dlo(resident=1)", "dlo(resident=0,slots=3)", "dlo(resident=2,place=prefix)"]
)
def test_it_is_spelled_as_it_is_typed(text: str) -> None:
    (item,) = (found for found in resolve(text, Registry.default())[0] if found.name == "dlo")
    assert item.spelled() == text


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("dlo(resident=-1)", "resident is -1, and counts blocks"),
        ("dlo(resident=1,slots=-2)", "slots is -2, and counts places"),
        ("dlo(resident=1,mode=remote)", "mode is 'remote', and must be one of local, allgather"),
        ("dlo(resident=1,place=last)", "place is 'last', and must be one of spaced, prefix"),
        ("dlo(slots=3)", r"slots, place and pieces belong to a number of resident blocks: add resident=N"),
    ],
)
def test_bad_options(typed: str, line: str) -> None:
    with pytest.raises(BuildError, match=line):
        resolve(typed, Registry.default())


@pytest.mark.parametrize(
    ("item", "line"),
    [
        (Dlo(resident=5), "resident=5 does not fit the 4 blocks there are: choose between 0 and 4"),
        (Dlo(resident=5, place="prefix"), "resident=5 does not fit the 4 blocks"),
        (Dlo(resident=1, slots=0), "3 blocks are streamed and there is no slot for them"),
        (Dlo(resident=4, slots=1), "every block is resident and slots=1 would stay empty"),
        (Dlo(resident=1, pieces=2), "pieces=2 does nothing in local mode"),
        (Dlo(resident=1, mode="allgather"), r"mode=allgather is of several ranks, and there is one: add sp"),
    ],
)
def test_impossible_plans(planned, item: Dlo, line: str) -> None:
    with pytest.raises(BuildError, match=line):
        planned(item)


def test_a_residency_of_other_calls_is_a_broken_program(planned) -> None:
    program = planned(Dlo(resident=0)).program
    for blocks, line in (
        (("refiner.0", "refiner.1"), "refiner.0, which is no call of the step with weights"),
        (BLOCKS[::-1], "in another order than the step"),
    ):
        with pytest.raises(VerificationError, match=line):
            verify(program.evolve(residency=Residency(blocks, (), 1)))
