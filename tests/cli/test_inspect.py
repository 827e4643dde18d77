"""`inspect` on a small engine."""

from __future__ import annotations

import json
from pathlib import Path

from h3compile.engine.loader import open_engine


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_engine_is_shown(h3compile, engine: Path) -> None:  # type: ignore[no-untyped-def]
    done = h3compile("inspect", engine)
    assert done.exit_code == 0, done.stderr
    rows = cells(done.stdout)
    assert ["digest", open_engine(engine).digest] in rows
    assert "50 grid points = 49 forwards; 8 grid points = 7 forwards" in done.stdout
    request = rows.index(["request", "request", "1", "2", "x", "y", "graph", "only"])
    block = rows.index(["block", "step", "2", "4", "x", "y", "2.0", "KiB"])
    assert request < block, "regions come in the order of execution"
    assert ["outline", "exact", "2", "block"] in rows
    assert ["plan", "everything", "resident"] in rows
    assert ["transformer", "step", "512", "B"] in rows
    assert ["transformer", "request", "256", "B"] in rows
    assert ["weights/", "3"] in [row[:2] for row in rows]


def test_ranks_are_shown(h3compile, engine: Path, shared: Path) -> None:  # type: ignore[no-untyped-def]
    assert ["ranks", "8", "ranks,", "ulysses=2,", "ring=4"] in cells(h3compile("inspect", shared).stdout)
    assert "ranks" not in [row[0] for row in cells(h3compile("inspect", engine).stdout) if row]


def test_a_region_is_shown(h3compile, engine: Path) -> None:  # type: ignore[no-untyped-def]
    rows = cells(h3compile("inspect", engine, "--region", "block").stdout)
    assert ["input", "x", "bfloat16", "[1,", "rows,", "4]"] in rows
    assert ["weight", "w", "bfloat16", "[4,", "4]"] in rows
    assert ["aten.silu.default", "2"] in rows
    assert ["1", "step", "h0", "y", "block.1"] in rows


def test_an_unknown_region_names_the_nearest(h3compile, engine: Path) -> None:  # type: ignore[no-untyped-def]
    done = h3compile("inspect", engine, "--region", "blok")
    assert (done.exit_code, done.stderr) == (
        1,
        "error: no region is called 'blok': did you mean 'block'?\n",
    )


def test_graphs_are_printed(h3compile, engine: Path) -> None:  # type: ignore[no-untyped-def]
    one = h3compile("inspect", engine, "--region", "block", "--ir").stdout
    assert one.count("aten.linear.default") == 2
    assert h3compile("inspect", engine, "--ir").stdout.count("aten.linear.default") == 3


def test_the_manifest_is_printed_as_it_is(h3compile, engine: Path) -> None:  # type: ignore[no-untyped-def]
    done = h3compile("inspect", engine, "--json")
    assert json.loads(done.stdout) == json.loads((engine / "engine.json").read_text(encoding="utf-8"))


def test_only_verify_notices_a_flipped_byte(h3compile, engine: Path) -> None:  # type: ignore[no-untyped-def]
    assert h3compile("inspect", engine, "--verify").stdout.endswith("every digest is right\n")
    code = engine / "regions/block/code"
    code.write_bytes(b"y" + code.read_bytes()[1:])
    assert h3compile("inspect", engine).exit_code == 0
    done = h3compile("inspect", engine, "--verify")
    assert done.exit_code == 1
    assert "regions/block/code" in done.stderr and done.stderr.count("\n") == 1


def test_a_variant_is_shown_with_the_calls_it_may_serve(h3compile, varied: Path) -> None:  # type: ignore[no-untyped-def]
    rows = cells(h3compile("inspect", varied).stdout)
    block = rows.index(["block", "step", "2", "4", "x", "y", "2.0", "KiB"])
    assert rows[block + 1] == ["block.dense", "step", "2", "6", "x", "y", "graph", "only"]
    assert ["block", "block.dense", "sigma", ">", "0.97"] in rows
    text = h3compile("inspect", varied, "--region", "block.dense").stdout
    assert "serves the calls of block when sigma > 0.97\n" in text
    assert ["1", "step", "h0", "y", "block.1"] in cells(text)
    assert "serves the calls" not in h3compile("inspect", varied, "--region", "block").stdout


def test_without_variants_nothing_is_said_of_them(h3compile, engine: Path) -> None:  # type: ignore[no-untyped-def]
    assert "variants," not in h3compile("inspect", engine).stdout
