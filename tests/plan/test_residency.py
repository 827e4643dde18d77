"""Which blocks stay on the device, and what a residency refuses."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3compile.errors import BuildError
from h3compile.plan.residency import Residency, piece_bytes, prefix, spaced

BLOCKS = ("block.0", "block.1", "block.2", "block.3")


def test_streamed_blocks_are_the_others_in_step_order() -> None:
    residency = Residency(BLOCKS, ("block.0", "block.2"), slots=1)
    assert residency.streamed == ("block.1", "block.3")
    assert residency.areas == 0
    assert Residency(BLOCKS, BLOCKS, slots=0).streamed == ()
    assert Residency(BLOCKS, (), slots=2, mode="allgather", pieces=3).areas == 2


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"blocks": ("a", "a"), "resident": (), "slots": 1}, "listed twice"),
        ({"resident": ("block.9",), "slots": 1}, "no streamable block is called 'block.9'"),
        ({"resident": ("block.2", "block.0"), "slots": 1}, "not in step order"),
        ({"resident": ("block.0", "block.0"), "slots": 1}, "not in step order"),
        ({"resident": ("block.0",), "slots": 0}, "3 blocks are streamed and there is no slot for them"),
        ({"resident": ("block.0",), "slots": -1}, "there is no slot for them"),
        ({"resident": BLOCKS, "slots": 2}, "slots=2 would stay empty"),
        ({"resident": (), "slots": 2, "mode": "allgather", "pieces": 0}, "cut into 0 copies"),
        ({"resident": (), "slots": 2, "pieces": 2}, "pieces=2 does nothing in local mode"),
    ],
)
def test_contradictions_are_refused_in_one_line(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(BuildError, match=line):
        Residency(**{"blocks": BLOCKS, **fields})


@pytest.mark.parametrize("choose", [spaced, prefix])
@pytest.mark.parametrize("count", [-1, 5])
def test_no_more_residents_than_blocks(choose: Any, count: int) -> None:
    with pytest.raises(BuildError, match=f"resident={count} does not fit the 4 blocks"):
        choose(BLOCKS, count)


def test_prefix_and_spaced_by_example() -> None:
    assert prefix(BLOCKS, 2) == ("block.0", "block.1")
    assert spaced(BLOCKS, 2) == ("block.0", "block.2")
    assert spaced(range(10), 3) == (0, 4, 7)  # type: ignore[arg-type, comparison-overlap]
    assert spaced((), 0) == ()


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_spaced_is_even_over_the_cycle(size: tuple[int, int]) -> None:
    total, count = size
    blocks = [str(index) for index in range(total)]
    chosen = spaced(blocks, count)
    assert len(chosen) == count
    assert not chosen or chosen[0] == "0"
    marks = [name in set(chosen) for name in blocks] * 2
    for width in range(1, total):
        held = {sum(marks[start : start + width]) for start in range(total)}
        assert held <= {width * count // total, -(-width * count // total)}


@given(st.integers(0, 10**10), st.integers(1, 64), st.integers(1, 8))
def test_pieces_hold_the_block_and_hardly_more(size: int, ranks: int, pieces: int) -> None:
    one = piece_bytes(size, ranks, pieces)
    assert 0 <= one * ranks * pieces - size < ranks * pieces


def test_planning_needs_no_torch() -> None:
    program = (
        "import importlib, pkgutil, sys, h3compile.plan as plan\n"
        "walking = ('kernels', 'work_of')  # they read the graphs of a program\n"
        "names = [m.name for m in pkgutil.iter_modules(plan.__path__) if m.name not in walking]\n"
        "[importlib.import_module(f'h3compile.plan.{name}') for name in names]\n"
        "print(len(names), sorted({'torch', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    count, _, loaded = done.stdout.strip().partition(" ")
    assert int(count) >= 4 and loaded == "[]"
