"""`h3compile plan`: quick, without torch, and one line for everything that is asked wrongly."""

from __future__ import annotations

import itertools
import json
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import Result

from h3compile.errors import H3CompileError
from h3compile.passes.dlo import Dlo
from h3compile.passes.sp import SequenceParallel
from h3compile.pipeline.registry import Registry
from h3compile.pipeline.spelling import resolve

CARDS = ("rtx-4090", "2xrtx-5090", "h200", "8xb300")


def spaced(text: str) -> str:
    return " ".join(text.split())


def test_without_a_question_everything_is_shown(h3compile) -> None:  # type: ignore[no-untyped-def]
    done: Result = h3compile("plan", "--target", "8xb300", "--allow", "fp8")
    assert done.exit_code == 0, done.stderr
    assert "50 grid points = 49 forwards" in done.stdout
    assert "● BF16" in done.stdout and "▲ fp8" in done.stdout
    assert "shards of 8" in done.stdout and "own host memory" in done.stdout
    assert "GiB on one GPU" in done.stdout
    assert "predicted, not measured" in done.stdout


def test_a_budget_gives_one_plan_explained(h3compile) -> None:  # type: ignore[no-untyped-def]
    done: Result = h3compile("plan", "--target", "rtx-4090", "--hbm", "12GiB")
    assert done.exit_code == 0, done.stderr
    text = spaced(done.stdout)
    assert "weights 0 of 50 blocks resident, the others in 2 slots, local" in text
    assert "the copies hide behind the kernels" in text
    assert "bound by kernels (100%); copies need 1." in text and "GB/s of the link" in text
    assert "GiB of 12.0 GiB at decode" in text
    assert "pinned streamed weights 37.38 GiB" in text
    assert "build h3compile build --passes 'dlo(resident=0,slots=2)' --target rtx-4090 -o h3.h3e" in text
    assert "predicted, not measured" in text


def test_the_passes_that_are_shown_can_be_typed(h3compile, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done: Result = h3compile(
        "plan", "--target", "h200", "--passes", "fp8,sage", "--slowdown", "0", "--steps", "9", "--json"
    )
    record = json.loads(done.stdout)
    assert record["build"].endswith(" --target h200 --steps 9 -o h3.h3e")
    passes = record["build"].split("'")[1]
    chosen, typed = resolve(passes, Registry.default())
    assert typed == {"fp8", "sage", "dlo"}
    (dlo,) = (item for item in chosen if item.name == "dlo")
    assert (dlo.resident, dlo.slots) == (record["resident"], record["slots"])  # type: ignore[attr-defined]
    assert record["passes"] == "fp8,sage" and record["clip"]["forwards"] == 8


@pytest.mark.parametrize("objective", [(), ("--throughput",)])
def test_every_plan_for_a_node_can_be_loaded(objective: tuple[str, ...], h3compile) -> None:  # type: ignore[no-untyped-def]
    """Blocks are gathered by the ranks that `sp` makes: an engine without them has nobody to ask."""
    modes = set()
    small = ("--target", "8xb300", "--size", "480x256", "--components", "elsewhere", "--json")
    for count, hbm in itertools.product((1, 2, 3, 4, 6, 8), ("7GiB", "12GiB", "60GiB")):
        node = small if count == 8 else ("--target", "b300", "--gpus", count, *small[2:])
        done: Result = h3compile("plan", *node, "--hbm", hbm, "--host", "300GiB", *objective)
        record = json.loads(done.stdout)
        words = shlex.split(record["build"])
        passes = words[words.index("--passes") + 1] if "--passes" in words else ""
        chosen = {item.name: item for item in resolve(passes, Registry.default())[0]}
        sp, dlo = chosen.get("sp"), chosen.get("dlo")
        ranks = sp.told if isinstance(sp, SequenceParallel) else 1
        mode = (dlo.mode if isinstance(dlo, Dlo) else None) or "local"
        assert ranks == record["gpus_a_clip"] and mode in ("local", "allgather")
        assert mode == "local" or record["weights_gathered_by"] == ranks > 1, record["build"]
        modes.add(mode)
    assert modes == {"local", "allgather"}


def test_slowdown_gives_the_smallest(h3compile) -> None:  # type: ignore[no-untyped-def]
    sizes = []
    for slowdown in ("0%", "10%", "50%"):
        options = ("--size", "480x256", "--components", "elsewhere", "--json")
        done: Result = h3compile("plan", "--target", "h200", "--slowdown", slowdown, *options)
        record = json.loads(done.stdout)
        assert record["step_seconds"] <= record["step_seconds_all_resident"] * (
            1 + float(slowdown[:-1]) / 100 + 1e-6
        )
        sizes.append(record["device_bytes_peak"])
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3


def test_json_of_everything(h3compile, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    output = tmp_path / "plans.json"
    done: Result = h3compile("plan", "--target", "h200", "--json", "-o", output)
    record = json.loads(done.stdout)
    assert record == json.loads(output.read_text(encoding="utf-8"))
    assert record["predicted"] is True
    assert [plan["target"] for plan in record["frontiers"][""]][:1] == ["h200"]
    assert record["all_resident"][""]["resident"] == 50


@pytest.mark.parametrize("options", [(), ("--hbm", "16GiB")])
def test_a_picture_is_written(options: tuple[str, ...], h3compile, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("matplotlib")
    output = tmp_path / "plan.svg"
    done: Result = h3compile("plan", "--target", "rtx-4090", *options, "-o", output)
    assert done.exit_code == 0, done.stderr
    assert output.read_text(encoding="utf-8").startswith("<?xml")


def test_lengths_are_rounded_and_said(h3compile) -> None:  # type: ignore[no-untyped-def]
    done: Result = h3compile("plan", "--target", "h200", "--hbm", "60GiB", "--frames", "350")
    text = spaced(done.stdout)
    assert "350 frames become 362 (15.08 s), 17 n + 5" in text
    assert "362 frames are more than Diffusers and `h3compile run` take (345)" in text
    done = h3compile("plan", "--target", "h200", "--hbm", "60GiB", "--seconds", "15")
    assert "345 frames (14.38 s)" in done.stdout


def test_several_gpus_are_one_node(h3compile) -> None:  # type: ignore[no-untyped-def]
    one: Result = h3compile("plan", "--target", "2xrtx-5090", "--hbm", "31GB", "--json")
    other: Result = h3compile("plan", "--target", "rtx-5090", "--gpus", "2", "--hbm", "31GB", "--json")
    assert one.stdout == other.stdout
    text: Result = h3compile("plan", "--target", "2xrtx-5090", "--hbm", "31GB")
    assert "sp(ulysses=2)" in text.stdout and "--gpus 2" in text.stdout


def test_a_number_that_shares_no_heads_is_a_ring(h3compile) -> None:  # type: ignore[no-untyped-def]
    for count, passes in (("3", "sp(ring=3)"), ("6", "sp(ulysses=2,ring=3)")):
        text: Result = h3compile("plan", "--target", "b300", "--gpus", count, "--slowdown", "2%")
        assert passes in text.stdout and f"--gpus {count}" in text.stdout
    without: Result = h3compile("plan", "--target", "b300", "--gpus", "3", "--allow", "sage")
    assert "sage is left out: sage_attention.default takes no keys in parts" in without.stdout
    slower: Result = h3compile("plan", "--target", "b300", "--gpus", "9", "--slowdown", "2%")
    assert "8 GPUs are faster, 0.39" in slower.stdout and "s a step: 9 pass keys round" in slower.stdout
    assert "planned as if the links of one node joined them" in slower.stdout
    clips: Result = h3compile("plan", "--target", "b300", "--gpus", "3", "--throughput", "--slowdown", "2%")
    assert "1 GPU a clip, 3 clips at once" in clips.stdout


def test_a_table_says_where_components_are(h3compile) -> None:  # type: ignore[no-untyped-def]
    """Memory and seconds of several GPUs count the text encoder and the VAEs as shared, also in the table."""
    told = "components are planned as servers share them: `run` has them on its first GPU"
    elsewhere = "components elsewhere are for servers: `h3compile run` has them on its GPU"
    for options, expected in (
        (("--gpus", "2"), {told}),
        (("--gpus", "2", "--components", "elsewhere"), {elsewhere}),
        ((), set()),
    ):
        done: Result = h3compile("plan", "--target", "h200", *options)
        assert {note for note in (told, elsewhere) if note in spaced(done.stdout)} == expected


def test_a_target_file_is_a_target(h3compile, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from h3compile.targets import find_target, write_target

    write_target(find_target("h200"), tmp_path / "mine.toml")
    done: Result = h3compile("plan", "--target", tmp_path / "mine.toml", "--slowdown", "2%", "--json")
    assert json.loads(done.stdout)["target"] == "h200"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--target", "rtx-409"), "no target is called 'rtx-409': did you mean 'rtx-4090'?"),
        (("--target", "0xh200"), "'0xh200' is no device at all: write h200 or 2xh200"),
        (
            ("--target", "h200", "--hbm", "24GiB", "--slowdown", "2%"),
            "--hbm and --slowdown are two questions: give the one or the other",
        ),
        (("--target", "h200", "--hbm", "24"), "'24' is no amount of memory: write it like 24GiB or 24GB"),
        (("--target", "h200", "--slowdown", "fast"), "'fast' is no slowdown: write a percentage such as 2%"),
        (("--target", "h200", "--slowdown", "nan"), "'nan' is no slowdown: write a percentage such as 2%"),
        (
            ("--target", "h200", "--frames", "400"),
            "400 frames are 16.67 s, and H3 makes clips of 5 to 15 s: ask for 124 to 345 frames; "
            "some servers take 362",
        ),
        (
            ("--target", "h200", "--frames", "124", "--seconds", "5"),
            "--frames and --seconds are both a length: give the one or the other",
        ),
        (("--target", "h200", "--seconds", "20"), "20 s: H3 makes clips of 5 to 15 s"),
        (("--target", "h200", "--size", "1340x768"), "width 1340 is not a multiple of 32: 1344 is near"),
        (
            ("--target", "b300", "--gpus", "3", "--passes", "sage"),
            "sage_attention.default takes no keys in parts, and 3 GPUs for 56 heads are a ring of 3: use "
            "1 or 2 of them, leave that pass out, or --throughput for 3 clips at once",
        ),
        (("--target", "2xb300", "--gpus", "3"), "--target 2xb300 and --gpus 3 differ: give one of them"),
        (("--target", "h200", "--gpus", "0"), "--gpus 0: give at least 1"),
        (
            ("--target", "h200", "--passes", "fp8,dlo"),
            "dlo is what a plan is for: leave it out of --passes",
        ),
        *(
            (
                ("--target", "h200", "--gpus", "2", "--passes", passes),
                "sp is how the GPUs of a plan share a clip: leave it out of --passes and say --gpus N",
            )
            for passes in ("sp(ulysses=2)", "sp(ring=4)", "fp8, sp(ranks=4)", "sp")
        ),
        (
            ("--target", "h200", "--components", "gone"),
            "components cannot be 'gone': choose one of elsewhere, moved, resident, streamed",
        ),
        (("--target", "h200", "--allow", "nvfp4"), "'nvfp4' cannot be allowed: choose among fp8, sage"),
        (
            ("--target", "h200", "-o", "plan.pdf"),
            "cannot write plan.pdf: give a name that ends in .svg, .png, .json",
        ),
    ],
)
def test_a_wrong_question_is_one_line(options: tuple[str, ...], line: str, h3compile) -> None:  # type: ignore[no-untyped-def]
    done: Result = h3compile("plan", *options)
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", f"error: {line}\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--target", "rtx-4090", "--hbm", "4GiB"), ("no plan fits 4.0 GiB of a rtx-4090", "more: it would")),
        (("--target", "rtx-4090", "--hbm", "9GiB", "--host", "8GiB"), ("no plan fits 8.0 GiB of the host",)),
        (("--target", "cpu"), ("cpu has no rate for bandwidth", "--measure")),
        (("--target", "a100", "--passes", "fp8"), ("a100 has no rate for gemm.float8_e4m3fn",)),
        (("--target", "h200", "--passes", "mine"), ("no work table is shipped for the passes 'mine'",)),
    ],
)
def test_what_cannot_be_planned_says_why(options: tuple[str, ...], words: tuple[str, ...], h3compile) -> None:  # type: ignore[no-untyped-def]
    done: Result = h3compile("plan", *options)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


def test_a_host_that_is_too_small_is_said_below_the_frontier(h3compile) -> None:  # type: ignore[no-untyped-def]
    done: Result = h3compile("plan", "--target", "rtx-4090", "--host", "8GiB")
    assert done.exit_code == 0
    assert "nothing fits: no plan fits 8.0 GiB of the host" in done.stdout


@pytest.mark.parametrize(("passes", "expected"), [((), "dlo(hbm=12GiB)"), (("fp8",), "fp8,dlo(hbm=12GiB)")])
def test_build_asks_the_pass_for_what_hbm_says(
    passes: tuple[str, ...],
    expected: str,
    h3compile,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from h3compile import driver

    asked: list[object] = []

    def compiled(**options: object) -> None:
        asked.append(options["passes"])
        raise H3CompileError("enough")

    monkeypatch.setattr(driver, "build", compiled)
    options = ("--passes", *passes) if passes else ()
    done: Result = h3compile("build", "--target", "h200", "--hbm", "12GiB", *options)
    assert (done.exit_code, asked) == (1, [expected]), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seconds", ["5", "10", "15"])
@pytest.mark.parametrize("target", CARDS)
def test_a_cold_plan_takes_less_than_five_seconds_and_no_torch(target: str, seconds: str) -> None:
    script = (
        "import sys; from h3compile.cli.main import application; sys.argv[0] = 'h3compile'\n"
        "try: application()()\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)\n"
    )
    options = ("--target", target, "--seconds", seconds, "--allow", "fp8")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", script, "plan", *options], capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("False\n")
    # One thread: where nothing else runs, this is what the clock shows; here other tests run beside it.
    took = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert took < 5


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ("--target", "rtx-4090", "--hbm", "12GiB"),
            "run it with h3compile run h3.h3e --components streamed ...",
        ),
        (("--target", "h200", "--hbm", "100GiB"), None),
        (("--target", "rtx-4090", "--hbm", "8GiB"), "components elsewhere are for servers"),
        (
            ("--target", "8xb300", "--slowdown", "2%"),
            "--gpus 8 ...; components are planned as servers share them",
        ),
    ],
)
def test_a_plan_says_how_it_is_run_where_that_is_not_as_usual(  # type: ignore[no-untyped-def]
    h3compile, options: tuple[str, ...], told: str | None
) -> None:
    done = h3compile("plan", *options)
    assert done.exit_code == 0, done.stderr
    if told is None:
        assert "run it with" not in done.stdout and "components elsewhere" not in done.stdout
    else:
        assert told in " ".join(done.stdout.split())
